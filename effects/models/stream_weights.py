"""Tensors from safetensors files straight to a GPU, at the speed of the disk or of PCIe.

Threads read ranges of files into pinned buffers, one each: while some are filled, others
are on their way. Nothing is mapped into memory and nothing is held but the buffers.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

Job = tuple[Path, str, Tensor]  # a file, a tensor's name in it, and where it goes

THREADS: Final = 8
BUFFER: Final = 16 << 20  # bytes
SHOWN: Final = 1 << 30  # bytes from which on a terminal sees progress
_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def stream_weights(jobs: Sequence[Job]) -> None:
    """Fill tensors on a GPU, contiguous and of their sources' shapes, casting where types
    differ.

    The files' headers have been checked. Raises OSError, EOFError for a file that ends
    early.
    """
    heads = {path: _head(path) for path in dict.fromkeys(job[0] for job in jobs)}
    total = sum(
        b - a for path, name, _ in jobs for a, b in [heads[path][0][name]["data_offsets"]]
    )
    hidden = None if total >= SHOWN else True  # None: unless it is a terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Weights", disable=hidden)
    with bar, ThreadPoolExecutor(THREADS) as pool:
        # The largest first, so that no thread is left with one at the end.
        order = sorted(jobs, key=lambda job: job[2].numel(), reverse=True)
        parts = [order[i::THREADS] for i in range(THREADS)]
        list(
            pool.map(lambda part: _fill(part, heads, bar), parts)
        )  # raises what they raised
    torch.cuda.synchronize()


def _head(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where their bytes begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _fill(
    jobs: Sequence[Job], heads: dict[Path, tuple[dict[str, Any], int]], bar: Any
) -> None:
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    stream: Any = torch.cuda.Stream  # which has no types
    raw: Any = buffer.numpy()  # whose types are not those of a buffer
    with torch.inference_mode(), torch.cuda.stream(stream()):
        for path, name, target in jobs:
            about, base = heads[path]
            kind = _TYPES[about[name]["dtype"]]
            same = kind is target.dtype
            whole = (
                target
                if same
                else torch.empty(target.shape, dtype=kind, device=target.device)
            )
            with path.open("rb") as file:
                file.seek(base + about[name]["data_offsets"][0])
                for part in torch.split(whole.view(-1).view(torch.uint8), BUFFER):
                    if file.readinto(raw[: len(part)]) < len(part):
                        raise EOFError("the file ends early")
                    part.copy_(
                        buffer[: len(part)]
                    )  # waits, so that the buffer is free again
                    bar.update(len(part))
            if not same:
                target.copy_(whole)
