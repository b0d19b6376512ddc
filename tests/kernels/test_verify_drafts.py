"""Drafts as inputs and which of them stand, against plain loops."""

import pytest
import torch
from torch import Tensor

from minfer.kernels.row_state import RowTensors
from minfer.kernels.verify_drafts import accept_drafts, write_draft_inputs

from .conftest import drawn, ints

SCRATCH = 400
MADE_BY_MODEL = -1


def state_of(last: Tensor, next_: Tensor, device: str) -> RowTensors:
    table = torch.empty(0, dtype=torch.int32, device=device)
    return RowTensors(ints(last, device), ints(next_, device), table, SCRATCH)


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize(("verified", "drafts"), [(1, 1), (7, 4), (130, 3), (300, 1)])
def test_write_draft_inputs(
    device: str, verified: int, drafts: int, by_model: bool
) -> None:
    rows, next_ = drawn(SCRATCH, verified), drawn(90, SCRATCH + 1)
    counts = drawn(drafts + 1, verified)
    drafts_in, proposed = drawn(1000, drafts, verified + 3), drawn(50, drafts, verified)
    if by_model:
        drafts_in[drawn(2, drafts, verified + 3) > 0] = MADE_BY_MODEL
    out = torch.full((3, drafts * verified + 5), -9, dtype=torch.int32, device=device)
    write_draft_inputs(
        ints(rows, device),
        ints(counts, device),
        ints(drafts_in, device)[:, :verified],
        ints(proposed, device) if by_model else None,
        state_of(next_, next_, device),
        out[:, : drafts * verified],
    )
    written = out[:, : drafts * verified].cpu().view(3, drafts, verified).long()
    for place in range(drafts):
        for v, row in enumerate(rows.tolist()):
            token = int(drafts_in[place, v])
            token = int(proposed[place, v]) if token == MADE_BY_MODEL else token
            draft_input = [token, int(next_[row]) + place + 1, row]
            nothing = [0, 0, SCRATCH]
            expected = draft_input if place < counts[v] else nothing
            assert written[:, place, v].tolist() == expected
    assert (out[:, drafts * verified :] == -9).all()


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("verified", [1, 9, 300])
def test_accept_drafts(device: str, verified: int, place: int) -> None:
    last, next_ = drawn(3, SCRATCH + 1), drawn(90, SCRATCH + 1)
    rows = torch.randperm(SCRATCH, generator=torch.Generator().manual_seed(1))
    rows = rows[:verified]
    owners = rows.where(drawn(4, verified) > 0, SCRATCH)
    before = rows.where(drawn(5, verified) > 0, SCRATCH)
    drafts = drawn(3, verified)
    accepted = drawn(4, verified)
    next_rows, positions = torch.full((2, verified), -9, dtype=torch.int32, device=device)
    accepted_counts = ints(accepted, device)
    accept_drafts(
        ints(before, device),
        ints(drafts, device),
        ints(owners, device),
        state_of(last, next_, device),
        place,
        next_rows,
        positions,
        accepted_counts,
    )
    stood = 0
    for v, row in enumerate(rows.tolist()):
        right = row == owners[v] == before[v] and last[row] == drafts[v]
        stood += bool(right)
        assert next_rows[v] == (row if right else SCRATCH)
        assert positions[v] == (next_[row] + 1 if right else 1)
        unchanged = int(accepted[v]) if place else 0
        assert accepted_counts[v] == (place + 1 if right else unchanged)
    assert verified < 300 or 0 < stood < verified
