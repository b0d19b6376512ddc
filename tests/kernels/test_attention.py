"""Paged attention kernels against attention written out over keys that never were in
pages.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minfer.kernels import attention
from minfer.kernels.attention import (
    DraftLayout,
    attention_reference,
    decode_attention,
    prefill_attention,
)
from minfer.kernels.attention_tunes import (
    DECODE,
    MAX_SPLITS,
    DecodeTune,
    HeadSize,
    PrefillTune,
    num_splits,
)
from minfer.kernels.pdl import arrivals
from tests.circles import claimed, long

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Under the interpreter, products of bfloat16 are wrong.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
# Sizes that the tables of constants name.
KINDS = [(kind, dim) for kind in TYPES for dim in (64, 128, 256)]
if not CUDA:
    KINDS = KINDS[1:3] + KINDS[3:4]
LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
GARBAGE = (-1, 1 << 30)
SMALL = PrefillTune(rows=32, tile=16, stages=2)  # a chunk is many tiles


@dataclass
class Case:
    """Sequences in a paged cache, and what they hold as plain tensors."""

    keys: list[Tensor]  # a sequence: [context, kv_heads, dim] float64
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    rows: Tensor
    contexts: Tensor
    lost: list[int]  # how many tokens of each sequence are unreadable, from its start


def make(
    contexts: list[int],
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    lost: list[int] | None = None,
    seed: int = 0,
    num_kept: int = 0,
) -> Case:
    """Random contents in shuffled blocks. What no sequence may read is NaN, and its id
    garbage.

    `lost[i]` tokens at sequence i's start are out of every window: whole blocks of them
    have no id. But the first `num_kept` of them can be read.
    """
    draw = torch.Generator().manual_seed(seed)
    lost = lost or [0] * len(contexts)
    needs = [-(-context // block_size) for context in contexts]
    width, height = max([*needs, 1]) + 2, len(contexts) + 2
    ids = (torch.randperm(sum(needs) + 2, generator=draw) + 1).tolist()
    # Views of one tensor [layers, 2, blocks, block_size, kv_heads, dim], as an engine has
    # them.
    pool = torch.full(
        (2, 2, len(ids) + 1, block_size, kv_heads, dim), math.nan, dtype=dtype
    )
    table = (
        torch.tensor(GARBAGE, dtype=torch.int32)
        .repeat(height, width)[:, :width]
        .contiguous()
    )
    rows = torch.randperm(height, generator=draw)[: len(contexts)].to(torch.int32)
    keys, values = [], []
    for row, context, need, num_lost in zip(
        rows.tolist(), contexts, needs, lost, strict=True
    ):
        blocks = [ids.pop() for _ in range(need)]
        gone_blocks = num_lost // block_size
        table[row, gone_blocks:need] = torch.tensor(
            blocks[gone_blocks:], dtype=torch.int32
        )
        first = min(-(-num_kept // block_size), need)
        table[row, :first] = torch.tensor(blocks[:first], dtype=torch.int32)
        drawn = torch.randn(2, context, kv_heads, dim, generator=draw).to(dtype)
        keys.append(drawn[0].double())
        values.append(drawn[1].double())
        for token in {*range(num_lost, context), *range(min(num_kept, context))}:
            place = pool[1, :, blocks[token // block_size], token % block_size]
            place.copy_(drawn[:, token])
    pool = pool.to(DEVICE)
    context_lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    return Case(
        keys,
        values,
        pool[1, 0],
        pool[1, 1],
        table.to(DEVICE),
        rows.to(DEVICE),
        context_lengths,
        lost,
    )


def queries(tokens: int, heads: int, case: Case, seed: int = 1) -> Tensor:
    """[tokens, heads, dim]: a view into rows that hold keys and values too (here NaN)."""
    _, _, kv_heads, dim = case.k_cache.shape
    qkv = torch.full(
        (tokens, heads + 2 * kv_heads, dim), math.nan, dtype=case.k_cache.dtype
    )
    drawn = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed))
    qkv[:, :heads] = drawn
    return qkv.to(DEVICE)[:, :heads]


def written_out(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    scale: float,
    window: int = 0,
    sink_tokens: int = 0,
    cap: float | None = None,
) -> Tensor:
    """query [n, heads, dim] at positions start on, over [context, kv_heads, dim], in
    float64.
    """
    count, heads, dim = query.shape
    grouped = query.double().cpu().view(count, keys.shape[1], heads // keys.shape[1], dim)
    scores = torch.einsum("qhgd,khd->qhgk", grouped, keys) * scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    distance = torch.arange(start, start + count)[:, None] - torch.arange(len(keys))
    near = (distance < (window or math.inf)) | (torch.arange(len(keys)) < sink_tokens)
    is_visible = (distance >= 0) & near
    weights = scores.masked_fill(~is_visible[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("qhgk,khd->qhgd", weights, values).reshape(count, heads, dim)


def close(out: Tensor, expected: Tensor) -> None:
    error = (out.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < LIMIT[out.dtype], f"relative error {error:.2e}"


def decode(
    case: Case, q: Tensor, scale: float | None = None, **options: object
) -> Tensor:
    """`decode_attention` of this case into poisoned memory."""
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=DEVICE)
    result = decode_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.table,
        case.rows,
        case.contexts,
        scale or q.shape[2] ** -0.5,
        out=out,
        **options,  # type: ignore[arg-type]  # checked by its callee
    )
    assert result is out
    return out


def decode_expected(
    case: Case, q: Tensor, window: int = 0, scale: float | None = None
) -> Tensor:
    return torch.cat(
        [
            written_out(
                q[i : i + 1], k, v, len(k) - 1, scale or q.shape[2] ** -0.5, window
            )
            if len(k)
            else torch.zeros(1, *q.shape[1:], dtype=torch.float64)
            for i, (k, v) in enumerate(zip(case.keys, case.values, strict=True))
        ]
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype", "splits"),
    [
        (1, 96, 16, torch.float32, 17),
        (2, 64, 4, torch.float16, 2),
        (4, 128, 64, torch.float16, 8),
        (7, 128, 1, torch.float32, 4),
        (8, 80, 24, torch.float16, 5),
        (20, 64, 128, torch.float32, 7),
    ],
)
def test_decode_at_every_shape(
    group: int, dim: int, block_size: int, dtype: torch.dtype, splits: int
) -> None:
    kv_heads = 2 if group == 2 else 1
    case = make([33, 90], kv_heads, dim, block_size, dtype)
    q = queries(2, group * kv_heads, case)
    expected = decode_expected(case, q)
    for count in (1, splits):
        close(decode(case, q, splits=count, tune=DecodeTune(32, 4, 3)), expected)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "dim"), KINDS)
def test_decode_with_the_constants_of_the_table(dtype: torch.dtype, dim: int) -> None:
    case = make([64, 170], 1, dim, 64, dtype)
    q = queries(2, 2, case)
    close(decode(case, q), decode_expected(case, q))


WINDOWS = [(1, 16), (7, 1), (16, 24), (32, 16), (50, 64), (1000, 4)]


@pytest.mark.long
@pytest.mark.parametrize(("window", "block_size"), WINDOWS)
def test_decode_reads_nothing_outside_its_window(window: int, block_size: int) -> None:
    contexts = [1, 90]
    lost = [max(0, context - window) for context in contexts]
    case = make(contexts, 1, block_size=block_size, lost=lost)
    q = queries(2, 2, case)
    for splits in (1, 3):
        out = decode(case, q, window=window, splits=splits, tune=DecodeTune(16, 4, 3))
        close(out, decode_expected(case, q, window))


@pytest.mark.long
def test_decode_of_no_context_gives_zeros_and_reads_no_id() -> None:
    case = make([0, 40, 0], 1)
    q = queries(3, 2, case)
    for splits in (1, 3):
        out = decode(case, q, splits=splits)
        close(out, decode_expected(case, q))
        assert not out[::2].any()


@pytest.mark.long
def test_decode_again_and_among_others_gives_the_same_bits() -> None:
    case = make([70, 30], 1, dtype=torch.float16)
    q = queries(2, 2, case)
    for splits in (1, 3):
        out = decode(case, q, splits=splits)
        assert torch.equal(out, decode(case, q, splits=splits))
        for i in range(2):
            case_i = Case(
                [],
                [],
                case.k_cache,
                case.v_cache,
                case.table,
                case.rows[i : i + 1],
                case.contexts[i : i + 1],
                [],
            )
            assert torch.equal(
                decode(case_i, q[i : i + 1], splits=splits), out[i : i + 1]
            )


@pytest.mark.long
@pytest.mark.skipif(
    CUDA, reason="the interpreter's order of programs; a GPU's is its own"
)
@pytest.mark.parametrize("last", [0, *claimed([1, 2])])
def test_whichever_range_comes_last_merges_the_same_bits(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import interpreter_builder

    case = make([90, 20, 0], 2, dtype=torch.float16)
    q = queries(3, 8, case)
    out = decode(case, q, splits=3, tune=DecodeTune(16, 4, 3))
    place = interpreter_builder.set_grid_idx

    def other_order(
        x: int, y: int, z: int
    ) -> None:  # all tiles' first parts, then the next
        tiles = interpreter_builder.grid_dim[0] // 3
        place(x % tiles * 3 + (x // tiles + last + 1) % 3, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", other_order)
    assert torch.equal(out, decode(case, q, splits=3, tune=DecodeTune(16, 4, 3)))
    chunks = [(60, 30), (20, 0), (0, 0)]  # several tiles of rows, and chunks without any
    q = queries(30, 4, case)
    options: dict[str, object] = {
        "max_count": 30,
        "splits": 3,
        "tune": PrefillTune(16, 16, 2),
    }
    out = prefill(case, q, chunks, [0, 30, 30], **options)
    monkeypatch.undo()
    assert torch.equal(out, prefill(case, q, chunks, [0, 30, 30], **options))


@pytest.mark.long
def test_more_ranges_than_are_merged_at_once_and_counts_that_end_at_zero() -> None:
    case = make([999 if CUDA else 300, 50], 1, 64, 16, torch.float16)
    q = queries(2, 16, case)  # 16 rows of 64 in 4 warps: 8 ranges at once
    for _ in range(2):
        close(
            decode(case, q, splits=18, tune=DecodeTune(16, 4, 3)),
            decode_expected(case, q),
        )
        for size in (1, 2, 4, 8):
            assert not arrivals(q.device, size).any()


@pytest.mark.long
def test_decode_makes_its_own_room_and_takes_long_positions_and_a_scale() -> None:
    case = make([70, 3])
    q = queries(2, 4, case)
    out = decode_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.table,
        case.rows.long(),
        case.contexts.long(),
        0.3,
        splits=2,
    )
    assert out.is_contiguous()
    close(out, decode_expected(case, q, scale=0.3))


def test_decode_of_large_scores_stays_finite() -> None:
    case = make([90], dtype=torch.float16)
    q = queries(1, 4, case) * 1000
    close(decode(case, q, splits=3, tune=DecodeTune(32, 4, 3)), decode_expected(case, q))


# Chunks as (start, count); max_count may be above all of them.
CHUNKS = [(0, 37), (63, 1), (17, 20), (3, 0)]


def chunk_tensors(
    chunks: list[tuple[int, int]], offsets: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The starts, counts and offsets of chunks (start, count)."""
    starts, counts, places = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in (*zip(*chunks, strict=True), offsets)
    )
    return starts, counts, places


def prefill(
    case: Case,
    q: Tensor,
    chunks: list[tuple[int, int]],
    offsets: list[int],
    **options: object,
) -> Tensor:
    """`prefill_attention` of these chunks into poisoned memory."""
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=DEVICE)
    result = prefill_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.table,
        case.rows,
        *chunk_tensors(chunks, offsets),
        q.shape[2] ** -0.5,
        out=out,
        **options,  # type: ignore[arg-type]  # checked by its callee
    )
    assert result is out
    return out


def check_draft_layout(
    case: Case,
    chunks: list[tuple[int, int]],
    expected: Callable[[int, Tensor, int], Tensor] | None = None,
    **reads: Any,
) -> None:
    """The kernel and the reference agree on the rows of two chunks whose drafts are laid
    out apart from their last tokens; and with `expected`, of a row, its queries and their
    first position.
    """
    q, offsets = queries(8, 2, case), [0, 1]
    layout = DraftLayout(skip=2, stride=2)
    places = chunk_tensors(chunks, offsets)
    reads |= {"max_count": 4, "draft_layout": layout}
    out = prefill(case, q, chunks, offsets, tune=SMALL, **reads)
    caches = case.k_cache, case.v_cache, case.table, case.rows
    reference = attention_reference(q, *caches, *places, q.shape[2] ** -0.5, **reads)
    for i, (start, count) in enumerate(chunks):
        indices = [i, *(i + layout.skip + layout.stride * j for j in range(count - 1))]
        close(out[indices], reference[indices].double().cpu())
        if expected is not None:
            close(reference[indices], expected(i, q[indices], start))


def check_prefill(
    chunks: list[tuple[int, int]],
    *,
    group: int = 2,
    kv_heads: int = 1,
    window: int = 0,
    slack: int = 0,
    splits: int = 1,
    tune: PrefillTune | None = SMALL,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Every chunk against its written-out attention; tokens of no chunk stay
    untouched.
    """
    lost = [max(0, start - window + 1) if window else 0 for start, _ in chunks]
    contexts = [start + count for start, count in chunks]
    case = make(contexts, kv_heads, dim, block_size, dtype, lost)
    offsets, end = [], 2  # two tokens of no chunk before, one after each chunk
    for _, count in chunks:
        offsets.append(end)
        end += count + 1
    q = queries(end, kv_heads * group, case)
    max_count = max(count for _, count in chunks) + slack
    out = prefill(
        case,
        q,
        chunks,
        offsets,
        max_count=max_count,
        window=window,
        splits=splits,
        tune=tune,
    )
    untouched = torch.ones(end, dtype=torch.bool)
    for (start, count), offset, key, value in zip(
        chunks, offsets, case.keys, case.values, strict=True
    ):
        tokens = slice(offset, offset + count)
        untouched[tokens] = False
        close(out[tokens], written_out(q[tokens], key, value, start, dim**-0.5, window))
    assert out[untouched.to(DEVICE)].isnan().all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype"),
    [
        (1, 64, 16, torch.float32),
        (2, 96, 4, torch.float16),
        (4, 128, 64, torch.float16),
        (7, 64, 1, torch.float32),
        (8, 80, 24, torch.float16),
    ],
)
def test_prefill_at_every_shape(
    group: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    check_prefill(
        CHUNKS,
        group=group,
        kv_heads=2 if group == 2 else 1,
        dim=dim,
        block_size=block_size,
        dtype=dtype,
        tune=PrefillTune(64, 32, 2),
        slack=9,
    )


@pytest.mark.long
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("group", "dim", "dtype", "window"),
    [
        (1, 64, torch.float32, 0),
        (4, 128, torch.float16, 0),
        (7, 64, torch.float32, 20),
    ],
)
def test_queries_with_gaps(
    group: int, dim: int, dtype: torch.dtype, window: int, splits: int
) -> None:
    """As of rows with drafts: a line of first queries, among others, then a line of rows
    for each place.
    """
    chunks, max_count, solo = [(40, 3), (0, 1), (63, 5), (17, 2), (200, 4)], 6, 8
    lost = [max(0, start - window + 1) if window else 0 for start, _ in chunks]
    contexts = [start + count for start, count in chunks]
    case = make(contexts, 2, dim, 16, dtype, lost)
    lines = [
        [i, *range(solo + i, solo + i + len(chunks) * (max_count - 1), len(chunks))]
        for i in range(len(chunks))
    ]
    q = queries(1 + max(map(max, lines)), 2 * group, case)
    out = prefill(
        case,
        q,
        chunks,
        [*range(len(chunks))],
        max_count=max_count,
        window=window,
        splits=splits,
        draft_layout=DraftLayout(skip=solo, stride=len(chunks)),
    )
    untouched = torch.ones(len(q), dtype=torch.bool)
    for (start, count), line, key, value in zip(
        chunks, lines, case.keys, case.values, strict=True
    ):
        tokens = line[:count]
        close(out[tokens], written_out(q[tokens], key, value, start, dim**-0.5, window))
        assert out[line[count:]].isfinite().all()
        untouched[line] = False
    assert out[untouched.to(DEVICE)].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("key", [1.0, math.nan])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_draft_that_is_not_finite_is_seen_by_none_before_it(
    splits: int, key: float, value: float
) -> None:
    start, bad = 40, 42
    case = make([start + 4], 1)
    block, slot = case.table[case.rows[0], bad // 16], bad % 16
    case.k_cache[block, slot] = key
    case.v_cache[block, slot] = value
    q, draft_layout = queries(4, 2, case), DraftLayout(skip=1, stride=1)
    out = prefill(
        case, q, [(start, 4)], [0], max_count=4, splits=splits, draft_layout=draft_layout
    )
    before = slice(0, bad - start)
    finite = case.keys[0][:bad], case.values[0][:bad]
    close(out[before], written_out(q[before], *finite, start, 64**-0.5, 0))
    assert key == key or out[bad - start :].isnan().all()


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "dim"), KINDS)
def test_prefill_with_the_constants_of_the_table(dtype: torch.dtype, dim: int) -> None:
    check_prefill([(0, 70), (100, 9)], dim=dim, dtype=dtype, tune=None, block_size=64)


@pytest.mark.long
@pytest.mark.parametrize(("window", "block_size"), WINDOWS)
def test_prefill_reads_nothing_outside_its_windows(window: int, block_size: int) -> None:
    check_prefill(CHUNKS, window=window, block_size=block_size)


@pytest.mark.long
@pytest.mark.parametrize(("window", "splits"), [(0, 3), (20, 4)])
def test_prefill_in_splits(window: int, splits: int) -> None:
    check_prefill(
        [(60, 3), (0, 1), (2, 0), (25, 4)], window=window, splits=splits, slack=1
    )


@pytest.mark.long
def test_prefill_of_single_tokens_is_decoding() -> None:
    chunks = [(0, 1), (29, 1), (100, 1)]
    case = make([1, 30, 101], 1)
    q = queries(3, 7, case)
    out = prefill(case, q, chunks, [0, 1, 2], max_count=1)
    close(out, decode_expected(case, q))
    assert torch.equal(out, prefill(case, q, chunks, [0, 1, 2], max_count=1))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60 if CUDA else 2))
def test_at_random(seed: int) -> None:
    draw = random.Random(seed)
    longest = 5000 if CUDA else 50
    group, kv_heads = draw.choice([1, 2, 3, 4, 7, 8]), draw.choice([1, 2])
    dim, block_size = draw.choice([64, 80, 96, 128]), draw.choice([1, 4, 16, 24, 64, 128])
    dtype, window = draw.choice(TYPES), draw.choice([0, draw.randint(1, longest)])
    contexts = [draw.randint(0, longest) for _ in range(3)]
    lost = [max(0, context - window) if window else 0 for context in contexts]
    case = make(contexts, kv_heads, dim, block_size, dtype, lost, seed)
    q = queries(3, group * kv_heads, case, seed)
    splits = draw.choice([1, draw.randint(1, 20 if CUDA else 4)])
    close(decode(case, q, window=window, splits=splits), decode_expected(case, q, window))
    chunks = [(draw.randint(0, longest), draw.randint(0, longest // 4)) for _ in range(3)]
    check_prefill(
        chunks,
        group=group,
        kv_heads=kv_heads,
        window=window,
        dim=dim,
        block_size=block_size,
        dtype=dtype,
        tune=None,
    )


def test_the_references_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "on_triton", lambda _: False)
    for window in (0, 7, 50):
        check_prefill(CHUNKS, window=window, group=7, block_size=4)
        contexts = [0, 1, 31, 64]
        case = make(
            contexts, lost=[max(0, c - window) if window else 0 for c in contexts]
        )
        q = queries(4, 6, case)
        close(decode(case, q, window=window), decode_expected(case, q, window))


@pytest.mark.skipif(not CUDA, reason="memory beyond 2**31 elements is for the GPU")
def test_blocks_far_from_each_other() -> None:
    near = make([300, 40], dtype=torch.float16)
    blocks, block_size, kv_heads, dim = near.k_cache.shape
    stride = (1 << 31) // blocks + 4096  # elements: the last blocks begin beyond 2**31
    stride -= stride % 16
    pool = torch.empty(blocks * stride, dtype=torch.float16, device=DEVICE)
    strides = (stride, kv_heads * dim, dim, 1)
    k_cache = pool.as_strided(near.k_cache.shape, strides)
    v_cache = pool.as_strided(near.k_cache.shape, strides, block_size * kv_heads * dim)
    k_cache.copy_(near.k_cache)
    v_cache.copy_(near.v_cache)
    far = replace(near, k_cache=k_cache, v_cache=v_cache)
    q = queries(2, 8, near)
    for splits in (1, 3):
        assert torch.equal(decode(far, q, splits=splits), decode(near, q, splits=splits))
    chunks, offsets = [(299, 1), (39, 1)], [0, 1]
    out = prefill(far, q, chunks, offsets, max_count=1)
    assert torch.equal(out, prefill(near, q, chunks, offsets, max_count=1))


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("splits", [1, 9])
def test_a_captured_call_follows_contexts_and_tables(splits: int) -> None:
    case, second = make([700, 20, 0], seed=1), make([5, 513, 64], seed=2)
    wide = max(case.table.shape[1], second.table.shape[1])
    table = torch.full((case.table.shape[0], wide), -1, dtype=torch.int32, device=DEVICE)
    blocks = max(len(case.k_cache), len(second.k_cache))
    pool = case.k_cache.new_empty(2, blocks, *case.k_cache.shape[1:])
    live = replace(
        case,
        k_cache=pool[0],
        v_cache=pool[1],
        table=table,
        rows=case.rows.clone(),
        contexts=case.contexts.clone(),
    )
    q = queries(3, 8, case)
    decode_attention(
        q, *arguments(live), 0.125, splits=splits
    )  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, *arguments(live), 0.125, splits=splits)
    for now in (case, second, second):
        live.k_cache[: len(now.k_cache)].copy_(now.k_cache)
        live.v_cache[: len(now.v_cache)].copy_(now.v_cache)
        live.table[:, : now.table.shape[1]].copy_(now.table)
        live.rows.copy_(now.rows)
        live.contexts.copy_(now.contexts)
        out.fill_(math.nan)
        graph.replay()
        close(out, decode_expected(now, q))


ROUNDS = [
    (2, 128, 3),
    (2, 256, 2),
    *claimed([(2, 198, 3), (4, 192, 3), (4, 256, 2), (4, 320, 3)]),
]


@pytest.mark.long
@pytest.mark.parametrize(("kv_heads", "batch", "stages"), ROUNDS)
def test_the_last_round_of_programs_is_as_full_as_can_be(
    kv_heads: int, batch: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make([*range(1, batch + 1)], kv_heads, 128, 64, torch.float16)
    q, stages_used, launch = (
        queries(batch, kv_heads, case),
        list[object](),
        attention._launch,
    )

    def noted(*arguments: Any, **options: Any) -> Tensor:
        stages_used.append(options["stages"])
        # The interpreter has no rounds, and takes half a minute.
        return launch(*arguments, **options) if CUDA else options["out"].zero_()

    monkeypatch.setattr(attention, "_launch", noted)
    out = decode(case, q, splits=1)
    assert torch.equal(out, decode(case, q, splits=1, tune=DECODE[HeadSize(2, 128)]))
    assert stages_used == [stages, 3]
    if CUDA:
        close(out, decode_expected(case, q))


def arguments(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return case.k_cache, case.v_cache, case.table, case.rows, case.contexts


def test_num_splits_fills_the_chip_and_no_more() -> None:
    assert num_splits(1, 4, 128, 32768) == 33
    assert num_splits(1, 4, 128, 1024) == 16  # a range is a tile at least
    assert num_splits(1, 1, 128, 1 << 21) == MAX_SPLITS
    assert num_splits(8, 4, 128, 4096) == 4
    assert num_splits(16, 4, 128, 4096) == 4  # from 64 on, two programs on each processor
    assert num_splits(16, 4, 80, 4096) == 4
    assert num_splits(16, 4, 64, 4096) == 8  # of small heads, four
    assert num_splits(64, 4, 128, 4096) == 1
    # No program has more than MAX_RANGE_TOKENS.
    assert num_splits(256, 4, 128, 32768) == 8
    assert num_splits(1, 4, 128, 0) == num_splits(0, 4, 128, 1) == 1


def test_what_does_not_fit_is_refused() -> None:
    case = make([5])
    q = queries(1, 4, case)
    args = (case.k_cache, case.v_cache, case.table, case.rows, case.contexts, 1.0)
    with pytest.raises(ValueError, match="splits is 129"):
        decode_attention(q, *args, splits=129)
    with pytest.raises(ValueError, match="q is torch"):
        decode_attention(q.half(), *args)
    with pytest.raises(ValueError, match="does not fit a cache"):
        decode_attention(q[:, :3], *args)
    with pytest.raises(ValueError, match="strides"):
        decode_attention(q, case.k_cache, case.v_cache.transpose(0, 1), *args[2:])
    with pytest.raises(ValueError, match="out must have the shape"):
        decode_attention(q, *args, out=torch.empty(2, 4, 64, device=DEVICE))
    with pytest.raises(ValueError, match="last dimension"):
        decode_attention(q.transpose(0, 2).contiguous().transpose(0, 2), *args)
    with pytest.raises(ValueError, match="3, 4 and 2 dimensions"):
        decode_attention(q[0], *args)


def test_zeros_to_count_in_are_kept() -> None:
    cpu = torch.device("cpu")
    assert arrivals(cpu, 7) is arrivals(cpu, 7)
    assert arrivals(cpu, 7) is not arrivals(cpu, 8)
    assert arrivals(cpu, 8).tolist() == [0] * 8


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [0, 9])
def test_sinks_take_their_share_of_the_softmax_once(splits: int, window: int) -> None:
    contexts, heads = [1, 40, 0, 17], 4
    case, sinks = make(contexts), torch.tensor([0.5, 3.0, -2.0, 8.0], device=DEVICE)
    q = queries(len(contexts), heads, case)
    decoded = decode_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.table,
        case.rows,
        case.contexts,
        0.2,
        window=window,
        sinks=sinks,
        splits=splits,
    )
    counts = torch.ones_like(case.contexts)
    chunked = prefill_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.table,
        case.rows,
        case.contexts - 1,
        counts * (case.contexts > 0),
        torch.arange(len(contexts), device=DEVICE),
        0.2,
        window=window,
        sinks=sinks,
        max_count=1,
        splits=splits,
    )
    for i, context in enumerate(contexts):
        first = max(0, context - window) if window else 0
        keys, values = (tensors[i][first:] for tensors in (case.keys, case.values))
        for head in range(heads):
            scores = keys[:, head // 2] @ q[i, head].double().cpu() * 0.2
            weights = torch.cat((scores, sinks[head, None].double().cpu())).softmax(0)
            want = weights[:-1] @ values[:, head // 2]
            for out in (decoded, chunked)[: 1 + (context > 0)]:
                head_out = out[i, head].double().cpu()
                torch.testing.assert_close(head_out, want, rtol=1e-5, atol=1e-6)


def test_keys_and_values_may_share_a_token_of_the_cache() -> None:
    """As those of small layers do, which share the place of a large one."""
    case = make([33, 20], 2, 16, dtype=torch.float16)
    q = queries(2, 4, case)
    expected = decode_expected(case, q)
    shape = case.k_cache.shape
    beside = torch.full((*shape[:2], 3, *shape[2:]), math.nan).to(case.k_cache)
    beside[:, :, 1], beside[:, :, 2] = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = beside[:, :, 1], beside[:, :, 2]
    for splits in (1, 3):
        out = decode(case, q, splits=splits, tune=DecodeTune(16, 4, 3))
        close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, *long([torch.float32])])
def test_heads_of_512_dimensions(dtype: torch.dtype) -> None:
    case = make([40], 1, 512, 16, dtype)
    q = queries(1, 4, case)
    close(decode(case, q, splits=2), decode_expected(case, q))
    check_prefill([(0, 9), (17, 5)], group=4, dim=512, dtype=dtype, tune=None)
