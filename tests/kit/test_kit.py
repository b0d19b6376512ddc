"""The kit is on trial here: what it must find, what it must pass, and what it says."""

from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve, frozen
from hypothesis import Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.stateful import run_state_machine_as_test

from minfer.analysis.drafts import sample_drafts, tally_of
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.runs.page.make import page
from minfer.engine import step
from minfer.policies.builtin import Priority, Shortest, Window
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Preempted, Submit, Tick
from minfer.records.policy import FirstCome, Load, Policy, Rank
from minfer.records.request import Request
from minfer.records.speculation import DEVICE, HOST
from minfer.records.state import EngineState
from minfer.speculate.tally import NO_DRAFTS
from minfer.testing import (
    PolicyError,
    PolicyMachine,
    check_policy,
    configs,
    requests,
    states,
    traces,
)
from minfer.testing.invariants import check
from minfer.testing.kit import SEARCH_SIZE
from minfer.testing.ledger import check_turn
from minfer.testing.stories import AnyStory, HeavyStory
from minfer.testing.story_search import Search
from minfer.testing.trial import Trial
from tests.circles import claimed, examples
from tests.kit import broken
from tests.kit.broken import BROKEN
from tests.kit.example_sound import Meters, TwoClasses
from tests.kit.example_starving import AdaptiveLastIn
from tests.kit.ten_runs import SOUND

LAWS = {
    "AdaptiveLastIn": "bounded starvation",
    "GivesBackTheBiggest": "victim",
    "PaysForPreemption": "requeue_rank",
    "TakesTurns": "hidden state",
    "CountsInPlace": "purity",
    "TossesACoin": "purity",
    "WaitsForQuiet": "no deadlock",
    "WaitsForCompany": "no deadlock",
    "ByUrgency": "never raises",
    "WeighsDeadlines": "rank",
    "SavesBlocks": "budget",
    "Halves": "budget",
    "CountsSeats": "no deadlock",
    "FavoursTheFresh": "bounded starvation",
    "ShortestFirst": "bounded starvation",
    "DraftsLessInLine": "drafts",
    "SharesDrafts": "never raises",
    "LearnsDrafts": "hidden state",
}


# Of each kind the first; then others of its settings.
OF_A_KIND = [
    case
    for case in SOUND
    if case == next(s for s in SOUND if type(s[0]) is type(case[0]))
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "bounds"),
    [*OF_A_KIND, *claimed(case for case in SOUND if case not in OF_A_KIND)],
    ids=lambda value: type(value).__name__,  # a map prints in the order of its hashes
)
def test_what_is_sound_passes(policy: Policy, bounds: dict[str, Any]) -> None:
    check_policy(policy, max_examples=8, **bounds)


def test_who_went_back_may_come_in_again_ahead_of_who_was_first() -> None:
    """By what it had done: r1 gives way, ranks before r0 for it, is let in in the same
    turn, and r0 gives way to it.
    """
    config = EngineConfig(
        num_blocks=7,
        block_size=2,
        max_model_len=32,
        max_num_seqs=3,
        depth=3,
        vocab_size=40,
        policy=Shortest(),
    )
    trial = Trial(config)
    for name in ("r0", "r1", "r2"):
        trial.tell(Submit(Request(id=name, prompt=tuple(range(5)), max_tokens=9)))
    while trial.state.requests or not trial.turns[1:]:
        trial.turn()
    preempted = [
        [reason.id for reason in turn.transition.reasons if isinstance(reason, Preempted)]
        for turn in trial.turns
    ]
    assert ["r1", "r0"] in preempted


@frozen
class AlwaysDisplaces(FirstCome):
    """A waiting request may take the place of the last that runs: the engine asks only in
    order.
    """

    def may_preempt(self, *_: Any) -> bool:
        return True


@pytest.mark.long
def test_no_request_preempts_one_that_is_ahead_whatever_the_policy_says() -> None:
    check_policy(AlwaysDisplaces(), max_examples=30, seed=7)


# Policies that take long to be found; others stay that break the same laws.
SUBTLE = (
    broken.WaitsForCompany,
    broken.CountsSeats,
    broken.ByUrgency,
    broken.FavoursTheFresh,
    broken.ShortestFirst,
    broken.LearnsDrafts,
    broken.SharesDrafts,
    AdaptiveLastIn,
)


@cache
def found(kind: type[Policy]) -> PolicyError:
    """The error of a broken policy."""
    with pytest.raises(PolicyError) as caught:
        check_policy(kind(), seed=2)
    return caught.value


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [*(kind for kind in BROKEN if kind not in SUBTLE), *claimed(SUBTLE)],
)
def test_what_is_broken_is_found_and_the_law_is_named(kind: type[Policy]) -> None:
    error = found(kind)
    assert error.law == LAWS[kind.__name__]
    assert kind.__name__ in str(error)


@pytest.mark.long
def test_a_failure_is_a_short_story_and_a_journal_that_replays(tmp_path: Path) -> None:
    policy, path = AdaptiveLastIn(), tmp_path / "starving.journal"
    with pytest.raises(PolicyError) as caught:
        check_policy(policy, seed=2, save=str(path))
    error = caught.value
    assert error.law == LAWS["AdaptiveLastIn"]
    assert len(error.turns) < 80
    assert "mine waits while" in error.detail
    assert "s: Request id=mine " in str(error)
    journal = read_journal(path, [policy])
    assert journal.config == error.config
    assert tuple(journal.turns()) == error.turns
    assert journal.closed
    assert page("a failure", journal.config, journal.turns()).startswith(b"<!")


@pytest.mark.long
def test_there_is_a_journal_even_if_the_first_question_raises(tmp_path: Path) -> None:
    policy, path = broken.ByUrgency(), tmp_path / "raises.journal"
    with pytest.raises(PolicyError, match="never raises") as caught:
        check_policy(policy, seed=1, save=str(path))
    assert isinstance(caught.value.__cause__, OverflowError)
    assert tuple(read_journal(path, [policy]).turns()) == caught.value.turns


def test_what_cannot_be_written_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "none.journal"
    with pytest.raises(PolicyError) as caught:
        check_policy(broken.CountsInPlace(), seed=1, save=str(path))
    emitted = "no journal was saved: a dict cannot be written"
    assert any(
        emitted in note for note in caught.value.__notes__
    )  # Hypothesis may add its own
    assert not path.exists()


@pytest.mark.parametrize("value", [FirstCome, "fcfs", None])
def test_what_is_no_policy_is_reported(value: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a policy, such as FirstCome\(\), not "):
        check_policy(value)


class Victm(FirstCome):
    def victm(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        del state
        return len(ranks) - 1


def test_a_method_with_nearly_a_name_of_the_protocol_is_a_fault() -> None:
    with pytest.raises(PolicyError, match="engine never calls victm; the protocol") as e:
        check_policy(Victm())
    assert (e.value.law, e.value.method) == ("misnamed method", "victm")


@pytest.mark.long
def test_a_seed_gives_the_same_story_again() -> None:
    first = found(broken.SavesBlocks)
    again = found.__wrapped__(broken.SavesBlocks)
    assert str(first) == str(again)


ENGINE = EngineConfig(
    num_blocks=20,
    block_size=4,
    max_model_len=32,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    vocab_size=40,
)


@pytest.mark.parametrize("hold", [1.0, 4.0])
def test_a_window_needs_as_much_time_as_it_gathers_for(hold: float) -> None:
    policy = Window(wait=4.0, fill=4)
    trial = Trial(evolve(ENGINE, policy=policy), pace=0.1, hold=hold)
    for number in range(
        3
    ):  # the second and the third come so fast that a batch might fill
        trial.tell(Submit(Request(id=f"r{number}", prompt=(1,), max_tokens=1)), 0.5)
    if hold < policy.wait:
        with pytest.raises(PolicyError, match=r"no deadlock: .* idle from 1.00 s on"):
            trial.finish()
    else:
        trial.finish()


@pytest.mark.parametrize("patience", [10.0, 420.0])
def test_shortest_first_needs_the_time_that_work_is_worth(patience: float) -> None:
    request = Request(id="mine", prompt=(1,), max_tokens=20)
    trial = Trial(evolve(ENGINE, policy=Shortest(20.0)), pace=5.0, patience=patience)
    if patience < 20 * 20:
        with pytest.raises(
            PolicyError, match="bounded starvation: mine waits while 9 later ones"
        ):
            trial.compete(request, short=True)
    else:
        trial.compete(request, short=True)
        trial.finish()


@frozen
class InTens(FirstCome):
    """Later ones first, but only within each ten: nine can go before a request, and no
    more.
    """

    def start(self) -> int:
        return 0

    def rank(self, state: int, request: Request, time: float) -> tuple[Rank, int]:
        del request, time
        return (float(state // 10), -float(state)), state + 1


@pytest.mark.long
def test_starvation_is_counted_in_those_who_went_first() -> None:
    check_policy(InTens(), seed=1, max_examples=30, overtakes=9)
    with pytest.raises(PolicyError, match="bounded starvation"):
        check_policy(InTens(), seed=3, overtakes=2)


@frozen
class NoBudget(FirstCome):
    """Takes nothing while blocks are few: an idle engine would stay idle, if that were
    heeded.
    """

    def budget(self, state: Any, load: Load) -> int:
        del state
        return max(0, min(load.budget, 4 * (load.available - 8)))


@pytest.mark.long
def test_an_engine_cannot_be_kept_from_working_by_a_budget_of_nothing() -> None:
    check_policy(NoBudget(), max_examples=30, seed=1)


class Duck:
    """Has the protocol's methods, and is no subclass of anything; its ranks differ in
    length.
    """

    def start(self) -> int:
        return 0

    def rank(self, state: int, _: Request, time: float) -> tuple[Rank, int]:
        return (time,) if state % 2 else (time, 1), state + 1

    def requeue_rank(
        self, _: int, rank: Rank, __: Request, ___: float, ____: int
    ) -> Rank:
        return rank[:1]

    def admit_from(self, _: int, __: Load) -> float:
        return float("-inf")

    def admitted(self, state: int, _: Rank, __: Request, ___: Load) -> int:
        return state

    def defer(self, state: int, _: Request, __: Load, ___: int) -> tuple[bool, int]:
        return False, state

    def ended(self, state: int, _: Request, __: int, ___: bool) -> int:
        return state

    def victim(self, _: int, __: tuple[Rank, ...]) -> int:
        return 1

    def may_preempt(self, _: int, __: Rank, ___: Rank) -> bool:
        return False


class WithBudget(Duck):
    def budget(self, _: int, load: Load) -> int:
        return min(load.budget, 5)


class WithDrafts(WithBudget):
    def drafts(self, _: int, __: Load, ___: int) -> int:
        return 1


class WholeDuck(WithDrafts):
    def adapter_passes(self, _: int, __: Load) -> int:
        return 4


@pytest.mark.long
def test_any_object_with_the_methods_will_do() -> None:
    check_policy(WholeDuck(), max_examples=20)
    for lacks, kind in (
        ("budget", Duck),
        ("drafts", WithBudget),
        ("adapter_passes", WithDrafts),
    ):
        with pytest.raises(PolicyError, match=f"no attribute '{lacks}'"):
            check_policy(kind(), max_examples=60, seed=7)


class Machine(PolicyMachine):
    policy = TwoClasses()


class Broken(PolicyMachine):
    policy = broken.PaysForPreemption()


@pytest.mark.long
def test_the_machine_runs_a_policy_under_rules() -> None:
    few_examples = settings(max_examples=10, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(Machine, settings=few_examples)
    more_examples = settings(few_examples, max_examples=100, phases=[Phase.generate])
    with pytest.raises(PolicyError, match="requeue_rank"):
        run_state_machine_as_test(Broken, settings=more_examples)


@examples(6)
@given(states(Priority()), requests("new"))
def test_states_are_reached_and_go_on(
    config_and_state: tuple[EngineConfig, EngineState], request: Request
) -> None:
    config, state = config_and_state
    check(config, state)
    events = (Tick(state.time + 1), Submit(request))
    turn = step(config, state, events)
    check(config, turn.state)
    check_turn(config, state, events, turn)


@examples(6)
@given(configs(FirstCome()), traces(most=5))
def test_traces_say_who_comes_and_who_gives_up(config: EngineConfig, trace: Any) -> None:
    names = [event.request.id for _, event in trace if isinstance(event, Submit)]
    assert len(trace) <= 5
    assert len(set(names)) == len(names)
    assert all(gap >= 0 and isinstance(event, Submit | Cancel) for gap, event in trace)
    trial = Trial(config)
    for gap, event in trace:
        trial.tell(event, gap)
    trial.finish()
    assert not trial.state.requests


@pytest.mark.long
def test_stories_are_tight() -> None:
    """Sound policies would pass stories in which nothing ever happens."""
    preempted = cancelled = 0
    drafted = {HOST: NO_DRAFTS, DEVICE: NO_DRAFTS}

    @settings(max_examples=SEARCH_SIZE, deadline=None, database=None)
    @given(configs(FirstCome()), traces())
    def lived(config: EngineConfig, trace: Any) -> None:
        nonlocal preempted, cancelled
        trial = Trial(config)
        for gap, event in trace:
            trial.tell(event, gap)
        trial.turn(trial.now)
        reasons = [reason for turn in trial.turns for reason in turn.transition.reasons]
        cancelled += any(
            getattr(reason, "reason", "") == "cancelled" for reason in reasons
        )
        trial.compete(
            Request(id="mine", prompt=(1, 2), max_tokens=9)
        )  # cancels who is left
        trial.finish()
        reasons = [reason for turn in trial.turns for reason in turn.transition.reasons]
        preempted += any(isinstance(reason, Preempted) for reason in reasons)
        if config.speculation is not None:
            judgements = (
                sample_drafts(t.before, t.events, t.transition) for t in trial.turns
            )
            tally = tally_of(chain.from_iterable(judgements))
            drafter = config.speculation.drafter
            drafted[drafter] = drafted[drafter].plus(tally)

    for seed in range(100 // SEARCH_SIZE):  # the stories of one are much alike
        hypothesis_seed(seed)(lived)()
    for drafts in drafted.values():
        assert 0 < sum(drafts.accepted) < sum(drafts.proposed)
        assert drafts.rows >= 20
        assert len(drafts.proposed) > 1
    assert preempted >= 5  # of 100
    assert cancelled >= 5


@examples(10)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(1, 9)), min_size=4),
    st.sampled_from((0.3, 0.5, 0.8)),
)
def test_the_sound_example_keeps_its_guarantee(
    wants: list[tuple[bool, int, int]], share: float
) -> None:
    """All are in line from the start, so both classes wait until one has nothing left."""
    policy, line = TwoClasses(share), []
    state = policy.start()
    for number, (batch, prompt, max_tokens) in enumerate(wants):
        request = Request(
            id="r", prompt=(1,) * prompt, max_tokens=max_tokens, priority=int(batch)
        )
        rank, state = policy.rank(state, request, 0.0)
        line.append((rank, number, batch, prompt + max_tokens))
    had, left = (
        [0, 0],
        [sum(batch is is_batch for batch, _, _ in wants) for is_batch in (False, True)],
    )
    for _, _, batch, cost in sorted(line):
        if not all(left):
            break
        had[batch] += cost
        left[batch] -= 1
        assert abs(had[0] / share - had[1] / (1 - share)) <= 18 / share + 18 / (1 - share)
    assert policy.rank(Meters(5.0, (1.0, 9.0)), request, 0.0)[0][0] in (5.0, 9.0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 6])  # in a long search, these lack some lengths
def test_rare_requests_and_loads_come_in_every_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories = list[AnyStory]()
    monkeypatch.setattr(Search, "_try", lambda _, story: stories.append(story))
    check_policy(FirstCome(), seed=seed, own_process=False)
    heavy = [story for story in stories if isinstance(story, HeavyStory)]
    groups = [group for story in heavy for group in story.groups]
    lengths = {len(group.request.prompt).bit_length() for group in groups}
    assert lengths.issuperset(range(1, 17))
    assert max(group.count * group.request.n for group in groups) > 300
    assert len(set(heavy)) > 50
