"""Tokens and log-probabilities come back to whom they belong."""

from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.contract import LogitsError
from minfer.effects.execution.packing.pack_plan import Draw, Forward
from minfer.effects.execution.packing.read_back import (
    DISCARDED_TOKEN,
    HostSlot,
    SlotRing,
    results,
)
from minfer.effects.execution.running import own_model
from minfer.effects.execution.running.plan_launcher import LaunchedPlan
from minfer.effects.models.architecture.model import forward as model_forward
from minfer.records.messages import Discarded, Executed, Preempted
from minfer.records.plan import Plan, PrefillTokens
from minfer.records.request import Request, SamplingParams
from tests.circles import claimed
from tests.core.executing import opened
from tests.effects.execution.tiny_engine import (
    GREEDY,
    VOCAB,
    Model,
    Run,
    Tokens,
    asking,
    check_scores,
    requests,
)

pytestmark = pytest.mark.usefixtures("device_kind")


@pytest.mark.long
@pytest.mark.parametrize("depth", [2, *claimed([1, 3])])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 3}, {"num_blocks": 9}],
    ids=str,
)
def test_some_ask_for_log_probabilities(
    model: Model, reference: Tokens, settings: dict[str, int], depth: int
) -> None:
    run, wanted_requests = (
        Run.start(model, **settings, depth=depth),
        requests(0),
    )
    assert run.serve(asking(wanted_requests), arrival_gap=depth % 2) == reference
    check_scores(model, run, asking(wanted_requests))
    if settings == {"num_blocks": 9}:
        assert run.count(Preempted)


@pytest.mark.long
def test_log_probabilities_of_several_samples(model: Model) -> None:
    sampling = SamplingParams(temperature=1.5, top_k=5, n=4, logprobs=2)
    request = Request(
        id="n", prompt=tuple(range(9)), max_tokens=12, n=4, sampling=sampling, seed=11
    )
    run = Run.start(model)
    run.serve([request])
    check_scores(model, run, [request])
    assert max(logprobs.rank for scores in run.scores.values() for logprobs in scores) > 1


@pytest.mark.long
def test_log_probabilities_where_steps_fail(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 9 == 0:
            raise MemoryError
        return model_forward(*arguments)

    monkeypatch.setattr(own_model, "forward", failing)
    run, wanted_requests = Run.start(model, num_blocks=20), asking(requests(0))
    assert run.serve(wanted_requests, arrival_gap=1) == reference
    check_scores(model, run, wanted_requests)
    assert run.count(Discarded)


@pytest.mark.long
def test_log_probabilities_are_greedy_first_and_cost_only_those_steps(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.start(model, num_blocks=200)
    executor: Any = run.driver.executor
    steps, step = list[bool](), executor.runner.run

    def seen(forward: Forward, slot: HostSlot, *saves: Any) -> None:
        steps.append(forward.shape.scored)
        step(forward, slot, *saves)

    monkeypatch.setattr(executor.runner, "run", seen)
    long = [
        Request(id=str(i), prompt=(i + 2,), max_tokens=40, sampling=GREEDY)
        for i in range(5)
    ]
    solo = run.serve(long)
    assert not any(steps)
    assert not run.scores
    steps.clear()
    short = evolve(long[0], id="asks", max_tokens=7, sampling=evolve(GREEDY, logprobs=1))
    repeated = run.serve([*(evolve(r, id="again-" + r.id) for r in long), short])
    assert all(repeated["again-" + r.id, 0] == solo[r.id, 0] for r in long)
    assert steps == [True] * steps.count(True) + [False] * steps.count(False)
    assert 7 <= steps.count(True) < 12
    reported = run.scores["asks", 0]
    assert {logprobs.rank for logprobs in reported} == {1}
    assert [logprobs.likeliest for logprobs in reported] == [
        (token,) for token in repeated["asks", 0]
    ]
    assert all((logprobs.logprob,) == logprobs.logprobs for logprobs in reported)


def prefill(step: int, name: str, token: int) -> Plan:
    """A plan that gives row 0 to a request with a prompt of one token."""
    request = Request(id=name, prompt=(token,), max_tokens=3, sampling=GREEDY)
    fills, opens = (PrefillTokens(0, request.prompt),), (opened(request, (step,)),)
    return Plan(step, (0,), (0,), (0,), (1,), (1,), fills, opens)


def test_logits_that_are_not_finite_name_the_owner_at_launch(
    model: Model,
) -> None:
    embed = model.weights.embed.clone()
    embed[VOCAB - 1] = torch.nan
    broken = Model(model.theirs, model.spec, evolve(model.weights, embed=embed))
    executor: Any = Run.start(broken).driver.executor
    launched_plans = [
        LaunchedPlan(prefill(0, "bad", VOCAB - 1)),
        LaunchedPlan(prefill(1, "next", 5)),
    ]
    for launched in launched_plans:
        executor._attempt(launched, executor.launcher.launch)
    with pytest.raises(LogitsError, match="for request 'bad' "):
        executor.launcher.results(launched_plans[0], receives=False)
    request = Request(id="next", prompt=(5,), max_tokens=3, sampling=GREEDY)
    expected = model.expected(request)[0]
    results = executor.launcher.results(launched_plans[1], receives=False)
    assert results.yields == ((expected,),)


# --- slots ------------------------------------------------------------------------------


def slot_with(drawn: list[int], draw: Draw) -> HostSlot:
    slot = HostSlot.of(8, 8, torch.device("cpu"))
    slot.begin(draw, scored=False)
    slot.fetch(torch.tensor(drawn, dtype=torch.int32), torch.empty(0), len(drawn))
    return slot


def test_tokens_are_put_where_they_belong() -> None:
    plan = Plan(3, (1, 2, 3), (0, 1, 2), (4, 5, 6), (1, 2, 1), (1, 0, 1))
    slot = slot_with([7, 0, 0, 8], Draw([2, 0], [None, None], [0, 3]))
    assert results(plan, [slot], VOCAB) == Executed(3, ((8,), (), (7,)))
    steady = slot_with([7, 8, 9, 0], Draw([0, 1, 2], [None] * 3))
    assert results(plan, [steady], VOCAB) == Executed(3, ((7,), (8,), (9,)))
    assert results(plan, [slot], VOCAB, reassigned=[1]).yields == (
        (8,),
        (DISCARDED_TOKEN,),
        (7,),
    )


def test_tokens_of_several_forwards_are_put_together() -> None:
    plan = Plan(3, (1, 2), (0, 1), (4, 5), (1, 1), (1, 1))
    slots = [
        slot_with([token], Draw([place], [None], [0]))
        for place, token in ((1, 4), (0, 5))
    ]
    assert results(plan, slots, VOCAB).yields == ((5,), (4,))


def test_slots_take_turns() -> None:
    ring = SlotRing(3, 8, 8, torch.device("cpu"))
    turns = [ring.next() for _ in range(7)]
    assert len({id(slot) for slot in turns[:3]}) == 3
    assert turns[3:6] == turns[:3]
    assert turns[6] is turns[0]
