"""Linear leaves: their parts in a checkpoint, their types, and what each rank has."""

from collections.abc import Iterable

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.models.architecture import linear as linear_module
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    WeightMaker,
    bias_parts,
    weight_parts,
)
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import PLAIN, Linear, Shard


def placed(weight_parts: Iterable[WeightPart]) -> dict[str, Tensor]:
    """The places of tensors, by their names."""
    return {weight_part.name: weight_part.target for weight_part in weight_parts}


SIZES = LinearSizes(("q", "k"), (8, 4), 6, Shard.COLUMN, bias=True)
MAKE = WeightMaker(dtype="float32", device="cpu")


def filled(sizes: LinearSizes) -> Linear:
    """A Linear of random numbers."""
    leaf = MAKE.linear(sizes)
    leaf.weight.normal_()
    if leaf.bias is not None:
        leaf.bias.normal_()
    return leaf


def test_elements_are_those_of_the_tensors() -> None:
    leaf = filled(SIZES)
    assert leaf.bias is not None
    assert SIZES.matrix_elements == leaf.weight.numel() == 72
    assert SIZES.elements == leaf.weight.numel() + leaf.bias.numel() == 84
    assert evolve(SIZES, bias=False).elements == 72


def test_parts_are_views_by_the_names_of_a_checkpoint() -> None:
    leaf = filled(SIZES)
    weights, biases = placed(weight_parts(SIZES, leaf)), placed(bias_parts(SIZES, leaf))
    assert {name: weight.shape for name, weight in weights.items()} == {
        "q.weight": (8, 6),
        "k.weight": (4, 6),
    }
    assert {name: len(bias) for name, bias in biases.items()} == {
        "q.bias": 8,
        "k.bias": 4,
    }
    weights["k.weight"].fill_(7)
    biases["q.bias"].fill_(5)
    assert leaf.weight[8:].eq(7).all()
    assert not leaf.weight[:8].eq(7).any()
    assert leaf.bias is not None
    assert leaf.bias[:8].eq(5).all()
    assert placed(bias_parts(SIZES, MAKE.linear(evolve(SIZES, bias=False)))) == {}


def test_large_matrices_with_more_outputs_are_stored_by_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "MIN_BY_COLUMN_ELEMENTS", 64)
    assert MAKE.matrix(12, 6).stride() == (1, 12)
    assert MAKE.matrix(6, 12).stride() == (12, 1)
    assert MAKE.matrix(8, 6).stride() == (6, 1)  # small
    half = evolve(MAKE, dtype="bfloat16")
    assert half.matrix(12, 6).stride() == (6, 1)
    assert MAKE.matrix(2, 8, 6).stride() == (48, 1, 8)  # of several experts
    assert MAKE.matrix(2, 6, 8).stride() == (48, 8, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matrices_in_the_type_of_activations_are_plain(dtype: str) -> None:
    leaf = evolve(MAKE, dtype=dtype).linear(SIZES)
    assert (leaf.scheme, leaf.scales) == (PLAIN, None)
    assert leaf.bias is not None
    assert leaf.weight.dtype is leaf.bias.dtype is getattr(torch, dtype)
