"""What rows keep between steps, against plain indexing."""

import pytest
import torch
from torch import Tensor

from minfer.kernels.row_state import RowTensors, StepInputs
from minfer.kernels.rows import advance, gather, scatter

from .conftest import drawn, ints

SCRATCH, BLOCK_SIZE = 400, 16
UNWRITTEN = -5


def distinct(below: int, count: int) -> Tensor:
    return torch.randperm(below, generator=torch.Generator().manual_seed(count))[:count]


@pytest.mark.parametrize(
    ("decode_rows", "extra"),
    [(1, 0), (256, 0), (0, 1), (0, 300), (9, 1), (9, 300), (256, 300)],
)
def test_gather(device: str, decode_rows: int, extra: int) -> None:
    last, next_ = drawn(1000, SCRATCH + 1), drawn(90, SCRATCH + 1)
    table = drawn(1 << 20, 2, SCRATCH + 1, 6)
    rows, owners = drawn(SCRATCH, decode_rows), drawn(SCRATCH, extra)
    prefill = torch.stack((drawn(1000, extra), drawn(90, extra), owners))
    token, position = (
        torch.cat((last[rows], prefill[0])),
        torch.cat((next_[rows], prefill[1])),
    )
    block = table[:, torch.cat((rows, owners)), position // BLOCK_SIZE]
    wide = torch.full((5, 3 * (decode_rows + extra)), UNWRITTEN)
    tokens, positions, ahead = ints(wide[:3], device)[:, : decode_rows + extra]
    slots = wide[3:, : decode_rows + extra].to(device)
    gather(
        ints(rows, device),
        ints(prefill, device) if extra else None,
        RowTensors(ints(last, device), ints(next_, device), ints(table, device), SCRATCH),
        BLOCK_SIZE,
        StepInputs(tokens, positions, ahead, slots),
    )
    assert torch.equal(tokens.cpu().long(), token)
    assert torch.equal(positions.cpu().long(), position)
    assert torch.equal(ahead, positions + 1)
    assert torch.equal(slots.cpu(), block * BLOCK_SIZE + position % BLOCK_SIZE)


@pytest.mark.parametrize("count", [1, 7, 290])
def test_advance(device: str, count: int) -> None:
    rows = torch.cat((distinct(SCRATCH, count), torch.full((9,), SCRATCH)))
    positions, tokens = 1 + drawn(90, count + 9), drawn(1000, count + 9)
    broken = drawn(2, count + 9) * (tokens == 0)
    broken[0], tokens[0] = 1, 0
    last, next_ = drawn(1000, SCRATCH + 1), drawn(90, SCRATCH + 1)
    next_[SCRATCH] = 0
    table = torch.empty(0, dtype=torch.int32, device=device)
    state = RowTensors(ints(last, device), ints(next_, device), table, SCRATCH)
    out = torch.full((count + 30,), UNWRITTEN, dtype=torch.int32, device=device)
    advance(
        ints(rows, device),
        ints(positions, device),
        ints(tokens, device),
        ints(broken, device),
        state,
        out,
    )
    last[rows[:count]], next_[rows[:count]] = tokens[:count], positions[:count]
    assert torch.equal(state.last.cpu().long()[:SCRATCH], last[:SCRATCH])
    assert torch.equal(state.next.cpu().long(), next_)
    assert out[: count + 9].tolist() == (tokens - broken).tolist()
    assert (out[count + 9 :] == UNWRITTEN).all()


@pytest.mark.parametrize("count", [1, 300])
def test_scatter(device: str, count: int) -> None:
    arena = torch.full((1000,), UNWRITTEN)
    places, values = distinct(1000, count), drawn(1 << 30, count)
    changed = ints(arena, device)
    scatter(changed, ints(torch.cat((places, values)), device))
    arena[places] = values
    assert torch.equal(changed.cpu().long(), arena)
