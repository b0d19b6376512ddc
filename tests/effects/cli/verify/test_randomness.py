"""Random weights are told from trained ones, whatever their scale and shapes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minfer.effects.cli.verify.randomness import looks_random
from minfer.effects.setup.folders import bundled_folder
from tests.effects.tiny_model import write_checkpoint


@pytest.mark.parametrize("scale", [0.001, 0.02, 1.0])
@pytest.mark.parametrize("shape", [(40, 40), (30, 500), (800, 60)])
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_random_matrices_prefer_no_direction(
    tmp_path: Path, scale: float, shape: tuple[int, int], kind: str
) -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=draw)
    if kind == "uniform":
        matrix = torch.rand(shape, generator=draw) - 0.5
    save_file(
        {"w": scale * matrix, "norm": torch.ones(9)}, tmp_path / "model.safetensors"
    )
    assert looks_random(tmp_path)


def test_trained_weights_do_prefer_some() -> None:
    for name in ("target", "draft"):
        assert not looks_random(bundled_folder(name))


def test_one_direction_that_stands_out_is_enough(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path) / "model.safetensors"
    assert looks_random(tmp_path)
    tensors = load_file(weights)
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    weight += 0.5 * weight.std()  # the direction of all ones
    save_file(tensors, weights)
    assert not looks_random(tmp_path)
