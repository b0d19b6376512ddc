"""Drafts of heads change no token, and are those of a head that sees everything."""

import pytest

from minfer.records.messages import Discarded, Preempted
from tests.effects.execution.drafting import drafting
from tests.effects.execution.heads import eagle3_of, loaded, mtp_of, with_head
from tests.effects.execution.tiny_engine import (
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
    model: Model, reference: Tokens, kind, depth: int
) -> None:
    head = kind(model.spec)
    run, tally = drafting(with_head(model, head), loaded(head), 3, depth=depth)
    assert run.serve(asking(requests(0)), arrival_gap=depth % 2) == reference
    check_scores(model, run, asking(requests(0)))
    assert not run.count(Discarded)
    assert tally.accepted < tally.proposed
