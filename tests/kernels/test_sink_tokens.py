"""Sink tokens beside a window, in attention kernels: what is between is never read."""

import pytest
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

# window, sink tokens, tokens of a block: sinks within a block, in several, up to its end,
# as many as the window has
SIZES = [(7, 5, 4), *long([(32, 4, 16), (20, 16, 16), (16, 16, 24), (50, 33, 16)])]


def made(
    contexts: list[int], starts: list[int], window: int, sinks: int, size: int
) -> Case:
    """Sequences of which is lost what no query from these starts on reads."""
    lost = [max(0, start - window + 1) for start in starts]
    return make(contexts, 1, block_size=size, lost=lost, num_kept=sinks)


def expected(case: Case, i: int, query: Tensor, start: int, *reads: int) -> Tensor:
    scale = query.shape[2] ** -0.5
    return written_out(query, case.keys[i], case.values[i], start, scale, *reads)


@pytest.mark.parametrize(("window", "sinks", "size"), SIZES)
@pytest.mark.parametrize("splits", [3, *long([1])])
def test_decode(window: int, sinks: int, size: int, splits: int) -> None:
    contexts = [1, 6, window + 1, 90]
    starts = [context - 1 for context in contexts]
    case = made(contexts, starts, window, sinks, size)
    q, reads = queries(4, 2, case), {"window": window, "sink_tokens": sinks}
    out = decode(case, q, splits=splits, tune=DecodeTune(16, 4, 3), **reads)
    for i, start in enumerate(starts):
        want = expected(case, i, q[i : i + 1], start, window, sinks)
        close(out[i : i + 1], want)


@pytest.mark.parametrize(("window", "sinks", "size"), SIZES)
@pytest.mark.parametrize("splits", [1, *long([2])])
def test_chunks(window: int, sinks: int, size: int, splits: int) -> None:
    """From the start, over the edge where sinks leave the window, and far behind it."""
    chunks = [(0, 20), (window - 3, 25), (71, 30)]
    contexts = [start + count for start, count in chunks]
    case = made(contexts, [start for start, _ in chunks], window, sinks, size)
    q = queries(sum(count for _, count in chunks), 2, case)
    offsets = [0, 20, 45]
    reads = {"window": window, "sink_tokens": sinks, "splits": splits}
    out = prefill(case, q, chunks, offsets, max_count=30, tune=SMALL, **reads)
    for i, ((start, count), offset) in enumerate(zip(chunks, offsets, strict=True)):
        tokens = slice(offset, offset + count)
        close(out[tokens], expected(case, i, q[tokens], start, window, sinks))


@pytest.mark.long
def test_reference_and_drafts_agree() -> None:
    window, sinks = 12, 6
    case = made([7, 63], [3, 60], window, sinks, 4)

    def within_window(i: int, query: Tensor, start: int) -> Tensor:
        return expected(case, i, query, start, window, sinks)

    check_draft_layout(
        case, [(3, 4), (60, 3)], within_window, window=window, sink_tokens=sinks
    )
