"""Attention over latents against attention over the keys and values that they stand for,
written out in float64, and what is written to the cache.
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from minfer import kernels
from minfer.kernels.attention import DraftLayout
from minfer.kernels.leaves import Norm
from minfer.kernels.mla import (
    latent_attention,
    latent_decode,
    latent_splits,
    write_latent,
)
from minfer.kernels.mla_tunes import HALF, SINGLE, SMALL, LatentTune, latent_tune

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF_TYPE = torch.bfloat16 if CUDA else torch.float16  # the interpreter's is wrong
LIMIT = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
GARBAGE = (-1, 1 << 30)
NOPE, VALUE = 12, 10  # dimensions of a head's key and value
KEYS_FIRST = LatentTune(16, 16, 4, 3, keys_first=True)
ROWS_FIRST = LatentTune(16, 32, 4, 2, keys_first=False)


@dataclass
class Case:
    """Sequences in a paged cache of latents, and what they hold as plain tensors."""

    latents: list[Tensor]  # a sequence: [context, latent + rotated] float64
    cache: Tensor
    table: Tensor
    rows: Tensor
    contexts: Tensor
    key: Tensor  # [heads, NOPE, latent] float64
    value: Tensor  # [heads, VALUE, latent] float64
    scale: float = 0.2

    @property
    def latent(self) -> int:
        return self.key.shape[2]


def make(
    contexts: list[int],
    heads: int = 4,
    latent: int = 32,
    rotated: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random contents in shuffled blocks, which other layers' are between. What no
    sequence may read is NaN, and its id garbage.
    """
    draw = torch.Generator().manual_seed(seed)
    needs = [-(-context // block_size) for context in contexts]
    width, height = max([*needs, 1]) + 3, len(contexts) + 2
    ids = (torch.randperm(sum(needs) + 2, generator=draw) + 1).tolist()
    pool = torch.full(
        (len(ids) + 1, 2, block_size, latent + rotated), math.nan, dtype=dtype
    )
    garbage = torch.tensor(GARBAGE, dtype=torch.int32)
    table = garbage.repeat(height, width)[:, :width].contiguous()
    rows = torch.randperm(height, generator=draw)[: len(contexts)].to(torch.int32)
    latents = []
    for row, context, need in zip(rows.tolist(), contexts, needs, strict=True):
        mine = torch.tensor([ids.pop() for _ in range(need)], dtype=torch.int64)
        table[row, :need] = mine.int()
        drawn = torch.randn(context, latent + rotated, generator=draw).to(dtype)
        latents.append(drawn.double())
        tokens = torch.arange(context)
        pool[mine[tokens // block_size], 1, tokens % block_size] = drawn
    weights = torch.randn(heads, NOPE + VALUE, latent, generator=draw).double()
    scaled = weights.div(latent**0.5)
    key, value = scaled[:, :NOPE], scaled[:, NOPE:]
    return Case(
        latents,
        pool.to(DEVICE)[:, 1],
        table.to(DEVICE),
        rows.to(DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        key,
        value,
    )


@dataclass
class Queries:
    """Queries of a case's heads, as projected and as absorbed."""

    nope: Tensor  # [tokens, heads, NOPE] float64
    rotated: Tensor  # [tokens, heads, rotated] float64
    absorbed: Tensor  # [tokens, heads, latent + rotated], as kernels take them


def queries(tokens: int, case: Case, seed: int = 1) -> Queries:
    draw = torch.Generator().manual_seed(seed)
    heads, rotated = len(case.key), case.cache.shape[2] - case.latent
    drawn = torch.randn(tokens, heads, NOPE + rotated, generator=draw)
    drawn = drawn.to(case.cache.dtype).double()
    nope, turned = drawn[..., :NOPE], drawn[..., NOPE:]
    )
    # A view into rows that hold more (here NaN).
    wide = torch.full((tokens, heads + 1, case.cache.shape[2]), math.nan).double()
    wide[:, :heads, : case.latent] = torch.einsum("thn,hnl->thl", nope, case.key)
    wide[:, :heads, case.latent :] = turned
    return Queries(nope, turned, wide.to(case.cache)[:, :heads])


def naive(case: Case, q: Queries, here: list[int], latents: Tensor, start: int) -> Tensor:
    """[queries, heads, VALUE]: attention of queries `here`, at positions start on, over
    expanded keys and values.
    """
    latent, turned = torch.split(
        latents, [case.latent, latents.shape[1] - case.latent], 1
    )
    keys = torch.einsum("cl,hnl->chn", latent, case.key)
    values = torch.einsum("cl,hvl->chv", latent, case.value)
    scores = torch.einsum("qhn,chn->hqc", q.nope[here], keys)
    scores += torch.einsum("qhr,cr->hqc", q.rotated[here], turned)
    positions = torch.arange(start, start + len(here))[:, None]
    unseen = torch.arange(len(latents)) > positions
    weights = (scores * case.scale).masked_fill(unseen, -math.inf).softmax(-1)
    return torch.einsum("hqc,chv->qhv", weights, values)


def close(case: Case, out: Tensor, expected: Tensor) -> None:
    found = torch.einsum("thl,hvl->thv", out.double().cpu(), case.value)
    error = (found - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < LIMIT[out.dtype], f"relative error {error:.2e}"


def room(case: Case, q: Queries) -> Tensor:
    """Poisoned memory for results, a view."""
    tokens, heads = q.nope.shape[:2]
    shape = tokens, heads, case.latent + 8
    out = torch.full(shape, math.nan, dtype=case.cache.dtype, device=DEVICE)
    return out[..., : case.latent]


def decode(case: Case, q: Queries, **options: object) -> Tensor:
    """`latent_decode` of this case into poisoned memory."""
    out = room(case, q)
    result = latent_decode(
        q.absorbed,
        case.cache,
        case.table,
        case.rows,
        case.contexts,
        case.scale,
        value_dim=case.latent,
        out=out,
        **options,  # type: ignore[arg-type]  # checked by its callee
    )
    assert result is out
    return out


def check_decode(case: Case, q: Queries, **options: object) -> Tensor:
    out = decode(case, q, **options)
    for i, (latents, context) in enumerate(
        zip(case.latents, case.contexts.tolist(), strict=True)
    ):
        if context:
            close(case, out[[i]], naive(case, q, [i], latents, context - 1))
        else:
            assert not out[i].any()
    return out


def attend(
    case: Case,
    q: Queries,
    chunks: list[tuple[int, int]],
    offsets: list[int],
    **options: object,
) -> Tensor:
    """`latent_attention` of chunks (start, count) into poisoned memory."""
    out = room(case, q)
    starts, counts, places = (
        torch.tensor(part, dtype=torch.int32, device=DEVICE)
        for part in (*zip(*chunks, strict=True), offsets)
    )
    result = latent_attention(
        q.absorbed,
        case.cache,
        case.table,
        case.rows,
        starts,
        counts,
        places,
        case.scale,
        value_dim=case.latent,
        out=out,
        **options,  # type: ignore[arg-type]  # checked by its callee
    )
    assert result is out
    return out


# As (start, count); max_count may be above all of them.
CHUNKS = [(0, 37), (63, 1), (17, 20), (3, 0)]


def check_chunks(
    chunks: list[tuple[int, int]], *, slack: int = 0, seed: int = 0, **options: object
) -> None:
    """Every chunk against the naive attention; tokens of no chunk stay untouched."""
    shape = {
        name: options.pop(name)
        for name in ("heads", "latent", "rotated", "block_size", "dtype")
        if name in options
    }
    contexts = [start + count for start, count in chunks]
    case = make(contexts, seed=seed, **shape)  # type: ignore[arg-type]  # its own names
    offsets, end = [], 2  # two tokens of no chunk before, one after each chunk
    for _, count in chunks:
        offsets.append(end)
        end += count + 1
    q = queries(end, case)
    most = max(count for _, count in chunks) + slack
    out = attend(case, q, chunks, offsets, max_count=most, **options)
    untouched = torch.ones(end, dtype=torch.bool)
    for (start, count), offset, latents in zip(
        chunks, offsets, case.latents, strict=True
    ):
        here = [*range(offset, offset + count)]
        untouched[here] = False
        close(case, out[here], naive(case, q, here, latents, start))
    assert out[untouched.to(DEVICE)].isnan().all()


SHAPES = [
    # heads, latent, rotated, block_size, type
    (1, 32, 16, 16, torch.float32),
    (3, 64, 16, 64, torch.float16),
    (16, 32, 16, 4, torch.float16),
    (20, 48, 24, 24, torch.float32),
]


@pytest.mark.long
@pytest.mark.parametrize(("heads", "latent", "rotated", "block_size", "dtype"), SHAPES)
@pytest.mark.parametrize("tune", [KEYS_FIRST, ROWS_FIRST])
def test_chunks_at_every_shape(
    heads: int,
    latent: int,
    rotated: int,
    block_size: int,
    dtype: torch.dtype,
    tune: LatentTune,
) -> None:
    check_chunks(
        [(0, 9), (63, 1), (17, 5), (3, 0)],
        slack=3,
        heads=heads,
        latent=latent,
        rotated=rotated,
        block_size=block_size,
        dtype=dtype,
        tune=tune,
    )


@pytest.mark.parametrize("tune", [KEYS_FIRST, ROWS_FIRST])
def test_chunks(tune: LatentTune) -> None:
    check_chunks([(10, 5), (0, 0), (20, 1)], tune=tune)


@pytest.mark.long
@pytest.mark.parametrize("splits", [3, 4])
def test_chunks_in_splits(splits: int) -> None:
    for tune in (KEYS_FIRST, ROWS_FIRST):
        check_chunks(
            [(60, 3), (0, 1), (2, 0), (25, 9)], splits=splits, slack=1, tune=tune
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "tune", [None, SMALL, SINGLE, *HALF.values()], ids=lambda tune: str(tune and tune[:4])
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_constants_of_the_tables(tune: LatentTune | None, block_size: int) -> None:
    dtype = torch.float32 if tune == SINGLE else HALF_TYPE
    check_chunks([(40, 5), (100, 1)], block_size=block_size, dtype=dtype, tune=tune)


@pytest.mark.long
@pytest.mark.parametrize("heads", [16, 128] if CUDA else [16])
@pytest.mark.parametrize("splits", [1, 2])
def test_deepseeks_sizes(heads: int, splits: int) -> None:
    case = make([130, 65], heads, 512, 64, 64, HALF_TYPE)
    q = queries(2, case)
    for tune in (None, HALF[min(heads, 64)]):
        check_decode(case, q, splits=splits, tune=tune)
    check_chunks(
        [(70, 2)], heads=heads, latent=512, rotated=64, dtype=HALF_TYPE, splits=splits
    )


@pytest.mark.long
@pytest.mark.parametrize("splits", [None, 1, 3, 7])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_decode(splits: int | None, block_size: int) -> None:
    case = make([33, 0, 90, 1], block_size=block_size)
    q = queries(4, case)
    for tune in (KEYS_FIRST, ROWS_FIRST):
        check_decode(case, q, splits=splits, tune=tune)


def test_decode_of_no_context_gives_zeros_and_reads_no_id() -> None:
    case = make([0, 20], 2)
    for splits in (1, 2):
        check_decode(case, queries(2, case), splits=splits, tune=KEYS_FIRST)


def test_decode_of_large_scores_stays_finite() -> None:
    case = replace(make([40], dtype=torch.float16), scale=200.0)
    check_decode(case, queries(1, case), splits=2, tune=KEYS_FIRST)


@pytest.mark.long
def test_decode_again_and_among_others_gives_the_same_bits() -> None:
    case = make([70, 30], dtype=torch.float16)
    q = queries(2, case)
    for splits in (1, 3):
        out = decode(case, q, splits=splits, tune=ROWS_FIRST)
        assert torch.equal(out, decode(case, q, splits=splits, tune=ROWS_FIRST))
        for i in range(2):
            one = slice(i, i + 1)
            case_i = replace(case, rows=case.rows[one], contexts=case.contexts[one])
            q_i = Queries(q.nope[one], q.rotated[one], q.absorbed[one])
            alone = decode(case_i, q_i, splits=splits, tune=ROWS_FIRST)
            assert torch.equal(alone, out[one])


@pytest.mark.long
def test_decode_makes_its_own_room_and_takes_long_positions() -> None:
    case = make([70, 3])
    q = queries(2, case)
    more = case.table, case.rows.long(), case.contexts.long(), case.scale
    out = latent_decode(q.absorbed, case.cache, *more, value_dim=case.latent, splits=2)
    assert out.is_contiguous()
    for i, (latents, context) in enumerate(zip(case.latents, (70, 3), strict=True)):
        close(case, out[[i]], naive(case, q, [i], latents, context - 1))


@pytest.mark.long
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tune", [KEYS_FIRST, ROWS_FIRST, HALF[64]])
def test_drafts_to_verify(splits: int, tune: LatentTune) -> None:
    """A line of first queries, among others, then a line of rows for each place."""
    chunks, most, alone = [(40, 3), (0, 1), (63, 5), (17, 2), (90, 4)], 6, 8
    case = make([start + count for start, count in chunks], 3)
    lines = [
        [i, *range(alone + i, alone + i + len(chunks) * (most - 1), len(chunks))]
        for i in range(len(chunks))
    ]
    q = queries(1 + max(map(max, lines)), case)
    layout = DraftLayout(skip=alone, stride=len(chunks))
    out = attend(
        case,
        q,
        chunks,
        [*range(len(chunks))],
        max_count=most,
        splits=splits,
        draft_layout=layout,
        tune=tune,
    )
    untouched = torch.ones(len(q.nope), dtype=torch.bool)
    for (start, count), line, latents in zip(chunks, lines, case.latents, strict=True):
        close(case, out[line[:count]], naive(case, q, line[:count], latents, start))
        assert out[line[count:]].isfinite().all()
        untouched[line] = False
    assert out[untouched.to(DEVICE)].isnan().all()


# In the latent, and in the rotated key; an infinite key may only hide itself.
@pytest.mark.parametrize(
    ("splits", "bad", "place"), [(1, math.nan, 0), (3, math.inf, 31), (1, math.nan, 40)]
)
@pytest.mark.parametrize("tune", [KEYS_FIRST, ROWS_FIRST])
def test_a_draft_that_is_not_finite_is_seen_by_none_before_it(
    splits: int, bad: float, place: int, tune: LatentTune
) -> None:
    start, broken = 30, 32  # the next tile
    case = make([start + 4], 1)
    case.cache[case.table[case.rows[0], broken // 16], broken % 16, place] = bad
    q = queries(5, case)
    layout = DraftLayout(skip=1, stride=1)
    out = attend(
        case,
        q,
        [(start, 4)],
        [0],
        max_count=5,
        splits=splits,
        draft_layout=layout,
        tune=tune,
    )
    known = case.latents[0][:broken]
    close(case, out[:2], naive(case, q, [0, 1], known, start))
    assert out[2:4].isnan().all()
    assert out[4].isfinite().all() or place == 40


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40 if CUDA else 4))
def test_at_random(seed: int) -> None:
    draw = random.Random(seed)
    longest = 3000 if CUDA else 60
    shape = {
        "heads": draw.choice([1, 3, 8, 16]),
        "latent": draw.choice([16, 32, 64]),
        "rotated": draw.choice([16, 32]),
        "block_size": draw.choice([1, 16, 24, 64, 128]),
        "dtype": draw.choice([torch.float32, HALF_TYPE]),
    }
    tune = draw.choice([None, KEYS_FIRST, ROWS_FIRST])
    splits = draw.choice([1, draw.randint(1, 20 if CUDA else 4)])
    case = make([draw.randint(0, longest) for _ in range(3)], seed=seed, **shape)  # type: ignore[arg-type]  # its own names
    check_decode(case, queries(3, case, seed), splits=splits, tune=tune)
    chunks = [(draw.randint(0, longest), draw.randint(0, longest // 6)) for _ in range(3)]
    check_chunks(chunks, seed=seed, splits=splits, tune=tune, **shape)


def test_the_references_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreting", False)
    if CUDA:
        pytest.skip("tensors are the GPU's")
    check_chunks(CHUNKS, block_size=4)
    case = make([0, 1, 31, 64])
    check_decode(case, queries(4, case))
    test_a_draft_that_is_not_finite_is_seen_by_none_before_it(1, math.nan, 0, SINGLE)


@dataclass
class Written:
    """What `write_latent` is given: seven tokens, two of them without a slot."""

    kv: Tensor
    norm: Norm
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor
    cache: Tensor
    q: Tensor

    def write(self, **options: object) -> None:
        write_latent(
            self.kv,
            self.norm,
            self.cos_sin,
            self.positions,
            self.slots,
            self.cache,
            self.q,
            **options,  # type: ignore[arg-type]  # checked by its callee
        )


def written(
    device: str,
    dtype: torch.dtype = torch.float32,
    heads: int = 3,
    latent: int = 32,
    rotated: int = 16,
) -> Written:
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(7, latent + rotated + 5, generator=draw).to(dtype).to(device)
    q = torch.randn(7, heads, NOPE + rotated, generator=draw).to(dtype).to(device)
    angles = torch.rand(50, rotated // 2, generator=draw).double() * 6
    pool = torch.full((6, 2, 4, latent + rotated), math.nan, dtype=dtype, device=device)
    return Written(
        kv[:, : latent + rotated],
        Norm((torch.rand(latent, generator=draw) + 0.5).to(dtype).to(device), 1e-5),
        torch.cat((angles.cos(), angles.sin()), 1).float().to(device),
        torch.tensor([0, 49, 3, 4, 5, 17, 17], device=device),
        torch.tensor([9, -1, 0, 23, 4, -1, 14], device=device),
        pool[:, 1],
        q[..., NOPE:],
    )


def rotated(x: Tensor, given: Written, interleaved: bool) -> Tensor:
    """x [tokens, heads, rotated] as complex numbers, times those of the angles."""
    cos, sin = given.cos_sin.double().cpu()[given.positions.cpu(), None].chunk(2, -1)
    wide = x.double().cpu()
    if not interleaved:
        wide = torch.stack(wide.chunk(2, -1), -1).flatten(-2)
    pairs = wide.reshape(*wide.shape[:-1], -1, 2)
    turned = torch.view_as_complex(pairs)
    pairs = torch.view_as_real(turned * torch.complex(cos, sin))
    return pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_what_is_written(device: str, interleaved: bool, apart: bool) -> None:
    given = written(device)
    kv, q = given.kv.clone(), given.q.clone()
    out = torch.full_like(q, math.nan) if apart else None
    given.write(out=out, interleaved=interleaved)
    assert torch.equal(given.kv, kv)
    found = given.q if out is None else out
    assert (found.cpu() - rotated(q, given, interleaved)).abs().max() < 1e-6
    assert out is None or torch.equal(given.q, q)
    latent = kv[:, :32].double().cpu()
    size = latent.square().mean(1, keepdim=True).add(given.norm.eps).sqrt()
    normed = latent / size * given.norm.weight.double().cpu()
    turned = rotated(kv[:, None, 32:], given, interleaved)[:, 0]
    whole = torch.cat((normed, turned), 1)
    kept = given.cache.flatten(0, 1).cpu()  # a copy
    slots = given.slots.cpu()
    there = slots >= 0
    assert (kept[slots[there]] - whole[there]).abs().max() < 2e-6
    kept[slots[there]] = math.nan
    assert kept.isnan().all()


@pytest.mark.long
@pytest.mark.parametrize(("heads", "latent", "turned"), [(20, 48, 24), (16, 512, 64)])
def test_what_is_written_at_other_shapes(heads: int, latent: int, turned: int) -> None:
    given, same = (written(DEVICE, HALF_TYPE, heads, latent, turned) for _ in range(2))
    given.write()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minfer.kernels.mla.on_triton", lambda _: False)
        patch.setattr("minfer.kernels.norm.on_triton", lambda _: False)
        same.write()
    for found, expected in ((given.q, same.q), (given.cache, same.cache)):
        torch.testing.assert_close(found, expected, atol=0, rtol=8e-3, equal_nan=True)


def test_rows_are_neighbours_however_few() -> None:
    assert latent_tune(2, 5, (9, 0)).rows == latent_tune(2, 16, (9, 0)).rows == 16
    assert latent_tune(2, 17, (9, 0)).rows == 32
    assert latent_tune(2, 128, (10, 0)) == HALF[64]
    for small in ((8, 0), (8, 9), (12, 0)):
        assert latent_tune(2, 128, small) == SMALL
    assert latent_tune(4, 128, (9, 0)) == SINGLE


def test_splits_fill_the_chip_and_no_more() -> None:
    assert latent_splits(1, 16, 1, 4096) == 64  # of a tile each
    assert latent_splits(1, 16, 1, 32768) == 128
    assert latent_splits(8, 16, 1, 32768) == 16
    assert latent_splits(8, 16, 5, 32768) == 8  # two tiles of rows
    assert latent_splits(8, 128, 1, 4096) == 8
    assert latent_splits(64, 128, 1, 4096) == 1
    assert latent_splits(0, 16, 1, 0) == 1


def test_what_does_not_fit_is_refused() -> None:
    case = make([5])
    q = queries(1, case).absorbed
    args = case.table, case.rows, case.contexts, 1.0

    def refused(
        match: str,
        q: Tensor = q,
        cache: Tensor = case.cache,
        splits: int = 1,
        value_dim: int = 32,
    ) -> None:
        with pytest.raises(ValueError, match=match):
            latent_decode(q, cache, *args, splits=splits, value_dim=value_dim)

    refused("splits is 129", splits=129)
    refused("they have one type", q.half())
    refused("do not fit a cache", q[..., 1:])
    refused("do not fit a cache", value_dim=48)
    refused("3-dimensional", q[0])
    refused("last dimension", q.transpose(0, 2).contiguous().transpose(0, 2))
    with pytest.raises(ValueError, match="out has the shape"):
        latent_decode(q, case.cache, *args, value_dim=32, out=torch.empty_like(q))
    given = written(DEVICE)
    with pytest.raises(ValueError, match="do not fit together"):
        replace(given, q=given.q[..., 1:]).write()


@pytest.mark.skipif(not CUDA, reason="memory beyond 2**31 elements is for the GPU")
def test_blocks_far_apart() -> None:
    near = make([300, 40], dtype=HALF_TYPE)
    blocks, _, size = near.cache.shape
    stride = (1 << 31) // blocks + 4096  # elements: the last blocks begin beyond 2**31
    stride -= stride % 16
    pool = torch.empty(blocks * stride, dtype=HALF_TYPE, device=DEVICE)
    cache = pool.as_strided(near.cache.shape, (stride, size, 1))
    cache.copy_(near.cache)
    q = queries(2, near)
    for splits in (1, 3):
        out = decode(replace(near, cache=cache), q, splits=splits)
        assert torch.equal(out, decode(near, q, splits=splits))


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
@pytest.mark.parametrize("splits", [1, 9])
def test_a_captured_call_follows_contexts(splits: int) -> None:
    case = make([700, 20, 64], 16, 512, 64, 64, HALF_TYPE)
    q = queries(3, case)
    out = room(case, q)

    def call() -> None:
        more = case.table, case.rows, case.contexts, case.scale
        latent_decode(
            q.absorbed, case.cache, *more, value_dim=512, splits=splits, out=out
        )

    call()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for contexts in ([700, 20, 64], [3, 0, 1], [640, 19, 0]):
        case.contexts.copy_(torch.tensor(contexts, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        for i, context in enumerate(contexts):
            if context:
                known = case.latents[i][:context]
                close(case, out[[i]], naive(case, q, [i], known, context - 1))
            else:
                assert not out[i].any()
