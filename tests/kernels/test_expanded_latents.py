"""Attention over a piece of expanded keys and values, and the merging of pieces, against
attention over all of them at once, in float64.
"""

import math
import random
from itertools import accumulate, pairwise

import pytest
import torch
from attrs import frozen
from torch import Tensor

from minfer.kernels import expanded_work
from minfer.kernels.expanded_latents import (
    merge_piece,
    merge_reference,
    piece_attention,
    piece_reference,
)
from minfer.kernels.expanded_work import ExpandedWork
from tests.circles import claimed
from tests.kernels.latents import CUDA, DEVICE, HALF_TYPE, LIMIT

pytestmark = pytest.mark.usefixtures("poisoned")
SCALE = 0.2


@frozen
class Sizes:
    heads: int = 2
    plain: int = 24
    rope: int = 16
    value: int = 20
    dtype: torch.dtype = torch.float32


@frozen(eq=False)
class Case:
    """Chunks behind histories, all keys of which are expanded, one after the other."""

    q: Tensor  # [tokens, heads, plain + rope]
    expanded: list[Tensor]  # a sequence: [context, heads, plain + value]
    rotated: list[Tensor]  # [context, rope]
    chunks: list[tuple[int, int]]  # start, count

    def expected(self) -> list[Tensor]:
        """A chunk: [count, heads, value] float64."""
        results, offset = [], 0
        for (start, count), rows, turned in zip(
            self.chunks, self.expanded, self.rotated, strict=True
        ):
            q, rows, turned = (
                self.q[offset : offset + count].double(),
                rows.double(),
                turned,
            )
            plain = q.shape[2] - turned.shape[1]
            scores = torch.einsum("qhd,khd->qhk", q[..., :plain], rows[..., :plain])
            scores += torch.einsum("qhd,kd->qhk", q[..., plain:], turned.double())
            later = torch.arange(start + count) > start + torch.arange(count)[:, None]
            scores = (scores * SCALE).masked_fill(later[:, None].to(DEVICE), -math.inf)
            results.append(
                torch.einsum("qhk,khv->qhv", scores.softmax(-1), rows[..., plain:])
            )
            offset += count
        return results


def bounds_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)


def make(chunks: list[tuple[int, int]], sizes: Sizes = Sizes(), seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, sizes.dtype)

    total = sum(count for _, count in chunks)
    width = sizes.plain + sizes.value
    # Views into rows that hold more.
    q = normal(total, sizes.heads + 1, sizes.plain + sizes.rope)[:, : sizes.heads]
    contexts = [start + count for start, count in chunks]
    return Case(
        q,
        [normal(n, sizes.heads, width) for n in contexts],
        [normal(n, sizes.rope) for n in contexts],
        chunks,
    )


def attended(
    case: Case, piece: int, *, slack: int = 0, reference: bool = False
) -> Tensor:
    """The chunks' own keys, then those of all histories, `piece` at a time."""
    starts, counts = map(list, zip(*case.chunks, strict=True))
    width = case.expanded[0].shape[2]
    value = width - case.q.shape[2] + case.rotated[0].shape[1]
    shape = len(case.q), case.q.shape[1], value
    merge = merge_reference if reference else merge_piece

    def over(pieces: list[tuple[Tensor, Tensor]], bounds: Tensor, causal: bool) -> Tensor:
        """Between other sequences' keys, which are not finite."""
        nan = [torch.full_like(tensor[:1], math.nan) for tensor in pieces[0]]
        rows, turned = (
            torch.cat([*(piece[i] for piece in pieces), nan[i]]) for i in range(2)
        )
        out = torch.full(shape, math.nan, dtype=case.q.dtype, device=DEVICE)
        sums = torch.full(shape[:2], -math.inf, device=DEVICE)
        arguments = case.q, rows, turned, bounds_of(counts), bounds, SCALE
        if reference:
            piece_reference(*arguments, causal, out, sums)
        else:
            longest = max(counts) + slack
            piece_attention(
                *arguments, longest=longest, causal=causal, out=out, sums=sums
            )
        results.append((out, sums))
        return out

    results = list[tuple[Tensor, Tensor]]()
    own_keys = [
        (rows[start:], turned[start:])
        for rows, turned, start in zip(case.expanded, case.rotated, starts, strict=True)
    ]
    over(own_keys, bounds_of(counts), True)
    total, sums = results[0][0].float(), results[0][1]
    history = bounds_of(starts)
    before = [
        torch.cat([tensor[:start] for tensor, start in zip(tensors, starts, strict=True)])
        for tensors in (case.expanded, case.rotated)
    ]
    for offset in range(0, sum(starts), piece):
        history_piece = [
            (before[0][offset : offset + piece], before[1][offset : offset + piece])
        ]
        over(history_piece, history.clamp(offset, offset + piece) - offset, False)
        merge(total, sums, *results[-1])
    return total


def check(case: Case, piece: int, **options: bool | int) -> None:
    out = attended(case, piece, **options)  # type: ignore[arg-type]  # by its callee
    limit = LIMIT[case.q.dtype] * (1 if case.q.dtype == torch.float32 else 2)
    offset = 0
    for (_, count), expected in zip(case.chunks, case.expected(), strict=True):
        chunk_out = out[offset : offset + count].double()
        if count:
            assert (chunk_out - expected).norm() / expected.norm() < limit
        offset += count


CHUNKS = [(21, 9), (0, 5), (3, 1), (40, 18), (7, 0)]


@pytest.mark.parametrize("reference", [True, False])
def test_pieces_of_any_size_merge_to_the_whole(reference: bool) -> None:
    case = make([(5, 3), (0, 2)])
    check(case, 3, reference=reference)


@pytest.mark.long
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("piece", [16, 100])
def test_chunks_behind_histories(piece: int, reference: bool) -> None:
    """In pieces that cut histories anywhere, some of a piece's chunks without keys."""
    check(make(CHUNKS), piece, reference=reference, slack=3)


@pytest.mark.long
def test_the_sizes_of_deepseek() -> None:
    for dtype in (HALF_TYPE, torch.float32):
        check(make([(70, 40), (0, 3)], Sizes(1, 128, 64, 128, dtype)), 64)


@pytest.mark.long
def test_a_chunk_of_several_tiles() -> None:
    """Tiles of queries which see some tiles of keys wholly, some in part, some not."""
    check(make([(30, 150)], Sizes(1, 16, 16, 16, HALF_TYPE)), 20)


@pytest.mark.parametrize("reference", [True, False])
def test_a_piece_without_keys_changes_nothing(reference: bool) -> None:
    """Even if what was left in its result is not finite."""
    merge = merge_reference if reference else merge_piece
    total, sums = torch.rand(2, 3, 4, device=DEVICE), torch.rand(2, 3, device=DEVICE)
    before, at_first = total.clone(), sums.clone()
    nothing = torch.full_like(sums, -math.inf)
    merge(total, sums, torch.full_like(total, math.nan), nothing)
    torch.testing.assert_close(total, before)
    torch.testing.assert_close(sums, at_first)
    piece_out = torch.rand_like(total)
    sums.fill_(-math.inf)
    merge(total, sums, piece_out, at_first)
    torch.testing.assert_close(total, piece_out)
    merge(total, sums, torch.full_like(total, math.nan), torch.full_like(sums, math.nan))
    assert total.isnan().all()  # of a request whose own numbers are not finite


@pytest.mark.parametrize("at_once", [4, 1 << 16])
def test_where_the_latents_of_histories_are(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded_work, "TOKENS_AT_ONCE", at_once)
    draw = random.Random(0)
    starts, counts, size = [5, 0, 17, 8], [2, 3, 1, 0], 4
    table = torch.tensor([[draw.randrange(99) for _ in range(6)] for _ in range(7)])
    tables = torch.stack((table, table + 100)).int()
    rows = torch.tensor([3, 6, 0, 2], dtype=torch.int32)
    arguments = rows, torch.tensor(starts).int(), torch.tensor(counts).int(), tables
    for slack in (0, 9):  # a host may know no more than a limit
        work = ExpandedWork.of(*arguments, 3, sum(starts) + slack, size)
        assert work.bounds.tolist() == [0, 2, 5, 6, 6]
        assert work.slots[:, : sum(starts)].tolist() == [
            [
                int(layer_table[row, token // size]) * size + token % size
                for row, start in zip(rows.tolist(), starts, strict=True)
                for token in range(start)
            ]
            for layer_table in tables
        ]
        assert not work.slots[:, sum(starts) :].any()  # of any page that exists
        for first in (0, 4, 11):
            piece = work.piece(first, 7)
            for i, (lo, hi) in enumerate(pairwise(piece.tolist())):
                before = range(sum(starts[:i]), sum(starts[: i + 1]))
                assert hi - lo == len({*before} & {*range(first, first + 7)})


@pytest.mark.parametrize("seed", claimed(range(30)))
def test_random_chunks(seed: int) -> None:
    draw = random.Random(seed)
    longest = 600 if CUDA else 50
    chunks = [(draw.randint(0, longest), draw.randint(1, longest // 2)) for _ in range(3)]
    dtype = draw.choice([torch.float32, HALF_TYPE])
    sizes = Sizes(draw.randint(1, 3), 8 * draw.randint(1, 4), 16, 8, dtype)
    check(make(chunks, sizes, seed), draw.randint(1, 2 * longest))
