"""Attention within chunks of positions, in attention kernels: what is before is never
read.
"""

import pytest
import torch
from torch import Tensor

from minfer.kernels.attention_tunes import DecodeTune
from tests.circles import long
from tests.kernels.test_attention import (
    SMALL,
    Case,
    check_draft_layout,
    close,
    decode,
    make,
    prefill,
    queries,
    written_out,
)

pytestmark = pytest.mark.usefixtures("poisoned")

# positions of a chunk, tokens of a block: both divide one another, or neither
SIZES = [(24, 16), *long([(7, 4), (32, 16), (16, 32), (1, 4), (500, 16)])]


def made(contexts: list[int], starts: list[int], chunk: int, size: int) -> Case:
    """Sequences of which is lost what no query from these starts on reads."""
    lost = [max(0, start) // chunk * chunk for start in starts]
    return make(contexts, 1, block_size=size, lost=lost)


def expected(case: Case, i: int, query: Tensor, start: int, chunk: int) -> Tensor:
    """Of queries at positions from `start` on, one by one."""
    scale, results = query.shape[2] ** -0.5, []
    for j, position in enumerate(range(start, start + len(query))):
        keys = slice(position // chunk * chunk, position + 1)
        key, value = case.keys[i][keys], case.values[i][keys]
        line = query[j : j + 1]
        results.append(written_out(line, key, value, len(key) - 1, scale))
    return torch.cat(results)


@pytest.mark.parametrize(("chunk", "size"), SIZES)
@pytest.mark.parametrize("splits", [3, *long([1])])
def test_decode(chunk: int, size: int, splits: int) -> None:
    """The last position of a chunk, the first of the next, and no context."""
    contexts = [1, chunk, chunk + 1, 90, 2 * chunk + 1, 0]
    starts = [context - 1 for context in contexts]
    case = made(contexts, starts, chunk, size)
    q = queries(len(contexts), 2, case)
    reads = {"window": chunk, "chunked": True}
    out = decode(case, q, splits=splits, tune=DecodeTune(16, 4, 3), **reads)
    for i, start in enumerate(starts[:-1]):
        close(out[i : i + 1], expected(case, i, q[i : i + 1], start, chunk))
    assert not out[-1].any()


@pytest.mark.parametrize(("chunk", "size"), SIZES)
@pytest.mark.parametrize("splits", [1, *long([2])])
def test_prefill(chunk: int, size: int, splits: int) -> None:
    """From the start, over the edge of chunks, and far behind it."""
    inputs = [(0, 20), (max(0, chunk - 3), 25), (71, 30), (2 * chunk, 1)]
    contexts = [start + count for start, count in inputs]
    case = made(contexts, [start for start, _ in inputs], chunk, size)
    q = queries(sum(count for _, count in inputs), 2, case)
    offsets = [0, 20, 45, 75]
    reads = {"window": chunk, "chunked": True, "splits": splits}
    out = prefill(case, q, inputs, offsets, max_count=30, tune=SMALL, **reads)
    for i, ((start, count), offset) in enumerate(zip(inputs, offsets, strict=True)):
        tokens = slice(offset, offset + count)
        close(out[tokens], expected(case, i, q[tokens], start, chunk))


def test_reference_and_drafts_agree() -> None:
    chunk = 12
    case = made([7, 61], [3, 58], chunk, 4)

    def within_chunks(i: int, query: Tensor, start: int) -> Tensor:
        return expected(case, i, query, start, chunk)

    check_draft_layout(case, [(3, 4), (58, 3)], within_chunks, window=chunk, chunked=True)
