"""Linear leaves: their parts in a checkpoint, their types, and what each rank has."""

from collections.abc import Iterable

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.models.architecture import linear as linear_module
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    Maker,
    bias_parts,
    weight_parts,
)
from minfer.effects.models.parts import Part
from minfer.kernels.leaves import PLAIN, Linear, Shard


def placed(parts: Iterable[Part]) -> dict[str, Tensor]:
    """The places of tensors, by their names."""
    return {part.name: part.place for part in parts}


SIZES = LinearSizes(("q", "k"), (8, 4), 6, Shard.COLUMN, bias=True)
MAKE = Maker(dtype="float32", device="cpu")


def filled(sizes: LinearSizes) -> Linear:
    """A Linear of random numbers."""
    made = MAKE.linear(sizes)
    made.weight.normal_()
    if made.bias is not None:
        made.bias.normal_()
    return made


def test_elements_are_those_of_the_tensors() -> None:
    made = filled(SIZES)
    assert made.bias is not None
    assert SIZES.matrix_elements == made.weight.numel() == 72
    assert SIZES.elements == made.weight.numel() + made.bias.numel() == 84
    assert evolve(SIZES, bias=False).elements == 72


def test_parts_are_views_by_the_names_of_a_checkpoint() -> None:
    made = filled(SIZES)
    weights, biases = placed(weight_parts(SIZES, made)), placed(bias_parts(SIZES, made))
    assert {name: part.shape for name, part in weights.items()} == {
        "q.weight": (8, 6),
        "k.weight": (4, 6),
    }
    assert {name: len(part) for name, part in biases.items()} == {
        "q.bias": 8,
        "k.bias": 4,
    }
    weights["k.weight"].fill_(7)
    biases["q.bias"].fill_(5)
    assert made.weight[8:].eq(7).all()
    assert not made.weight[:8].eq(7).any()
    assert made.bias is not None
    assert made.bias[:8].eq(5).all()
    assert placed(bias_parts(SIZES, MAKE.linear(evolve(SIZES, bias=False)))) == {}


def test_large_matrices_with_more_outputs_are_stored_by_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "BY_COLUMN", 64)
    assert MAKE.matrix(12, 6).stride() == (1, 12)
    assert MAKE.matrix(6, 12).stride() == (12, 1)
    assert MAKE.matrix(8, 6).stride() == (6, 1)  # small
    half = evolve(MAKE, dtype="bfloat16")
    assert half.matrix(12, 6).stride() == (6, 1)
    assert MAKE.matrix(2, 8, 6).stride() == (48, 1, 8)  # of several experts
    assert MAKE.matrix(2, 6, 8).stride() == (48, 8, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matrices_in_the_type_of_activations_are_plain(dtype: str) -> None:
    made = evolve(MAKE, dtype=dtype).linear(SIZES)
    assert (made.scheme, made.scales) == (PLAIN, None)
    assert made.bias is not None
    assert made.weight.dtype is made.bias.dtype is getattr(torch, dtype)
