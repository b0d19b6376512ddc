"""Rows with drafts that are sampled apart: each place has a mask of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from minfer import sample
from minfer.effects.execution.inputs import Inputs
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.late_draws import LateDraw, MaskError, pack_late
from minfer.effects.execution.packing import Draw
from minfer.effects.execution.verified import Further
from minfer.messages import Executed, Failed, Voided
from minfer.plan import Draft, Fill, Mask, Plan, SampleApart, Stand
from minfer.request import Request
from tests.core.executing import opened
from tests.effects.execution.drafting import guessing
from tests.effects.execution.test_late_draws import (
    bound,
    executor_of,
    only,
    pad,
    prefill,
    rows_with,
)
from tests.effects.execution.tiny_engine import (
    GREEDY,
    VOCAB,
    Model,
    Tokens,
    asking,
    check_scores,
    requests,
)
from tests.effects.masking import MasksBy

pytestmark = pytest.mark.usefixtures("kind")


def of_position(plan: Plan) -> tuple[Mask, ...]:
    """A third of the tokens for each position, all of them for each ninth."""
    drafts = {draft.index: plan.counts[draft.index] - 1 for draft in plan.drafts}
    masks = list[Mask]()
    for i in plan.apart:
        count = drafts.get(i, 0)
        first = plan.starts[i] + plan.counts[i] - count
        for place in range(count + 1):
            some = range((first + place) % 3, VOCAB, 3)
            if (first + place) % 9:
                masks.append(Mask(i, only(*some), place))
    return tuple(masks)


def some_stand(plan: Plan) -> tuple[Stand, ...]:
    """Not all drafts of every third row that is sampled apart."""
    here = [one for one in plan.drafts if one.index in plan.apart]
    return tuple(
        Stand(one.index, (plan.step + one.index) % plan.counts[one.index])
        for one in here
        if (plan.step + one.index) % 3 == 0
    )


@pytest.fixture(scope="module")
def by_position(model: Model) -> Tokens:
    """What comes of those masks without drafts."""
    found: Tokens = {}
    for i, request in enumerate(endless()):
        how, known = sample.row_sampling(request, 0), list(request.prompt)
        for _ in range(request.max_tokens):
            logits, at = model.logits(known), len(known)
            if i % 2 == 0 and at % 9:
                logits = [x if t % 3 == at % 3 else -np.inf for t, x in enumerate(logits)]
            known.append(sample.next_token(logits, how, known, len(request.prompt)))
        found[request.id, 0] = known[len(request.prompt) :]
    return found


def endless() -> list[Request]:
    return [evolve(r, stop_ids=frozenset()) for r in asking(requests(0))]


@pytest.mark.parametrize(
    ("depth", "settings"),
    [
        (1, {}),
        (2, {"num_blocks": 12}),
        (2, {"max_num_seqs": 5, "max_num_batched_tokens": 17, "block_size": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("written", "late"), [(False, False), (True, True)], ids=["sent", "written"]
)
def test_each_place_behind_drafts_has_the_mask_of_its_own(
    model: Model,
    by_position: Tokens,
    depth: int,
    settings: dict[str, int],
    written: bool,
    late: bool,
) -> None:
    run, tally = guessing(model, by_position, 0.8, 5, depth=depth, **settings)
    executor = executor_of(run)
    executor.at_once |= late  # what is launched runs at once, as on a GPU
    lend = executor.mask_lines if written else None
    run.driver.masks = MasksBy(of_position, late=late, lend=lend, stands=some_stand)
    wanted = endless()
    assert run.serve(bound(wanted, 2), apart=1) == by_position
    assert not run.count(Voided)
    check_scores(model, run, wanted)  # the model's own, whatever was allowed
    rows = [
        len(set(plan.apart).intersection(one.index for one in plan.drafts))
        for plan in tally.plans.values()
    ]
    assert sum(rows) > 12
    assert max(rows) > 1
    assert tally.accepted > 20


def test_no_step_with_drafts_follows_one_whose_drafts_wait(model: Model) -> None:
    run, _ = guessing(model, {}, 1.0, 2)
    executor = executor_of(run)
    executor.at_once = True
    both = opened(Request(id="a", prompt=(5, 6), max_tokens=9, sampling=GREEDY), (0,))
    first = prefill(0, "a", 5, apart=False)
    executor.launch(evolve(first, opens=(both,), fills=(Fill(0, (5, 6)),), counts=(2,)))
    (token,) = executor.collect().yields[0]  # type: ignore[union-attr]  # it goes well
    more = Plan(1, (1,), (0,), (2,), (2,), (2,), drafts=(Draft(0, (token,)),), apart=(0,))
    executor.launch(more)
    executor.launch(evolve(more, step=2, starts=(4,)))
    executor.sample(SampleApart(1))
    assert isinstance(executor.collect(), Executed)
    failed = executor.collect()
    assert isinstance(failed, Failed)
    assert failed.error == "step 2: drafts of a step before it wait to be sampled apart"


# --- what is packed ---------------------------------------------------------------------

DRAFTED = Plan(
    step=8,
    gens=(1, 2, 3, 4),
    rows=(2, 0, 1, 3),
    starts=(4, 5, 6, 7),
    counts=(3, 1, 4, 2),
    most=(3, 1, 4, 2),
    drafts=(Draft(0, (50, 51)), Draft(2, (60, 61, 62)), Draft(3, (70,))),
    apart=(0, 1, 2),
)


def late_of(
    told: SampleApart, pad: Callable[[Kind], Kind] = pad
) -> tuple[LateDraw, Inputs[Any]]:
    """The draws of `DRAFTED`, whose forward had lines for four rows and three drafts."""
    rows, _ = rows_with("a", "b", "c", "d")
    owners = [rows.owners[row] for row in DRAFTED.rows]
    kind = Kind(alone=4, draws=4, verified=4, drafts=3)
    further = Further.of(kind, [0, 2, 3], [owners[i] for i in (0, 2, 3)])
    kept = Draw([0, 2, 1], [owners[i] for i in (0, 2, 1)], [0, 1, 3], further)
    late = pack_late(DRAFTED, kept, told, rows, pad)
    return late, Inputs.of(late.words, late.kind)


def test_late_draws_of_rows_with_drafts() -> None:
    late, inputs = late_of(SampleApart(8, stands=(Stand(2, 2),)))
    assert (late.kind.draws, late.kind.verified, late.kind.drafts) == (3, 2, 2)
    assert inputs.late is not None
    assert inputs.drafts is not None
    assert inputs.late.behind is not None
    assert inputs.late.rows.tolist() == [2, 1, 0]
    assert inputs.late.positions.tolist() == [5, 7, 6]
    assert inputs.drafts.counts.tolist() == [2, 2]
    assert inputs.drafts.said.tolist() == [[50, 60], [51, 61]]
    # The first and the second row of four that had drafts, at two places.
    assert inputs.late.behind.tolist() == [[0, 1], [4, 5]]
    assert late.draw.further is not None
    assert late.draw.further.places == [0, 2]


def test_masks_behind_drafts_follow_those_of_all_draws() -> None:
    told = SampleApart(8, (Mask(2, only(9), 3), Mask(0, only(8), 1), Mask(1, only(7))))
    late, _ = late_of(told, Kind.padded)
    assert (late.kind.draws, late.kind.verified, late.kind.drafts) == (4, 2, 3)
    nobody = [b"", b""]  # lines are aligned
    places = [[only(8), b""], [b"", b""], [b"", only(9)]]
    behind = [mask for some in places for mask in some + nobody]
    assert late.masks == [b"", b"", only(7), b"", *behind]
    names = [one and one.name[0] for one in map(late.owner, (0, 1, 2, 4, 5, 12, 13))]
    assert names == ["c", "b", "a", "c", "b", "c", "b"]
    late, _ = late_of(SampleApart(8, written=True), Kind.padded)
    # Lines: entries 0, 1 and 2, two behind drafts of 0, and three behind those of 2.
    assert late.lines == [0, 2, 1, 0, 3, 5, 0, 0, 4, 6, 0, 0, 0, 7, 0, 0]


def test_where_no_draft_may_stand_there_are_none() -> None:
    stands = Stand(0, 0), Stand(2, 0)
    late, inputs = late_of(SampleApart(8, written=True, stands=stands))
    assert (late.kind.drafts, late.kind.verified, inputs.drafts) == (0, 0, None)
    assert late.lines == [0, 2, 1]
    assert late.draw.further is None
    late, inputs = late_of(SampleApart(8, stands=stands[:1]))
    assert inputs.drafts is not None
    assert inputs.drafts.counts.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (SampleApart(8, stands=(Stand(1, 1),)), "entry 1 of step 8 has no drafts"),
        (SampleApart(8, stands=(Stand(3, 1),)), "entry 3 of step 8 has no drafts"),
        (SampleApart(8, (Mask(0, b"", 3),)), "for entry 0 of step 8 behind 3 drafts"),
    ],
)
def test_what_is_said_of_drafts_that_are_not_there(told: SampleApart, why: str) -> None:
    with pytest.raises(MaskError, match=why):
        late_of(told)
