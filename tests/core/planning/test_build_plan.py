"""What was decided about a step, as a plan."""

from attrs import evolve

from minfer.planning.build_plan import ones
from minfer.policies.builtin import Priority
from minfer.records.messages import Submit
from minfer.records.request import Continuation
from minfer.sampling.beam import BeamRound
from tests.core.test_engine import CONFIG, Bench, ask


def test_ones_are_kept() -> None:
    assert ones(3) == (1, 1, 1)
    assert ones(3) is ones(3)
    assert ones(0) == ()


def test_a_step_is_counted_and_names_who_takes_part_in_the_order_of_rank() -> None:
    bench = Bench(evolve(CONFIG, depth=2, policy=Priority()))
    bench.give(Submit(ask("late", 4, 9, priority=2)))
    bench.give(Submit(ask("early", 4, 9, priority=1)))
    bench.turn()
    bench.turn()
    assert [name for name, _ in bench.state.running.ids] == ["early", "late"]
    plan = bench.plans[-1]
    assert plan.run_ids == (1, 0)
    assert plan.rows == (1, 0)
    assert plan.num_scheduled_tokens == plan.max_sampled_tokens == (1, 1)
    assert [p.step for p in bench.plans] == list(range(len(bench.plans)))
    assert bench.state.next_step == len(bench.plans)


def test_first_inputs_come_from_history_and_a_row_is_opened_once() -> None:
    bench = Bench()
    request = ask("a", 20, 3)
    bench.give(Submit(request))
    bench.drain()
    first, second, *rest = bench.plans
    assert [fill.tokens for plan in (first, second) for fill in plan.fills] == [
        request.prompt[:16],
        request.prompt[16:],
    ]
    assert (first.starts, second.starts) == ((0,), (16,))
    assert (first.max_sampled_tokens, second.max_sampled_tokens) == ((0,), (1,))
    assert [len(plan.opens) for plan in bench.plans] == [1] + [0] * (len(bench.plans) - 1)
    assert not any(plan.fills for plan in rest)
    assert first.opens[0].tables[0][:5] == (0, 1, 2, 3, 4)


def test_a_resumed_sample_draws_as_the_one_that_it_was() -> None:
    bench = Bench()
    bench.give(Submit(evolve(ask("a", 9, 2), n=2, first_sample=3)))
    bench.drain()
    rows = {opened.name: opened for plan in bench.plans for opened in plan.opens}
    assert [rows["a", i].sampling.sample for i in (0, 1)] == [3, 4]


def test_the_prompt_of_a_beam_is_that_of_its_search() -> None:
    bench, search = Bench(), BeamRound(id="search", width=2, prompt=4, most=9)
    bench.give(
        Submit(ask("beam", 9, 1, continuation=Continuation(beam_round=search))),
        Submit(ask("other", 9, 1)),
    )
    bench.drain()
    opened = {one.name[0]: one.prompt for plan in bench.plans for one in plan.opens}
    assert opened == {"beam": 4, "other": 9}
