"""Matrices that a checkpoint stores as one (Phi-3): cut for ranks matrix by matrix, in
every format.
"""

from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.dense import DenseWeights
from minfer.effects.models.architecture.gqa_weights import GQAWeights
from minfer.effects.models.architecture.quantization import LEVELS, requested
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.ranks import WHOLE_MODEL, Parallel, RankInfo
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize
from tests.circles import long
from tests.effects.checkpoints.formats_made import FORMATS, quantized
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec

# Of ranks, too, blocks of 128 divide these.
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
}
EACH = ["awq", *long(name for name in FORMATS if name != "awq")]


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves as they are loaded, not in the layout of a library."""
    monkeypatch.setattr(layers, "in_kernel_layout", lambda leaf: leaf)


def saved(folder: Path, key_heads: int = 4) -> Path:
    sizes = SIZES | {"num_key_value_heads": key_heads}
    save(str(folder), "Phi3", VARIANTS["Phi3", "fused"] | sizes)
    return folder


def fused(
    folder: Path, spec: ModelSpec, rank_info: RankInfo = WHOLE_MODEL
) -> list[list[Tensor]]:
    """The numbers of queries, keys and values, and of gate and up, of the first layer."""
    weights = load_weights(folder, spec, "float32", rank_info=rank_info)
    attention, feed_forward = weights.layers[0].attention, weights.layers[0].feed_forward
    assert isinstance(attention, GQAWeights)
    assert isinstance(feed_forward, DenseWeights)
    leaves = (attention.qkv, feed_forward.gate_up)
    return [[numbers(piece) for piece in leaf.pieces()] for leaf in leaves]


def numbers(leaf: Linear) -> Tensor:
    return leaf.weight if leaf.scheme.is_plain else dequantize(leaf)


def check_ranks(folder: Path, spec: ModelSpec, ranks: int, key_heads: int = 4) -> None:
    """Each rank has successive parts of each matrix, and key heads that others have too
    where there are fewer than ranks.
    """
    of_all = fused(folder, spec)
    for rank in range(ranks):
        of_rank = fused(folder, spec, RankInfo(rank, Parallel(tensor=ranks)))
        for matrices, parts in zip(of_all, of_rank, strict=True):
            for index, (matrix, part) in enumerate(zip(matrices, parts, strict=True)):
                of_keys = len(matrices) == 3 and index > 0
                slices = min(ranks, key_heads) if of_keys else ranks
                assert part.equal(matrix.chunk(slices)[rank * slices // ranks])


@pytest.mark.parametrize("name", EACH)
def test_quantized_ones_are_cut_for_ranks(name: str, tmp_path: Path) -> None:
    folder, copy = quantized(saved(tmp_path / "model"), tmp_path, name)
    spec = as_stored(read_spec(folder), folder)
    for matrices, expected in zip(
        fused(folder, spec), fused(copy, read_spec(copy)), strict=True
    ):
        torch.testing.assert_close(matrices, expected)
    check_ranks(folder, spec, ranks=2)


@pytest.mark.parametrize("level", long(LEVELS))
def test_those_quantized_as_they_are_read_are_cut_too(level: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    spec = evolve(read_spec(folder), quantization=requested(level, None))
    check_ranks(folder, spec, ranks=2)


@pytest.mark.parametrize("key_heads", [1, 2, 8])
def test_ranks_share_key_heads(key_heads: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, key_heads)
    check_ranks(folder, read_spec(folder), ranks=4, key_heads=key_heads)
