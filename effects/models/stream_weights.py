"""Streams tensors from safetensors files to a GPU, at the speed of the disk or of PCIe.

Threads read ranges of files into pinned buffers, one each: while some are filled, others
are copied to the GPU. No file is mapped into memory, and only the buffers take memory.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.models.parts import Part
from minfer.effects.models.progress import weights_bar

THREADS: Final = 8
BUFFER: Final = 16 << 20  # bytes
_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@frozen(eq=False)
class TensorJob:
    """A tensor to read."""

    path: Path
    name: str  # in the file
    part: Part


@frozen
class SafetensorsHeader:
    """A file's header."""

    tensors: Mapping[str, Any]  # by name: dtype, data_offsets
    base: int  # where their bytes begin


def stream_weights(jobs: Sequence[TensorJob]) -> None:
    """Fill tensors on a GPU, arranging and casting those that differ from their sources.

    The files' headers must have been checked. Raises OSError, EOFError for a file that
    ends early.
    """
    headers = {path: _header(path) for path in dict.fromkeys(job.path for job in jobs)}
    total = sum(_bytes_of(headers[job.path], job.name) for job in jobs)
    with weights_bar(total) as bar, ThreadPoolExecutor(THREADS) as pool:
        # The largest first, so that no thread is left with one at the end.
        order = sorted(jobs, key=lambda job: job.part.place.numel(), reverse=True)
        parts = [order[i::THREADS] for i in range(THREADS)]
        for done in [pool.submit(_fill, part, headers, bar) for part in parts]:
            done.result()  # raises the thread's exception


def _header(path: Path) -> SafetensorsHeader:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return SafetensorsHeader(json.loads(file.read(size)), 8 + size)


def _bytes_of(header: SafetensorsHeader, name: str) -> int:
    start, end = header.tensors[name]["data_offsets"]
    return int(end - start)


def _fill(
    jobs: Sequence[TensorJob], headers: Mapping[Path, SafetensorsHeader], bar: Any
) -> None:
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    make: Any = torch.cuda.Stream  # untyped
    stream = make()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for job in jobs:
            header = headers[job.path]
            about = header.tensors[job.name]
            kind, part = _TYPES[about["dtype"]], job.part
            whole = target = part.place
            direct = part.is_copy and target.is_contiguous()
            if kind is not target.dtype or not direct:
                whole = torch.empty(part.shape, dtype=kind, device=target.device)
            _read(job.path, header.base + about["data_offsets"][0], whole, buffer, bar)
            if whole is target:
                part.check()
            else:
                part.fill(whole)
    # Not the whole device: another engine may be capturing a graph.
    stream.synchronize()


def _read(path: Path, start: int, target: Tensor, buffer: Tensor, bar: Any) -> None:
    """Fill `target` with a file's bytes from `start` on, a buffer at a time."""
    raw: Any = buffer.numpy()  # its type does not declare the buffer interface
    with path.open("rb") as file:
        file.seek(start)
        for part in torch.split(target.view(-1).view(torch.uint8), BUFFER):
            if file.readinto(raw[: len(part)]) < len(part):
                raise EOFError("the file ends early")
            part.copy_(buffer[: len(part)])  # waits, so that the buffer is free again
            bar.update(len(part))
