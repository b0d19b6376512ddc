"""Attention over latents against attention over the keys and values that they stand for,
written out in float64.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minfer import kernels
from minfer.kernels.attention import DraftLayout
from minfer.kernels.mla import latent_decode
from minfer.kernels.mla_tunes import (
    SMALL_TUNE_16_BIT,
    TUNE_FLOAT32,
    TUNES_16_BIT,
    LatentTune,
    latent_splits,
    latent_tune,
)
from tests.kernels.latents import (
    CUDA,
    DEVICE,
    HALF_TYPE,
    Queries,
    Shape,
    attend,
    check_chunks,
    check_decode,
    close,
    decode,
    make,
    naive,
    queries,
    room,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
SMALL_TILE = LatentTune(16, 16, 4, 3)
LARGE_TILE = LatentTune(16, 32, 4, 2)


SHAPES = [
    # heads, latent, rotated, block_size, type
    Shape(1, 32, 16, 16, torch.float32),
    Shape(3, 64, 16, 64, torch.float16),
    Shape(16, 32, 16, 4, torch.float16),
    Shape(20, 48, 24, 24, torch.float32),
]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tune", [SMALL_TILE, LARGE_TILE])
def test_chunks_at_every_shape(shape: Shape, tune: LatentTune) -> None:
    check_chunks([(0, 9), (63, 1), (17, 5), (3, 0)], shape, slack=3, tune=tune)


@pytest.mark.parametrize("tune", [SMALL_TILE, LARGE_TILE])
def test_chunks(tune: LatentTune) -> None:
    check_chunks([(10, 3), (0, 0), (20, 1)], Shape(heads=2), tune=tune)


@pytest.mark.long
@pytest.mark.parametrize("tune", [SMALL_TILE, LARGE_TILE])
def test_chunks_in_splits(tune: LatentTune) -> None:
    chunks = [(60, 3), (0, 1), (2, 0), (25, 4)]
    check_chunks(chunks, Shape(heads=3), splits=3, slack=1, tune=tune)


@pytest.mark.long
@pytest.mark.parametrize(
    "tune",
    [None, SMALL_TUNE_16_BIT, TUNE_FLOAT32, *TUNES_16_BIT.values()],
    ids=lambda tune: str(tune and tune[:4]),
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_constants_of_the_tables(tune: LatentTune | None, block_size: int) -> None:
    dtype = torch.float32 if tune == TUNE_FLOAT32 else HALF_TYPE
    shape = Shape(block_size=block_size, dtype=dtype)
    check_chunks([(40, 5), (100, 1)], shape, tune=tune)


@pytest.mark.long
@pytest.mark.parametrize("heads", [16, 128] if CUDA else [16])
@pytest.mark.parametrize("splits", [1, 2])
def test_deepseeks_sizes(heads: int, splits: int) -> None:
    shape = Shape(heads, 512, 64, 64, HALF_TYPE)
    case = make([130, 65], shape)
    for tune in (None, TUNES_16_BIT[min(heads, 64)]):
        check_decode(case, queries(2, case), splits=splits, tune=tune)
    check_chunks([(70, 2)], shape, splits=splits)


@pytest.mark.long
@pytest.mark.parametrize(("splits", "block_size"), [(None, 16), (1, 1), (7, 64)])
@pytest.mark.parametrize("tune", [SMALL_TILE, LARGE_TILE])
def test_decode(splits: int | None, block_size: int, tune: LatentTune) -> None:
    case = make([33, 0, 90, 1], Shape(heads=3, block_size=block_size))
    check_decode(case, queries(4, case), splits=splits, tune=tune)


def test_decode_of_no_context_gives_zeros_and_reads_no_id() -> None:
    case = make([0, 20], Shape(heads=1))
    for splits in (1, 2):
        check_decode(case, queries(2, case), splits=splits, tune=SMALL_TILE)


def test_decode_of_large_scores_stays_finite() -> None:
    case = replace(make([40], Shape(1, dtype=torch.float16)), scale=200.0)
    check_decode(case, queries(1, case), splits=2, tune=SMALL_TILE)


@pytest.mark.long
def test_decode_again_and_among_others_gives_the_same_bits() -> None:
    case = make([70, 30], Shape(2, dtype=torch.float16))
    q = queries(2, case)
    for splits in (1, 3):
        out = decode(case, q, splits=splits, tune=LARGE_TILE)
        assert torch.equal(out, decode(case, q, splits=splits, tune=LARGE_TILE))
        for i in range(2):
            row = slice(i, i + 1)
            case_i = replace(case, rows=case.rows[row], contexts=case.contexts[row])
            q_i = Queries(q.nope[row], q.rotated[row], q.absorbed[row])
            out_alone = decode(case_i, q_i, splits=splits, tune=LARGE_TILE)
            assert torch.equal(out_alone, out[row])


@pytest.mark.long
def test_decode_makes_its_own_room_and_takes_long_positions() -> None:
    case = make([70, 3])
    q = queries(2, case)
    arguments = case.table, case.rows.long(), case.contexts.long(), case.scale
    out = latent_decode(
        q.absorbed, case.cache, *arguments, value_dim=case.latent, splits=2
    )
    assert out.is_contiguous()
    for i, (latents, context) in enumerate(zip(case.latents, (70, 3), strict=True)):
        close(case, out[[i]], naive(case, q, [i], latents, context - 1))


@pytest.mark.long
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tune", [SMALL_TILE, LARGE_TILE, TUNES_16_BIT[64]])
def test_drafts_to_verify(splits: int, tune: LatentTune) -> None:
    """A line of first queries, among others, then a line of rows for each place."""
    chunks, max_count, num_solo = [(0, 1), (63, 5), (17, 2)], 6, 8
    case = make([start + count for start, count in chunks], Shape(heads=3))
    lines = [
        [
            i,
            *range(
                num_solo + i, num_solo + i + len(chunks) * (max_count - 1), len(chunks)
            ),
        ]
        for i in range(len(chunks))
    ]
    q = queries(1 + max(map(max, lines)), case)
    layout = DraftLayout(skip=num_solo, stride=len(chunks))
    out = attend(
        case,
        q,
        chunks,
        [*range(len(chunks))],
        max_count=max_count,
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
@pytest.mark.parametrize("tune", [SMALL_TILE, LARGE_TILE])
def test_a_draft_that_is_not_finite_is_seen_by_none_before_it(
    splits: int, bad: float, place: int, tune: LatentTune
) -> None:
    start, broken = 30, 32  # the next tile
    case = make([start + 4], Shape(heads=1))
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
    finite = case.latents[0][:broken]
    close(case, out[:2], naive(case, q, [0, 1], finite, start))
    assert out[2:4].isnan().all()
    assert out[4].isfinite().all() or place == 40


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40 if CUDA else 3))
def test_at_random(seed: int) -> None:
    draw = random.Random(seed)
    longest = 3000 if CUDA else 40
    shape = Shape(
        heads=draw.choice([1, 3, 8, 16]),
        latent=draw.choice([16, 32, 64]),
        rotated=draw.choice([16, 32]),
        block_size=draw.choice([1, 16, 24, 64, 128]),
        dtype=draw.choice([torch.float32, HALF_TYPE]),
    )
    tune = draw.choice([None, SMALL_TILE, LARGE_TILE])
    splits = draw.choice([1, draw.randint(1, 20 if CUDA else 4)])
    case = make([draw.randint(0, longest) for _ in range(3)], shape, seed)
    check_decode(case, queries(3, case, seed), splits=splits, tune=tune)
    chunks = [(draw.randint(0, longest), draw.randint(0, longest // 6)) for _ in range(3)]
    check_chunks(chunks, shape, seed=seed, splits=splits, tune=tune)


def test_the_references_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreting", False)
    if CUDA:
        pytest.skip("tensors are the GPU's")
    check_chunks([(0, 37), (63, 1), (17, 20), (3, 0)], Shape(block_size=4))
    case = make([0, 1, 31, 64])
    check_decode(case, queries(4, case))
    test_a_draft_that_is_not_finite_is_seen_by_none_before_it(
        1, math.nan, 0, TUNE_FLOAT32
    )


def test_rows_are_neighbours_however_few() -> None:
    assert latent_tune(2, 5, (9, 0)).rows == latent_tune(2, 16, (9, 0)).rows == 16
    assert latent_tune(2, 17, (9, 0)).rows == 32
    assert latent_tune(2, 128, (10, 0)) == TUNES_16_BIT[64]
    for small in ((8, 0), (8, 9), (12, 0)):
        assert latent_tune(2, 128, small) == SMALL_TUNE_16_BIT
    assert latent_tune(4, 128, (9, 0)) == TUNE_FLOAT32


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

    def refused(match: str, q: Tensor = q, value_dim: int = 32, splits: int = 1) -> None:
        with pytest.raises(ValueError, match=match):
            latent_decode(q, case.cache, *args, value_dim=value_dim, splits=splits)

    refused("splits is 129", splits=129)
    refused("they have one type", q.half())
    refused("do not fit a cache", q[..., 1:])
    refused("do not fit a cache", value_dim=48)
    refused("3-dimensional", q[0])
    refused("last dimension", q.transpose(0, 2).contiguous().transpose(0, 2))
    with pytest.raises(ValueError, match="out has the shape"):
        latent_decode(q, case.cache, *args, value_dim=32, out=torch.empty_like(q))


@pytest.mark.skipif(not CUDA, reason="memory beyond 2**31 elements is for the GPU")
def test_blocks_far_apart() -> None:
    near = make([300, 40], Shape(dtype=HALF_TYPE))
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
    case = make([700, 20, 64], Shape(16, 512, 64, 64, HALF_TYPE))
    q = queries(3, case)
    out = room(case, q)

    def call() -> None:
        arguments = case.table, case.rows, case.contexts, case.scale
        latent_decode(
            q.absorbed, case.cache, *arguments, value_dim=512, splits=splits, out=out
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
                latents = case.latents[i][:context]
                close(case, out[[i]], naive(case, q, [i], latents, context - 1))
            else:
                assert not out[i].any()
