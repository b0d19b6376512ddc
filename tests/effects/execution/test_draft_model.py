"""Drafts of a draft model: right where it draws as its target does, and else harmless."""

from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import PrefillWords
from minfer.effects.execution.running.draft_model import DraftModel, LoadedDraft
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.records.messages import Discarded
from minfer.records.request import SamplingParams
from tests.circles import claimed
from tests.effects.execution.drafting import drafting, speculation
from tests.effects.execution.test_verified import CONFIG, WANTED, Hand, check
from tests.effects.execution.tiny_engine import (
    GREEDY,
    VOCAB,
    Model,
    Tokens,
    asking,
    check_scores,
    requests,
)
from tests.effects.tiny_model import with_attention, with_feed_forward

pytestmark = pytest.mark.usefixtures("device_kind")


def same(model: Model) -> LoadedDraft:
    """The target itself."""
    return LoadedDraft(model.spec, model.weights)


def other(model: Model, **changes: Any) -> LoadedDraft:
    """Another model, with these changes of its sizes."""
    attending = with_attention(model.spec, hidden_size=16, heads=2, kv_heads=1)
    smaller = with_feed_forward(attending, hidden_size=16, intermediate_size=24)
    spec = evolve(smaller, hidden_size=16, initializer_range=0.4, **changes)
    return LoadedDraft(spec, random_weights(spec, "float32", 1))


def near(model: Model) -> LoadedDraft:
    """The target, a little off."""
    noise = torch.randn(model.weights.embed.shape, generator=torch.manual_seed(0))
    embed = model.weights.embed + 0.02 * noise
    return LoadedDraft(model.spec, evolve(model.weights, embed=embed))


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1), SamplingParams(top_p=0.8)]
)
@pytest.mark.parametrize(
    ("depth", "drafts"), [(1, 5), (2, 3), *claimed([(3, 1), (2, 8)])]
)
def test_the_target_as_its_own_draft_is_always_right(
    model: Model, sampling: SamplingParams, depth: int, drafts: int
) -> None:
    wanted_requests = [
        evolve(r, sampling=sampling, max_tokens=30, stop_ids=frozenset())
        for r in requests(2, 6)
    ]
    expected = {(r.id, 0): model.expected(r) for r in wanted_requests}
    run, tally = drafting(model, same(model), drafts, depth=depth)
    assert run.serve(wanted_requests, arrival_gap=depth % 2) == expected
    assert tally.accepted == tally.proposed > 60


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [VOCAB - 40, VOCAB + 27])
def test_another_vocabulary_changes_nothing(
    model: Model, reference: Tokens, vocab_size: int
) -> None:
    run, tally = drafting(model, other(model, vocab_size=vocab_size), 4, depth=2)
    assert run.serve(requests(0)) == reference
    assert not run.count(Discarded)
    assert tally.accepted < tally.proposed


@pytest.mark.long
def test_log_probabilities_are_those_of_the_target(
    model: Model, reference: Tokens
) -> None:
    run, _ = drafting(model, other(model), 3)
    assert run.serve(asking(requests(0)), arrival_gap=1) == reference
    check_scores(model, run, asking(requests(0)))


@pytest.mark.long
def test_what_is_drafted_next_follows_drafts_that_all_stood(model: Model) -> None:
    """Its cache lacks the last of them, whose token the step brings along."""
    hand = Hand.start(model, WANTED, modelled(), same(model))
    for count in (3, 1, 2, 3):
        hand.go_on(dict.fromkeys(range(len(WANTED)), count))
        result = hand.collect()
        sure = [0, 1, 3]  # penalties count drafts only once they stand
        assert [len(result.yields[row]) for row in sure] == [count + 1] * 3
        hand.settle()
    check(hand, [model.expected(request) for request in WANTED])


@pytest.mark.long
def test_rows_that_draft_beside_such_as_do_not(model: Model) -> None:
    hand = Hand.start(model, WANTED, modelled(), same(model))
    answers = [model.expected(request) for request in WANTED]
    steps: list[dict[int, list[int] | int]] = [
        {0: 3},
        {1: 2, 0: answers[0][5:6]},
        {},
        {3: 2, 0: [0, 0]},
        {1: 4},
    ]
    for drafts in steps:
        hand.go_on(drafts)
        result = hand.collect()
        for row, count in drafts.items():
            if isinstance(count, int):
                assert len(result.yields[row]) == count + 1
        hand.settle()
    check(hand, answers)


@pytest.mark.long
def test_what_its_cache_lacks_costs_nothing_but_drafts(model: Model) -> None:
    """It takes no part in steps without drafts."""
    hand = Hand.start(model, WANTED, modelled(), same(model))
    hand.executor.launcher.catch_up = None
    draft = hand.executor.runner.draft_model
    assert draft is not None
    draft.cache.data.zero_()  # what is lacking is not what happened to be there
    without(hand, 4)
    draft = hand.executor.runner.draft_model
    assert draft is not None
    draft.cache.data.fill_(torch.nan)  # or what was there before might do
    hand.go_on({0: 4, 1: 4})
    assert sum(map(len, hand.collect().yields)) < 12
    check(hand, [model.expected(request) for request in WANTED])


@pytest.mark.long
@pytest.mark.parametrize("plain", [1, 2, 4])
@pytest.mark.parametrize("flying", [0, 1])
def test_it_catches_up_before_rows_draft_again(
    model: Model, plain: int, flying: int
) -> None:
    hand = Hand.start(model, WANTED, modelled(), same(model))
    for _ in range(2):
        without(hand, plain)
        for _ in range(flying):
            hand.go_on({})
        hand.go_on({0: 3, 1: 3})
        for _ in range(flying):
            hand.collect()
        assert list(map(len, hand.collect().yields)) == [4, 4, 1, 1]
        hand.settle()
    check(hand, [model.expected(request) for request in WANTED])


@pytest.mark.long
def test_it_catches_up_in_forwards_of_what_a_step_may_take(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand.start(model, WANTED, modelled(), same(model))
    assert hand.executor.launcher.catch_up is not None
    hand.executor.launcher.catch_up.budget = 5
    without(hand, 4)
    budgets, absorb = list[int](), DraftModel.absorb

    def noting(
        self: DraftModel, shape: StepShape, prefill: PrefillWords[torch.Tensor]
    ) -> None:
        budgets.append(shape.tokens)
        absorb(self, shape, prefill)

    monkeypatch.setattr(DraftModel, "absorb", noting)
    for _ in range(2):
        hand.go_on({0: 1, 1: 1, 3: 1})
        assert list(map(len, hand.collect().yields)) == [2, 2, 1, 2]
        hand.settle()
    prompts = sum(len(WANTED[row].prompt) for row in (0, 1, 3))
    assert sum(budgets) == prompts + 3 * 5
    assert budgets == [5] * (sum(budgets) // 5) + [sum(budgets) % 5]
    check(hand, [model.expected(request) for request in WANTED])


def without(hand: Hand, steps: int) -> None:
    """Steps without drafts."""
    for _ in range(steps):
        hand.go_on({})
        hand.collect()
        hand.settle()


def modelled() -> Any:
    """A configuration with a draft model."""
    return evolve(CONFIG, speculation=speculation("device", 6))


@pytest.mark.long
def test_a_draft_model_that_is_not_finite_is_wrong_and_no_more(
    model: Model, reference: Tokens
) -> None:
    bad = other(model)
    weights: Any = bad.weights
    embed = torch.full_like(weights.embed, torch.nan)
    run, tally = drafting(model, evolve(bad, weights=evolve(weights, embed=embed)), 3)
    assert run.serve(requests(0)) == reference
    assert tally.accepted < tally.proposed / 2


@pytest.mark.long
def test_drafts_of_both_in_one_step(model: Model) -> None:
    hand = Hand.start(model, WANTED, modelled(), same(model))
    answers = [model.expected(request) for request in WANTED]
    hand.go_on({0: 3, 1: answers[1][1:3], 3: [(answers[3][1] + 1) % VOCAB] * 2})
    assert list(map(len, hand.collect().yields)) == [4, 3, 1, 1]
    check(hand, answers)
