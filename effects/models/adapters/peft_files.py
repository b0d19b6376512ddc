"""Stand-in."""

import hashlib
import json
from pathlib import Path

from attrs import frozen

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.checkpoint import CheckpointError


class AdapterError(CheckpointError):
    """An adapter cannot be read."""


@frozen
class Adapter:
    """An adapter."""

    digest: bytes
    rank: int
    bytes: int
    base_model: str | None
    folder: Path


def read_adapter(folder: Path, spec: ModelSpec, max_rank: int) -> Adapter:
    """Returns an adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    data = (folder / "adapter_model.safetensors").read_bytes()
    rank = int(config["r"])
    if rank > max_rank:
        raise AdapterError(f"{folder}: rank {rank} is over the limit {max_rank}")
    digest = hashlib.sha256(json.dumps(config).encode() + data).digest()
    return Adapter(digest, rank, len(data), config.get("base_model_name_or_path"), folder)
