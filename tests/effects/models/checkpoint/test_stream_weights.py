"""Tensors from files straight to a GPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minfer.effects.models.checkpoint import stream_weights as sw
from minfer.effects.models.layout.rank_parts import Cut, RankPart
from minfer.effects.models.parts import WeightPart

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
@pytest.mark.parametrize("buffer", [1 << 10, 4096, 16 << 20])
def test_every_byte_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    monkeypatch.setattr(sw, "BUFFER_BYTES", buffer)
    torch.manual_seed(0)
    kinds = [torch.bfloat16, torch.float32, torch.float16]
    tensors = {f"t{i}": torch.randn(17 + i, 31).to(kinds[i % 3]) for i in range(20)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for i, path in enumerate(paths):
        save_file({k: v for k, v in tensors.items() if int(k[1:]) % 2 == i}, path)
    # A view is a target too.
    fused = torch.zeros(40, 31, dtype=torch.bfloat16, device="cuda")
    targets = {
        k: torch.zeros(v.shape, dtype=torch.bfloat16, device="cuda")
        for k, v in tensors.items()
    }
    targets["t0"] = fused[5:22]
    sw.stream_weights(
        [
            sw.TensorJob(
                paths[int(name[1:]) % 2], name, RankPart(WeightPart(name, target))
            )
            for name, target in targets.items()
        ]
    )
    for name, target in targets.items():
        assert torch.equal(target.cpu(), tensors[name].bfloat16()), name
    assert not fused[:5].any()
    assert not fused[22:].any()


@on_gpu
def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(1000, 100)}, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4000)
    job = sw.TensorJob(
        path, "a", RankPart(WeightPart("a", torch.zeros(1000, 100, device="cuda")))
    )
    with pytest.raises(EOFError, match="ends early"):
        sw.stream_weights([job])


@pytest.mark.parametrize("buffer", [64, 1 << 20])
def test_parts_of_a_tensor_are_read_run_by_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    monkeypatch.setattr(sw, "BUFFER_BYTES", buffer)
    stored, path = torch.randn(6, 10, 8), tmp_path / "some"
    path.write_bytes(b"before" + stored.numpy().tobytes())
    cuts = (
        Cut(0, (range(2, 4),)),
        Cut(1, (range(5, 10),)),
        Cut(2, (range(4, 8),)),
        Cut(1, (range(3, 5), range(8, 10))),
        Cut(1, (range(3), range(4, 5), range(6, 10))),
    )
    for cut in (None, *cuts):
        expected = stored if cut is None else cut.apply(stored)
        read = torch.empty(expected.shape)
        ranges = sw.byte_ranges(len("before"), stored.shape, cut, torch.float32)
        sw.read_ranges(path, ranges, read, torch.empty(buffer, dtype=torch.uint8), Bar())
        assert read.equal(expected)


class Bar:
    """A progress bar that nobody sees."""

    def update(self, count: int) -> None:
        pass
