"""Drafts of heads change no token, and are those of a head that sees everything."""

from collections.abc import Callable

import pytest
from attrs import evolve

from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.records.messages import Discarded
from tests.effects.execution.drafting import drafting
from tests.effects.execution.heads import (
    Reference,
    drawn_head,
    eagle3_of,
    loaded,
    mtp_of,
    note_drafts,
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


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_those_of_a_head_that_sees_the_whole_sequence(
    model: Model, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Whatever the chunks of its prompt, the drafts that were accepted, and rows beside."""
    head = eagle3_of(model.spec)
    weights = drawn_head(head)
    noted = note_drafts(monkeypatch)
    asked = [
        evolve(r, prompt=(i + 2, *r.prompt), sampling=GREEDY, stop_ids=frozenset())
        for i, r in enumerate(requests(3, 8))
    ]
    run, _ = drafting(
        with_head(model, head),
        LoadedHead(weights),
        3,
        depth=depth,
        max_num_batched_tokens=24,
        num_blocks=128,
    )
    tokens = run.serve(asked, arrival_gap=1)
    reference = Reference.of(model, head, weights)
    sequences = {r.prompt: [*r.prompt, *tokens[r.id, 0]] for r in asked}
    compared = 0
    for drafted in noted:
        sequence = sequences[drafted.prompt]
        if drafted.position < len(sequence):
            known = sequence[: drafted.position + 1]
            assert drafted.drafts == reference.drafts(known, len(drafted.drafts))
            compared += 1
    assert compared > 40
