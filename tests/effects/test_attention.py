"""Paged attention and its plan, against attention written out in full."""

import random

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.attention import attend, make_cache, rope_table
from minfer.effects.batch import GROUP_TOKENS, Batch, DecodeRows, Row, make_batch
from minfer.effects.model import rotate
from minfer.effects.spec import ModelSpec, parse_spec

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


def written_out(spec: ModelSpec, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [heads, head_dim] over keys and values [context, kv_heads, head_dim]."""
    shared = spec.heads // spec.kv_heads
    out = []
    for head in range(spec.heads):
        scores = keys[:, head // shared] @ query[head] / spec.head_dim**0.5
        out.append(scores.softmax(0) @ values[:, head // shared])
    return torch.cat(out)


def play(
    rows: list[tuple[int, int]],
    block_size: int,
    *,
    device: bool,
    spec: ModelSpec = SPEC,
    seed: int = 0,
) -> Batch:
    """Attend for rows of (start, inputs) with random contents; check every token's output."""
    torch.manual_seed(seed)
    needs = [-(-(start + count) // block_size) for start, count in rows]
    ids = random.Random(seed).sample(range(sum(needs) + 3), sum(needs))
    tables = [[ids.pop() for _ in range(need)] for need in needs]
    cache = make_cache(spec, sum(needs) + 3, block_size, "float32")
    cache.data.normal_()
    if device:
        wide = torch.full((len(rows), max(needs) + 2), -7)
        for i, table in enumerate(tables):
            wide[i, : len(table)] = torch.tensor(table)
        starts = torch.tensor([start for start, _ in rows])
        batch = make_batch([], block_size, DecodeRows(torch.zeros_like(starts), starts, wide))
        owners = [(i, start) for i, (start, _) in enumerate(rows)]
    else:
        batch = make_batch(
            [
                Row([0] * count, start, table)
                for (start, count), table in zip(rows, tables, strict=True)
            ],
            block_size,
        )
        singles = [i for i, (_, count) in enumerate(rows) if count == 1]
        chunks = [i for i, (_, count) in enumerate(rows) if count > 1]
        owners = [(i, at) for i in singles + chunks for at in range(rows[i][0], sum(rows[i]))]
    assert batch.positions.tolist() == [at for _, at in owners]
    qkv = torch.randn(len(owners), spec.heads + 2 * spec.kv_heads, spec.head_dim)
    cache.slots[0].index_copy_(0, batch.slots, qkv[:, spec.heads :])
    got = attend(spec, qkv, 0, cache, batch)
    for token, (i, at) in enumerate(owners):
        kv = torch.cat([cache.data[0, block] for block in tables[i]])[: at + 1]
        want = written_out(spec, qkv[token, : spec.heads], kv[:, 0], kv[:, 1])
        torch.testing.assert_close(got[token], want, rtol=1e-4, atol=1e-5)
    return batch


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps(block_size: int, seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        (draw.choice([0, 0, draw.randrange(90)]), draw.choice([1, 1, 2, draw.randrange(1, 50)]))
        for _ in range(draw.randrange(1, 8))
    ]
    play(rows, block_size, device=False, seed=seed)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (4, 4), (6, 3)])
def test_decode_with_any_grouping_of_heads(block_size: int, heads: tuple[int, int]) -> None:
    spec = evolve(SPEC, heads=heads[0], kv_heads=heads[1])
    play([(5, 1), (40, 1), (0, 1), (16, 1)], block_size, device=True, spec=spec)
    play([(5, 9), (40, 3), (0, 7)], block_size, device=False, spec=spec)


def test_one_row_needs_neither_mask_nor_padding() -> None:
    [group] = play([(37, 1)], 16, device=True).groups
    assert (group.mask, group.context) == (None, 38)


def test_equal_rows_need_no_mask() -> None:
    [group] = play([(37, 1)] * 3, 16, device=True).groups
    assert group.mask is None


def test_consecutive_blocks_are_read_in_place() -> None:
    [group] = make_batch([Row([1], 40, [4, 5, 6, 9])], 16).groups
    assert group.blocks == slice(4, 7)
    [chunk] = make_batch([Row([1, 1], 40, [4, 5, 6])], 16).chunks
    assert chunk.blocks == slice(4, 7)
    [group] = make_batch([Row([1], 40, [4, 6, 5])], 16).groups
    assert isinstance(group.blocks, Tensor)
    assert group.blocks.tolist() == [4, 6, 5]


def test_a_first_chunk_reads_no_cache() -> None:
    [chunk] = make_batch([Row([1, 1, 1], 0, [4])], 16).chunks
    assert (chunk.blocks, chunk.mask, chunk.context) == (None, None, 3)


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    batch = play([(20, 1)] * 10 + [(3000, 1)] + [(25, 1)] * 10, 16, device=True)
    assert [group.context for group in batch.groups] == [3001, 26]
    assert [len(group.rows) for group in batch.groups if group.rows is not None] == [1, 20]


def test_many_rows_are_gathered_a_few_megabytes_at_a_time() -> None:
    batch = play([(200 + i, 1) for i in range(48)], 16, device=True)
    sizes = [len(group.rows) * group.context for group in batch.groups if group.rows is not None]
    assert len(sizes) == 3
    assert max(sizes) <= GROUP_TOKENS
    rows = torch.cat([group.rows for group in batch.groups if group.rows is not None])
    assert sorted(rows.tolist()) == list(range(48))


def test_sampled_tokens_follow_the_order_of_rows() -> None:
    rows = [
        Row([1, 2, 3], 0, [0]),
        Row([4], 7, [1]),
        Row([5, 6], 0, [2], 0),
        Row([7], 9, [3]),
        Row([8, 9], 3, [4], 2),
    ]
    batch = make_batch(rows, 16)
    assert batch.decode == 2
    assert batch.sample is not None
    assert batch.tokens[batch.sample].tolist() == [3, 4, 7, 8, 9]
    assert batch.slots.tolist() == [23, 57, 0, 1, 2, 32, 33, 67, 68]
    assert make_batch([Row([4], 7, [1]), Row([7], 9, [3])], 16).sample is None


def test_rows_may_be_arrays() -> None:
    row = Row(np.array([1, 2]), 15, np.array([3, 8], np.int32), 1)
    assert make_batch([row], 16).slots.tolist() == [63, 128]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row([], 0, [0]), "needs tokens"),
        (Row([1], -1, [0]), "start -1"),
        (Row([1], 0, [0], 2), "sample 2"),
        (Row([1, 2], 15, [0]), "too short"),
    ],
)
def test_malformed_rows_raise(row: Row, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_batch([row], 16)


def test_an_empty_batch_raises() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        make_batch([], 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_complex_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 8).to(dtype)
    cos, sin = rope_table(SPEC, 5).unbind(1)
    turned = torch.complex(x[..., :4].float(), x[..., 4:].float())
    angles = torch.arange(5)[:, None] / SPEC.rope_theta ** (torch.arange(0, 8, 2) / 8)
    turned = turned * torch.polar(torch.ones(5, 4), angles)[:, None]
    want = torch.cat((turned.real, turned.imag), -1)
    rotate(x, cos, sin)
    torch.testing.assert_close(
        x.float(),
        want,
        rtol=1e-2 if dtype is torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype is torch.bfloat16 else 1e-5,
    )
