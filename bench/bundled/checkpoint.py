"""Checkpoints in parts: what a machine gives back is bounded file by file."""

import io
from pathlib import Path
from typing import Any, Final

import torch

PART: Final = 15 << 20  # bytes


def save(state: dict[str, Any], folder: Path, role: str) -> list[Path]:
    """Write a checkpoint as `ROLE-0.part` and on, over an older one, which stays whole
    until the new one is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    whole = buffer.getvalue()
    parts = [whole[at : at + PART] for at in range(0, len(whole), PART)]
    paths = [folder / f"{role}-{number}.part" for number in range(len(parts))]
    new = [path.with_suffix(".new") for path in paths]
    for path, part in zip(new, parts, strict=True):
        path.write_bytes(part)
    for old in folder.glob(f"{role}-*.part"):
        old.unlink()
    for path, written in zip(paths, new, strict=True):
        written.rename(path)
    return paths


def load(folder: Path, role: str) -> dict[str, Any] | None:
    """A checkpoint, if there is one."""
    paths = sorted(
        folder.glob(f"{role}-*.part"), key=lambda path: int(path.stem.rpartition("-")[2])
    )
    if not paths:
        return None
    whole = io.BytesIO(b"".join(path.read_bytes() for path in paths))
    found: dict[str, Any] = torch.load(whole, map_location="cpu", weights_only=True)
    return found
