"""Reads the JSON files of a checkpoint; errors for damaged ones."""

import json
from pathlib import Path
from typing import Any

from minfer.effects.models.config_reader import CheckpointError


class CorruptFileError(CheckpointError):
    """A file of the checkpoint is missing, truncated or not what its name says."""


def damaged(
    path: Path, fault: str, remedy: str = "download it again"
) -> CorruptFileError:
    """Returns the error about a damaged file."""
    return CorruptFileError(f"{path}: {fault}; {remedy}")


def read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file. Raises `CorruptFileError`."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"must be a JSON object, found {type(value).__name__}")
    return value
