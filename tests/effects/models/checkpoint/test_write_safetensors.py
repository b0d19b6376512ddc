"""Files that are written a tensor after another, as safetensors reads them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from minfer.effects.models.checkpoint.write_safetensors import size_of, write_file


def write(
    path: Path, planned: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> int:
    """Write `tensors` where `planned` was expected; returns the bytes that are told."""
    written: list[int] = []
    sizes = [size_of(*named) for named in planned.items()]
    write_file(path, sizes, iter(tensors.items()), written.append)
    return sum(written)


def test_tensors_of_all_sizes_are_read_back(tmp_path: Path) -> None:
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "turned": torch.randn(5, 3).T,
        "narrow": torch.randn(1, 1, 3).bfloat16(),
        "single": torch.tensor(7),
        "none": torch.empty(0, 4),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path / "a.safetensors"
    total = write(path, tensors, dict(reversed(tensors.items())))
    assert total == sum(tensor.nbytes for tensor in tensors.values())
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].float().equal(tensor.float())
    content = path.read_bytes()
    base = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:base])
    for name, tensor in tensors.items():  # readers may map them as they are
        start, end = header[name]["data_offsets"]
        assert (base + start) % tensor.element_size() == 0
        assert end - start == tensor.nbytes


@pytest.mark.parametrize(
    ("tensors", "named"),
    [({"a": torch.zeros(3)}, "tensor a is "), ({}, "tensors a are missing")],
)
def test_other_tensors_than_planned(
    tmp_path: Path, tensors: dict[str, Tensor], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        write(tmp_path / "a.safetensors", {"a": torch.zeros(2)}, tensors)
