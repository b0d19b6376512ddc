"""Paged attention and its plan, against attention written out in full."""

import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cpu import attention_reads, paged_attention
from minfer.effects.execution.cpu.attention_reads import (
    MAX_GROUP_TOKENS,
    LayerKind,
    MaskRule,
    Reads,
    plan_reads,
)
from minfer.effects.execution.cpu.paged_attention import make_cache, rope_table, rotate
from minfer.effects.models.architecture.batch import Batch, BatchRow, make_batch
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.rope_scaling import Rope
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.layout.shapes import MAX_MASK_NUMBERS
from tests.effects.tiny_model import gqa_of, with_attention, with_windows

SPEC = parse_spec(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1 << 16,
    }
)


def written_out(
    spec: ModelSpec,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
) -> Tensor:
    """query [heads, head_dim] over keys and values [context, kv_heads, head_dim]."""
    shared = gqa_of(spec).heads // gqa_of(spec).kv_heads
    out = []
    for head in range(gqa_of(spec).heads):
        scores = (
            keys[:, head // shared]
            @ query[head]
            * (scale or gqa_of(spec).head_dim ** -0.5)
        )
        if (cap := gqa_of(spec).score_cap) is not None:
            scores = (scores / cap).tanh() * cap
        out.append(scores.softmax(0) @ values[:, head // shared])
    return torch.cat(out)


def play(
    rows: list[tuple[int, int]],
    block_size: int,
    *,
    device: bool,
    spec: ModelSpec = SPEC,
    seed: int = 0,
    scale: float | None = None,
) -> Mapping[int | None, Reads]:
    """Attend for rows of (start, inputs) with random contents; check every token's
    output.

    Returns what was read.

    Blocks outside the window of every layer have no id any more, and what they held is
    lost.
    """
    torch.manual_seed(seed)
    needs = [-(-(start + count) // block_size) for start, count in rows]
    ids = random.Random(seed).sample(range(sum(needs) + 3), sum(needs))
    tables = [[ids.pop() for _ in range(need)] for need in needs]
    cache = make_cache(spec, sum(needs) + 3, block_size, "float32")
    cache.data.normal_()
    before = cache.data.clone()
    owned = [list(table) for table in tables]
    if None not in spec.windows:
        reach = max(window for window in spec.windows if window is not None)
        for (start, _), table in zip(rows, tables, strict=True):
            for i in range(max(0, start + 1 - reach) // block_size):
                cache.data[:, table[i]] = torch.nan
                table[i] = -1
    batch_rows = [
        BatchRow([0] * n, start, table)
        for (start, n), table in zip(rows, tables, strict=True)
    ]
    batch = make_batch(batch_rows, block_size)
    if device:  # behind a row's own blocks, tables of the device have leftovers
        wide = torch.full((len(rows), max(needs) + 2), -7, dtype=torch.int32)
        for i, table in enumerate(tables):
            wide[i, : len(table)] = torch.tensor(table)
        batch = evolve(batch, table=wide[None])
    singles = [i for i, (_, count) in enumerate(rows) if count == 1]
    chunks = [i for i, (_, count) in enumerate(rows) if count > 1]
    owners = [
        (i, position)
        for i in singles + chunks
        for position in range(rows[i][0], sum(rows[i]))
    ]
    assert batch.positions.tolist() == [position for _, position in owners]
    gqa = gqa_of(spec)
    qkv = torch.randn(len(owners), gqa.heads + 2 * gqa.kv_heads, gqa.head_dim)
    for layer, window in enumerate(spec.windows):
        flat = before[layer].view(-1, 2 * gqa_of(spec).kv_heads, gqa_of(spec).head_dim)
        flat.index_copy_(0, batch.slots[0], qkv[:, gqa_of(spec).heads :])
        mixed = cache.attend(batch, layer, qkv.flatten(1), scale)
        attention = spec.layers[layer].attention
        assert isinstance(attention, GQA)
        for token, (i, position) in enumerate(owners):
            first = 0 if window is None else max(0, position + 1 - window)
            if attention.chunk:
                first = position // attention.chunk * attention.chunk
            kv = torch.cat([before[layer, block] for block in owned[i]])[
                first : position + 1
            ]
            want = written_out(
                spec, qkv[token, : gqa_of(spec).heads], kv[:, 0], kv[:, 1], scale
            )
            torch.testing.assert_close(mixed[token], want, rtol=1e-4, atol=1e-5)
    return by_window(batch, block_size, spec.windows, chunked=gqa.chunk > 0)


def reads(
    rows: list[BatchRow], windows: tuple[int | None, ...] = (None,)
) -> Mapping[int | None, Reads]:
    return by_window(make_batch(rows, 16), 16, windows)


def by_window(
    batch: Batch,
    block_size: int,
    windows: tuple[int | None, ...],
    *,
    chunked: bool = False,
) -> Mapping[int | None, Reads]:
    """What layers of one block table read, by their windows."""
    kinds = [LayerKind(0, window, 0, chunked) for window in dict.fromkeys(windows)]
    planned = plan_reads(batch, block_size, kinds)
    return {kind.window: planned[kind] for kind in kinds}


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps(block_size: int, seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        (
            draw.choice([0, 0, draw.randrange(90)]),
            draw.choice([1, 1, 2, draw.randrange(1, 50)]),
        )
        for _ in range(draw.randrange(1, 8))
    ]
    play(rows, block_size, device=False, seed=seed)


@pytest.mark.parametrize("numbers", [1, 100_000])
@pytest.mark.parametrize("chunk", [3, 16, 33])
def test_attention_within_chunks_of_positions(
    chunk: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a window as long would not read are lost, too."""
    monkeypatch.setattr(attention_reads, "MAX_MASK_NUMBERS", numbers)
    draw = random.Random(chunk)
    edges = [chunk - 1, chunk, 2 * chunk - 1, 2 * chunk]
    rows = [(start, count) for start in edges for count in (1, 2, chunk, chunk + 1)]
    rows += [(draw.randrange(90), draw.randrange(1, 50)) for _ in range(8)]
    spec = with_attention(with_windows(SPEC, chunk, chunk), chunk=chunk)
    for block_size in (1, 4, 16):
        play(rows, block_size, device=True, spec=spec)


@pytest.mark.parametrize("numbers", [1, 40, 300])
@pytest.mark.parametrize("windows", [(None,), (5, None), (33,)])
def test_masks_are_made_a_piece_after_another(
    windows: tuple[int | None, ...], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_reads, "MAX_MASK_NUMBERS", numbers)
    spec = with_windows(SPEC, *windows)
    rows = [(0, 9), (40, 7), (3, 1), (17, 30), (5, 41)]
    planned = play(rows, 4, device=False, spec=spec)
    for read in planned.values():
        pieces = [piece for chunk in read.chunks for piece in chunk.pieces()]
        masks = [piece.mask for piece in pieces if piece.mask is not None]
        assert all(len(mask) == 1 or mask.numel() <= numbers for mask in masks)
        assert len(pieces) > len(read.chunks)


@pytest.mark.parametrize("numbers", [1, 300, 1 << 20])
def test_capped_scores_are_computed_a_few_queries_after_others(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "MAX_MASK_NUMBERS", numbers)
    spec = with_attention(with_windows(SPEC, None, 5), score_cap=0.5)
    play([(0, 9), (40, 7), (3, 1), (17, 30), (60, 1)], 4, device=False, spec=spec)


def test_masks_of_long_contexts_are_not_kept() -> None:
    tables = [[*range(700)], [*range(700, 1400)]]
    rows = [
        BatchRow([0] * 1024, 10_000, tables[0]),
        BatchRow([0] * 1024, 9_000, tables[1]),
    ]
    [read] = reads(rows).values()
    for chunk in read.chunks:
        assert isinstance(chunk.rule, MaskRule)
        pieces = [*chunk.pieces()]
        assert sum(len(range(1024)[piece.tokens]) for piece in pieces) == 1024
        for piece in pieces:
            assert piece.mask is not None
            assert piece.mask.numel() <= MAX_MASK_NUMBERS
    [read] = reads([BatchRow([0] * 64, 10_000, tables[0])]).values()
    assert isinstance(read.chunks[0].rule, Tensor)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (4, 4), (6, 3)])
def test_decode_with_any_grouping_of_heads(
    block_size: int, heads: tuple[int, int]
) -> None:
    spec = with_attention(SPEC, heads=heads[0], kv_heads=heads[1])
    play([(5, 1), (40, 1), (0, 1), (16, 1)], block_size, device=True, spec=spec)
    play([(5, 9), (40, 3), (0, 7)], block_size, device=False, spec=spec)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(
    "windows", [(1,), (5,), (16, 16), (33,), (None, 7), (7, None, 20), (20, 4)]
)
def test_windows(block_size: int, windows: tuple[int | None, ...]) -> None:
    spec = with_windows(SPEC, *windows)
    draw = random.Random(block_size)
    for seed in range(3):
        rows = [
            (
                draw.choice([0, draw.randrange(90)]),
                draw.choice([1, 2, draw.randrange(1, 50)]),
            )
            for _ in range(draw.randrange(1, 7))
        ]
        play(rows, block_size, device=False, spec=spec, seed=seed)
    play([(draw.randrange(90), 1) for _ in range(9)], block_size, device=True, spec=spec)
    play([(30, 1)], block_size, device=True, spec=spec)
    play([(60 + i, 1) for i in range(5)], block_size, device=True, spec=spec)


def test_a_scale_of_ones_own() -> None:
    play([(5, 9), (40, 1), (0, 7), (17, 3)], 16, device=False, scale=0.9)
    play([(5, 1), (40, 1)], 16, device=True, scale=0.2)


def test_a_window_is_read_and_no_more() -> None:
    windowed = with_windows(SPEC, 20)
    [group] = play([(100, 1)], 16, device=True, spec=windowed)[20].groups
    assert (group.skip, group.context, group.mask) == (1, 21, None)  # of blocks 5 and 6
    [chunk] = play([(100, 4)], 16, device=False, spec=windowed)[20].chunks
    assert (chunk.skip, chunk.context) == (1, 24)
    assert isinstance(chunk.rule, Tensor)
    assert chunk.rule.shape == (4, 23)


def test_a_window_that_reaches_everything_costs_nothing() -> None:
    rows = [BatchRow([1], 40, [4, 5, 6]), BatchRow([1] * 3, 0, [7])]
    planned = reads(rows, (41, None, 64))
    assert planned[41] is planned[None] is planned[64]
    [group] = reads(rows, (40, 64))[40].groups
    assert (group.skip, group.context) == (1, 41)


def test_many_rows_in_a_window_are_split_by_what_they_read() -> None:
    spec = with_windows(SPEC, 100)
    groups = play([(300 + 9 * i, 1) for i in range(50)], 16, device=True, spec=spec)[
        100
    ].groups
    sizes = [
        len(group.rows) * group.context for group in groups if group.rows is not None
    ]
    assert len(sizes) == 2
    assert max(sizes) <= MAX_GROUP_TOKENS


def test_one_row_needs_neither_mask_nor_padding() -> None:
    [group] = play([(37, 1)], 16, device=True)[None].groups
    assert (group.mask, group.context) == (None, 38)


def test_equal_rows_need_no_mask() -> None:
    [group] = play([(37, 1)] * 3, 16, device=True)[None].groups
    assert group.mask is None


def test_consecutive_blocks_are_read_in_place() -> None:
    [group] = reads([BatchRow([1], 40, [4, 5, 6, 9])])[None].groups
    assert group.blocks == slice(4, 7)
    [chunk] = reads([BatchRow([1, 1], 40, [4, 5, 6])])[None].chunks
    assert chunk.blocks == slice(4, 7)
    [group] = reads([BatchRow([1], 40, [4, 6, 5])])[None].groups
    assert isinstance(group.blocks, Tensor)
    assert group.blocks.tolist() == [4, 6, 5]


def test_a_first_chunk_reads_no_cache() -> None:
    [chunk] = reads([BatchRow([1, 1, 1], 0, [4])])[None].chunks
    assert (chunk.blocks, chunk.rule, chunk.context) == (None, None, 3)


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    batch = play([(20, 1)] * 10 + [(3000, 1)] + [(25, 1)] * 10, 16, device=True)
    assert [group.context for group in batch[None].groups] == [3001, 26]
    assert [
        len(group.rows) for group in batch[None].groups if group.rows is not None
    ] == [
        1,
        20,
    ]


def test_many_rows_are_gathered_a_few_megabytes_at_a_time() -> None:
    batch = play([(200 + i, 1) for i in range(48)], 16, device=True)
    sizes = [
        len(group.rows) * group.context
        for group in batch[None].groups
        if group.rows is not None
    ]
    assert len(sizes) == 3
    assert max(sizes) <= MAX_GROUP_TOKENS
    rows = torch.cat(
        [group.rows for group in batch[None].groups if group.rows is not None]
    )
    assert sorted(rows.tolist()) == list(range(48))


def test_sampled_tokens_follow_the_order_of_rows() -> None:
    rows = [
        BatchRow([1, 2, 3], 0, [0]),
        BatchRow([4], 7, [1]),
        BatchRow([5, 6], 0, [2], 0),
        BatchRow([7], 9, [3]),
        BatchRow([8, 9], 3, [4], 2),
    ]
    batch = make_batch(rows, 16)
    assert len(batch.rows) == 2
    assert batch.sample is not None
    assert batch.tokens[batch.sample].tolist() == [3, 4, 7, 8, 9]
    assert batch.slots[0].tolist() == [23, 57, 0, 1, 2, 32, 33, 67, 68]


def test_rows_may_be_arrays() -> None:
    row = BatchRow(np.array([1, 2]), 15, np.array([3, 8], np.int32), 1)
    assert make_batch([row], 16).slots[0].tolist() == [63, 128]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (BatchRow([], 0, [0]), "needs tokens"),
        (BatchRow([1], -1, [0]), "start -1"),
        (BatchRow([1], 0, [0], 2), "sample 2"),
        (BatchRow([1, 2], 15, [0]), "too short"),
    ],
)
def test_malformed_rows_raise(row: BatchRow, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_batch([row], 16)


def test_an_empty_batch_raises() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        make_batch([], 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_complex_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 8).to(dtype)
    cos, sin = rope_table(Rope(), 8, 5).unbind(1)
    turned = torch.complex(x[..., :4].float(), x[..., 4:].float())
    angles = torch.arange(5)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    turned = turned * torch.polar(torch.ones(5, 4), angles)[:, None]
    want = torch.cat((turned.real, turned.imag), -1)
    rotate(x, cos, sin)
    torch.testing.assert_close(
        x.float(),
        want,
        rtol=1e-2 if dtype is torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype is torch.bfloat16 else 1e-5,
    )
