"""Layers as values: their groups, what they say of memory, and layers shared by ranks."""

from minfer.effects.models.architecture.dense import Dense, DenseWeights
from minfer.effects.models.architecture.gqa_weights import GQAWeights
from minfer.effects.models.architecture.layers import LayerGroup, layer_parts
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import empty_weights
from minfer.kernels.leaves import Shard
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import (
    CONFIG,
    with_windows,
)

SPEC = parse_spec(CONFIG)
BLOCK = 4


def test_groups_are_layers_of_one_attention() -> None:
    spec = with_windows(SPEC, None, 7, None, 7, 3)
    full, seven, three = (spec.attentions[i] for i in (0, 1, 4))
    assert spec.groups == (
        LayerGroup(full, (0, 2)),
        LayerGroup(seven, (1, 3)),
        LayerGroup(three, (4,)),
    )
    assert [group.attention.window for group in spec.groups] == [None, 7, 3]
    assert [kv_format.token_bytes for kv_format in spec.kv_formats] == [256, 256, 128]
    assert full.kv_shape == (2, 2, 8)


def test_sizes_are_those_of_the_weights() -> None:
    options = [key for key in VARIANTS if not key[1].startswith("rope ")]
    for family, name in options:
        spec = parse_spec(written(family, VARIANTS[family, name]))
        weights = empty_weights(spec, "float32", "meta")
        for layer, layer_weights in zip(spec.layers, weights.layers, strict=True):
            targets = {
                weight_part.name: weight_part.target
                for weight_part in layer_parts(layer, layer_weights)
            }
            assert layer.parameters == sum(tensor.numel() for tensor in targets.values())
            if isinstance(layer.feed_forward, Dense):
                matrices = [
                    tensor
                    for name, tensor in targets.items()
                    if tensor.dim() == 2
                    and "norm" not in name
                    and not name.endswith(("conv1d.weight", "conv.conv.weight", "A_log"))
                ]
                elements = sum(sizes.matrix_elements for sizes in layer.matrices)
                assert elements == sum(matrix.numel() for matrix in matrices)


def test_axes_alternate_so_that_a_sublayer_needs_one_sum() -> None:
    for layer in empty_weights(SPEC, "float32", "meta").layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(attention, GQAWeights)
        assert isinstance(feed_forward, DenseWeights)
        assert (attention.qkv.shard, attention.out.shard) == (Shard.COLUMN, Shard.ROW)
        assert feed_forward.gate_up.shard is Shard.COLUMN
        assert feed_forward.down.shard is Shard.ROW
