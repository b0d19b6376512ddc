"""How many prefill tokens a step takes beside decode rows."""

import pytest
from attrs import evolve

from minfer.planning.prefill_budget import step_load
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Preempted, QueueBlocked, Submit
from minfer.records.policy import FirstCome, Load
from minfer.records.step_times import StepTimes
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation
from minfer.values.checks import ConfigError
from tests.core.test_engine import CONFIG, Bench, ask

ROOMY = evolve(CONFIG, num_blocks=400, max_model_len=256, max_num_batched_tokens=64)
TARGET = evolve(ROOMY, itl_target=2.0, min_prefill_tokens=4)
BY_LOAD = evolve(TARGET, itl_target=0.0)
# a decode step takes a second, and each prefill token an eighth more
KNOWN = StepTimes(decode=1.0, token=0.125, tokens=64)


def decoding(config: EngineConfig, rows: int = 1, times: StepTimes = KNOWN) -> Bench:
    """A bench whose rows decode."""
    bench = Bench(config)
    bench.give(*(Submit(ask("d" * (row + 1), 4, 100)) for row in range(rows)))
    for _ in range(3):
        bench.turn()
    bench.state = evolve(bench.state, step_times=evolve(times, began=bench.clock))
    return bench


def chunks(bench: Bench) -> list[int]:
    """The prefill tokens of each plan that was made."""
    return [sum(len(fill.tokens) for fill in plan.fills) for plan in bench.plans]


def load_of(bench: Bench, *waiting: int) -> Load:
    """The load that the policy gets if prompts of these lengths wait."""
    for number, length in enumerate(waiting):
        bench.give(Submit(ask("w" * (number + 1), length, 9)))
    return step_load(bench.config, bench.state, (), set())


def test_what_fits_the_target_is_taken_in_multiples() -> None:
    bench = decoding(TARGET)
    load = load_of(bench, 90)
    assert (load.decoding, load.prompt_tokens) == (1, 90)
    assert load.budget == 1 + 8, "a second is left of the target: eight tokens"
    assert load.budget_within(1.99) == 1 + 4, "seven tokens would fit: one multiple"
    assert load.budget_within(4.0) == 1 + 24


def test_a_step_keeps_to_the_target_and_prompts_get_ahead() -> None:
    bench = decoding(evolve(TARGET, itl_target=0.5))
    bench.turn(Submit(ask("prompt", 90, 9)))
    before = len(bench.plans)
    bench.drain()
    assert chunks(bench)[before - 1 : before + 22] == [4] * 22 + [2]


def test_without_decode_rows_the_whole_budget_is_taken() -> None:
    bench = Bench(evolve(TARGET, itl_target=0.5))
    bench.give(Submit(ask("prompt", 90, 9)))
    bench.drain()
    assert chunks(bench)[:2] == [64, 26]


def test_rows_that_have_their_last_token_planned_do_not_count() -> None:
    bench = decoding(evolve(TARGET, depth=2), rows=2)
    run_ids = {*bench.state.running.run_ids}
    assert step_load(bench.config, bench.state, (), run_ids).decoding == 0
    bench.give(Submit(ask("w", 90, 9)))
    assert step_load(bench.config, bench.state, (), run_ids).budget == 64


@pytest.mark.parametrize(
    ("rows", "waiting", "prefill"),
    [
        (1, (20,), 8),  # eight for the row
        (3, (20,), 24),  # eight for each
        (1, (240, 100, 9), 60),  # a twelfth of three prompts like the first
        (4, (240, 100, 9, 7, 8), 60),  # of the step's limit: 64
    ],
)
def test_by_the_load_prefill_keeps_up(
    rows: int, waiting: tuple[int, ...], prefill: int
) -> None:
    load = load_of(decoding(BY_LOAD, rows), *waiting)
    assert load.budget == rows + prefill


def test_by_the_load_a_step_without_prefill_may_take_a_little_longer() -> None:
    cheap = evolve(KNOWN, token=0.01)
    load = load_of(decoding(BY_LOAD, times=cheap), 90)
    assert load.budget == 1 + 12, "0.15 s are 15 tokens, of which 12 are a multiple"


def test_durations_are_measured_from_when_the_device_began() -> None:
    bench = Bench(TARGET)
    bench.give(Submit(ask("a", 4, 8)))
    bench.clock += 10
    bench.turn()  # the prompt's, alone
    assert bench.state.step_times == StepTimes(began=12.0)
    bench.turn()
    assert bench.state.step_times == StepTimes(began=13.0, decode=1.0)
    bench.drain()
    bench.clock += 100
    bench.give(Submit(ask("b", 4, 8)))
    assert bench.state.step_times.began == bench.clock, "idle time is not a step's"
    assert bench.state.step_times.decode == 1.0


def test_nothing_is_measured_without_a_target() -> None:
    bench = Bench(ROOMY)
    bench.give(Submit(ask("a", 4, 8)))
    bench.drain()
    assert bench.state.step_times == StepTimes()
    load = load_of(decoding(ROOMY), 90)
    assert (load.budget, load.budget_within(0.001), load.step_times) == (64, 64, None)


class Quick(FirstCome):
    """A policy with a target of its own."""

    def budget(self, _: object, load: Load) -> int:
        return load.budget_within(3.0)


def test_a_policy_sets_a_target_of_its_own() -> None:
    bench = decoding(evolve(BY_LOAD, policy=Quick()))
    bench.turn(Submit(ask("prompt", 90, 9)))
    assert chunks(bench)[-1] == 16


URGENT = evolve(TARGET, itl_target=0.5, policy=Priority(), max_num_seqs=8)


def test_a_row_in_prefill_is_preempted_for_the_tokens_of_a_bounded_step() -> None:
    bench = decoding(URGENT)
    bench.turn(Submit(ask("long", 90, 9)))
    bench.turn(Submit(ask("urgent", 4, 9, priority=-1)))
    assert [reason.id for reason in bench.reasons_of(Preempted)] == ["long"]
    assert chunks(bench)[-1] == 4
    bench.drain()


def test_no_decode_row_is_preempted_for_its_token_of_a_bounded_step() -> None:
    bench = decoding(URGENT)
    bench.turn(Submit(ask("long", 30, 9, priority=-1)))
    bench.turn(Submit(ask("urgent", 4, 9, priority=-2)))
    bench.drain()
    assert not bench.reasons_of(Preempted)
    assert QueueBlocked("urgent", 0, "budget") in bench.reasons_of(QueueBlocked)


def test_settings_are_checked() -> None:
    for changes in ({"itl_target": -1.0}, {"min_prefill_tokens": 0}):
        with pytest.raises(ConfigError):
            evolve(CONFIG, **changes)


GPU = CostModel(
    name="7B", decode=((1, 4e-3),), mixed=4e-3, token=19e-6, sequence=19e-6, context=2e-8
)


@pytest.mark.parametrize(("target", "longest"), [(0.008, 0.0081), (0.012, 0.0121)])
def test_gaps_between_tokens_keep_to_the_target(target: float, longest: float) -> None:
    """A prompt every 0.1 s, beside seven rows that decode."""
    config = EngineConfig(num_blocks=2000, max_model_len=1024, itl_target=target)
    arrivals = [(0.0, ask(f"d{n}", 64, 400)) for n in range(7)]
    prompts = [tuple(range(1000 * n, 1000 * n + 512)) for n in range(12)]
    arrivals += [
        (0.1 + n / 10, ask(f"p{n}", prompt=prompt, max_tokens=16))
        for n, prompt in enumerate(prompts)
    ]
    gaps = list[float]()
    for turn in Simulation(config, Simulated(), GPU, arrivals).turns():
        before, state = turn.before, turn.transition.state
        if before.inflight and before.inflight[0].fills and 0.4 < state.time < 1.4:
            gaps.append(state.time - before.time)
    assert 0.85 * target < max(gaps) <= longest
