"""Streams tensors from safetensors files to a GPU, at the speed of the disk or of PCIe.

Threads read ranges of files into pinned buffers, one each: while some are filled, others
are copied to the GPU. No file is mapped into memory, and only the buffers take memory.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.models.layout.rank_parts import Cut, RankPart
from minfer.effects.models.progress import weights_bar

THREADS: Final = 8
BUFFER_BYTES: Final = 16 << 20  # bytes
_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@frozen(eq=False)
class TensorJob:
    """A tensor to read."""

    path: Path
    name: str  # in the file
    rank_part: RankPart


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
    total = sum(_bytes_of(headers[job.path], job) for job in jobs)
    with weights_bar(total) as bar, ThreadPoolExecutor(THREADS) as pool:
        # The largest first, so that no thread is left with one at the end.
        order = sorted(jobs, key=lambda job: -job.rank_part.part.target.numel())
        shares = [order[i::THREADS] for i in range(THREADS)]
        for future in [pool.submit(_fill, share, headers, bar) for share in shares]:
            future.result()  # raises the thread's exception


def _header(path: Path) -> SafetensorsHeader:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return SafetensorsHeader(json.loads(file.read(size)), 8 + size)


def _bytes_of(header: SafetensorsHeader, job: TensorJob) -> int:
    """Returns the bytes to read."""
    entry = header.tensors[job.name]
    start, end = entry["data_offsets"]
    cut, size = job.rank_part.cut, int(end - start)
    return size if cut is None else size * cut.size // entry["shape"][cut.dim]


def _fill(
    jobs: Sequence[TensorJob], headers: Mapping[Path, SafetensorsHeader], bar: Any
) -> None:
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    make: Any = torch.cuda.Stream  # untyped
    stream = make()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for job in jobs:
            header = headers[job.path]
            entry = header.tensors[job.name]
            kind, cut = _TYPES[entry["dtype"]], job.rank_part.cut
            weight_part = job.rank_part.part
            shape = weight_part.shape if cut is None else cut.shape(tuple(entry["shape"]))
            read = target = weight_part.target
            direct = weight_part.is_copy and not job.rank_part.is_zero
            direct = direct and target.is_contiguous()
            direct = direct and (cut is None or shape == target.shape)
            if kind is not target.dtype or not direct:
                read = torch.empty(shape, dtype=kind, device=target.device)
            start = header.base + entry["data_offsets"][0]
            ranges = byte_ranges(start, entry["shape"], cut, kind)
            read_ranges(job.path, ranges, read, buffer, bar)
            if read is target:
                weight_part.check()
            else:
                job.rank_part.fill(read)
    # Not the whole device: another engine may be capturing a graph.
    stream.synchronize()


def byte_ranges(
    start: int, shape: Sequence[int], cut: Cut | None, kind: torch.dtype
) -> Iterator[range]:
    """Yields the bytes of a tensor that begins at `start`, or of its part, in order."""
    if cut is None:
        yield range(start, start + math.prod(shape) * kind.itemsize)
        return
    inner = math.prod(shape[cut.dim + 1 :]) * kind.itemsize
    for outer in range(math.prod(shape[: cut.dim])):
        for indices in cut.ranges:
            first = start + (outer * shape[cut.dim] + indices.start) * inner
            yield range(first, first + len(indices) * inner)


def read_ranges(
    path: Path, ranges: Iterator[range], target: Tensor, buffer: Tensor, bar: Any
) -> None:
    """Fill `target` with ranges of a file's bytes, a buffer at a time."""
    raw: Any = buffer.numpy()  # its type does not declare the buffer interface
    pieces = (
        byte_range[start : start + BUFFER_BYTES]
        for byte_range in ranges
        for start in range(0, len(byte_range), BUFFER_BYTES)
    )
    left = target.view(-1).view(torch.uint8)
    filled = 0
    with path.open("rb") as file:
        for piece in pieces:
            size = len(piece)
            if filled + size > BUFFER_BYTES:
                left[:filled].copy_(buffer[:filled])  # waits: the buffer is free again
                left, filled = left[filled:], 0
            file.seek(piece.start)
            if file.readinto(raw[filled : filled + size]) < size:
                raise EOFError("the file ends early")
            filled += size
            bar.update(size)
        left[:filled].copy_(buffer[:filled])
