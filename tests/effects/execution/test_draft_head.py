"""Drafts of heads change no token, and are those of a head that sees everything."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from attrs import evolve

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.execution.warming.dummy_runner import DummyRunner
from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.records.messages import Discarded
from minfer.records.request import Request
from minfer.records.speculation import REJECTION
from tests.effects.execution.drafting import drafting
from tests.effects.execution.heads import (
    Eagle3Reference,
    MtpReference,
    Noted,
    Reference,
    drawn_head,
    eagle3_of,
    echoing,
    loaded,
    mtp_of,
    note_drafts,
    reference_drafts,
    repeating,
    with_head,
)
from tests.effects.execution.tiny_engine import (
    GREEDY,
    Model,
    Tokens,
    asking,
    check_scores,
    requests,
)

Asked = Sequence[Request]
pytestmark = pytest.mark.usefixtures("device_kind")


@pytest.mark.parametrize("kind", [eagle3_of, mtp_of])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_random_head_changes_nothing(
    model: Model,
    reference: Tokens,
    kind: Callable[[ModelSpec], HeadSpec],
    depth: int,
) -> None:
    head = kind(model.spec)
    run, tally = drafting(with_head(model, head), loaded(head), 3, depth=depth)
    assert run.serve(asking(requests(0)), arrival_gap=depth % 2) == reference
    check_scores(model, run, asking(requests(0)))
    assert not run.count(Discarded)
    assert tally.accepted < tally.proposed


def check_noted(
    noted: list[Noted], reference: Reference, model: Model, tokens: Tokens, asked: Asked
) -> int:
    """Drafts are those of the reference; returns how many rows drafted."""
    sequences = {r.prompt: [*r.prompt, *tokens[r.id, 0]] for r in asked}
    compared = 0
    for drafted in noted:
        sequence = sequences[drafted.prompt]
        if drafted.position < len(sequence):
            known, count = sequence[: drafted.position + 1], len(drafted.drafts)
            assert drafted.drafts == reference_drafts(reference, model, known, count)
            compared += 1
    return compared


def asked_greedily() -> list[Request]:
    """Requests that share no prefix."""
    return [
        evolve(r, prompt=(i + 2, *r.prompt), sampling=GREEDY, stop_ids=frozenset())
        for i, r in enumerate(requests(3, 8))
    ]


ROOMY: Final = {"max_num_batched_tokens": 24, "num_blocks": 128}


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_those_of_a_head_that_sees_the_whole_sequence(
    model: Model, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Whatever the chunks of prompts, and the rows beside."""
    head = eagle3_of(model.spec)
    weights, noted, asked = drawn_head(head), note_drafts(monkeypatch), asked_greedily()
    run, _ = drafting(
        with_head(model, head), LoadedHead(weights), 3, depth=depth, **ROOMY
    )
    tokens = run.serve(asked, arrival_gap=1)
    reference = Eagle3Reference.of(model, head, weights)
    assert check_noted(noted, reference, model, tokens, asked) > 40


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_behind_accepted_ones_are_those_of_such_a_head(
    model: Model, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Rows keep the hidden state of their last accepted draft."""
    target, head = repeating(model), mtp_of(model.spec)
    weights, noted, asked = echoing(head), note_drafts(monkeypatch), asked_greedily()
    run, tally = drafting(
        with_head(target, head), LoadedHead(weights), 3, depth=depth, **ROOMY
    )
    tokens = run.serve(asked, arrival_gap=1)
    assert tokens == {(r.id, 0): target.expected(r) for r in asked}
    assert 0.2 < tally.accepted / tally.proposed < 0.95
    reference = MtpReference.of(target, head, weights)
    assert check_noted(noted, reference, target, tokens, asked) > 15


@pytest.mark.parametrize("kind", [eagle3_of, mtp_of])
def test_rejection_sampling_takes_its_logits(
    model: Model, kind: Callable[[ModelSpec], HeadSpec]
) -> None:
    """Greedy answers are the same by that rule; others are answers."""
    head, asked = kind(model.spec), requests(0)
    run, tally = drafting(with_head(model, head), loaded(head), 3, rule=REJECTION)
    tokens = run.serve(asked)
    for request in asked:
        if request.sampling == GREEDY:
            assert tokens[request.id, 0] == model.expected(request)
    assert not run.count(Discarded)
    assert tally.proposed > 0


@pytest.mark.parametrize("kind", [eagle3_of, mtp_of])
def test_warm_up_steps_run_with_few_layers(
    model: Model, kind: Callable[[ModelSpec], HeadSpec]
) -> None:
    layers = model.spec.layers * 3
    longer = evolve(model, spec=evolve(model.spec, layers=layers))
    longer.weights = evolve(model.weights, layers=model.weights.layers * 3)
    head = kind(longer.spec)
    run, _ = drafting(with_head(longer, head), loaded(head), 3)
    executor: Any = run.driver.executor
    plain = StepShape(decode_rows=2, draws=2)
    prompts = StepShape(decode_rows=0, draws=1, tokens=5, chunks=1, longest=5)
    drafting_shape = evolve(plain, verified=2, drafts=3, proposes=True)
    dummy_runner = DummyRunner(executor.runner)
    with executor.between_steps(), dummy_runner.few_layers():
        for shape in (plain, prompts, drafting_shape):
            dummy_runner.dummy_step(shape)
