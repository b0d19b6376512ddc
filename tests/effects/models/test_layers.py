"""Layers as values: their groups, what they say of memory, and layers shared by ranks."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.models.batch import BatchRow, make_batch
from minfer.effects.models.checkpoint import load_weights
from minfer.effects.models.dense import Dense, DenseWeights
from minfer.effects.models.gqa import GQAWeights
from minfer.effects.models.layers import LayerGroup, LayerWeights, layer_parts
from minfer.effects.models.linear import sharded
from minfer.effects.models.model import forward
from minfer.effects.models.products import Ranks
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.spec_reader import parse_spec
from minfer.effects.models.weights import Weights, empty_weights
from minfer.kernels.leaves import Linear, Shard
from tests.effects.tiny_families import VARIANTS, save, written
from tests.effects.tiny_model import (
    CONFIG,
    read_spec,
    with_attention,
    with_windows,
)

SPEC = parse_spec(CONFIG)
BLOCK = 4


def test_groups_are_layers_of_one_attention() -> None:
    spec = with_windows(SPEC, None, 7, None, 7, 3)
    full, seven, three = (spec.layers[i].attention for i in (0, 1, 4))
    assert spec.groups == (
        LayerGroup(full, (0, 2)),
        LayerGroup(seven, (1, 3)),
        LayerGroup(three, (4,)),
    )
    assert [group.attention.window for group in spec.groups] == [None, 7, 3]
    assert [one.token_bytes for one in spec.kv_formats] == [256, 256, 128]
    assert full.kv_shape == (2, 2, 8)


def test_sizes_are_those_of_the_weights() -> None:
    options = [key for key in VARIANTS if not key[1].startswith("rope ")]
    for family, name in options:
        spec = parse_spec(written(family, VARIANTS[family, name]))
        weights = empty_weights(spec, "float32", "meta")
        for layer, its in zip(spec.layers, weights.layers, strict=True):
            parts = {part.name: part.place for part in layer_parts(layer, its)}
            assert layer.parameters == sum(part.numel() for part in parts.values())
            if isinstance(layer.feed_forward, Dense):
                matrices = [part for part in parts.values() if part.dim() == 2]
                elements = sum(sizes.matrix_elements for sizes in layer.matrices)
                assert elements == sum(part.numel() for part in matrices)


def test_axes_alternate_so_that_a_sublayer_needs_one_sum() -> None:
    for layer in empty_weights(SPEC, "float32", "meta").layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(attention, GQAWeights)
        assert isinstance(feed_forward, DenseWeights)
        assert (attention.qkv.shard, attention.out.shard) == (Shard.COLUMN, Shard.ROW)
        assert feed_forward.gate_up.shard is Shard.COLUMN
        assert feed_forward.down.shard is Shard.ROW


# --- two ranks --------------------------------------------------------------------------


def shared(weights: Weights, rank: int, ranks: int) -> Weights:
    """A rank's weights."""

    def part(linear: Linear) -> Linear:
        return sharded(linear, rank, ranks)

    def of_layer(layer: LayerWeights) -> LayerWeights:
        attention, feed = layer.attention, layer.feed_forward
        assert isinstance(attention, GQAWeights)
        assert isinstance(feed, DenseWeights)
        attention = evolve(attention, qkv=part(attention.qkv), out=part(attention.out))
        feed = evolve(feed, gate_up=part(feed.gate_up), down=part(feed.down))
        return LayerWeights(attention, feed)

    return evolve(weights, layers=tuple(map(of_layer, weights.layers)))


class Sums:
    """Sums over ranks that are threads: each brings its part, and gets the total."""

    def __init__(self, count: int) -> None:
        self.parts: list[Tensor | None] = [None] * count
        self.barrier = Barrier(count, timeout=60)
        self.calls = 0

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def total(part: Tensor) -> Tensor:
            self.parts[rank] = part
            self.barrier.wait()
            found = sum(one for one in self.parts if one is not None)
            self.calls += rank == 0
            self.barrier.wait()
            assert isinstance(found, Tensor)
            return found

        return total


def run(spec: ModelSpec, weights: Weights, ranks: Ranks) -> Tensor:
    """A prompt in two chunks, then a decode step; all logits."""
    ids, table = random.Random(1).choices(range(160), k=31), list(range(8))
    cache = make_cache(spec, 8, BLOCK, "float32")
    cuts = ((0, 19), (19, 30), (30, 31))
    rows = (BatchRow(ids[a:b], a, table, b - a) for a, b in cuts)
    return torch.cat(
        [forward(spec, weights, make_batch([row], BLOCK), cache, ranks) for row in rows]
    )


@pytest.mark.parametrize(
    "key",
    [("Qwen3", "biases, windows"), ("Llama", "biases, tied"), ("Qwen2", "plain")],
    ids=" ".join,
)
def test_two_ranks_say_what_one_says(key: tuple[str, str], tmp_path: Path) -> None:
    save(str(tmp_path), key[0], VARIANTS[key])
    spec = read_spec(tmp_path)
    weights = load_weights(tmp_path, spec, "float32")
    half = with_attention(spec, heads=2, kv_heads=1)
    sums = Sums(2)

    def on_rank(rank: int) -> Tensor:
        ranks = Ranks(count=2, sum=sums.of(rank))
        return run(half, shared(weights, rank, 2), ranks)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(on_rank, range(2)))
    assert found[0].equal(found[1])
    torch.testing.assert_close(
        found[0], run(spec, weights, Ranks()), rtol=1e-4, atol=2e-4
    )
    assert sums.calls == 3 * 2 * len(spec.layers)  # steps, sublayers
