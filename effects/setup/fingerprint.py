"""The fingerprint of a model: everything that the KV of a token depends on besides
tokens.

Every block's content key begins with it, so that no cache, tier or other process uses KV
of another model, or of the same model with other weights, in another dtype, or stored in
another format. Weights are identified by names and sizes of their files, their headers,
and windows of their bytes: reading all of a large model would take as long as loading it.
Where blocks outlive the engine, in `kv_disk`, also by the times of the files: a model of
which some matrices are changed in place is as long, and may be alike in all windows.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.weight_files import shards
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.draft_head_checkpoint import HeadCheckpoint
from minfer.effects.setup.engine_args import EngineArgs

_HEAD_BYTES: Final = 1 << 16  # bytes read at the start of a weight file to identify it
_SAMPLE_BYTES: Final = 4096  # bytes of each sample read from the rest of it
_NUM_SAMPLES: Final = 16


def fingerprint(
    args: EngineArgs,
    config: Mapping[str, object],
    spec: ModelSpec,
    folder: Path,
    head: HeadCheckpoint | None = None,
) -> bytes:
    """Returns a digest of a model's config.json, its dtype in use, the formats of its
    cache and of its states, the window and sink tokens that settings give its layers,
    its weights, and those of its draft head, whose keys are beside its own.
    """
    weights: list[Any] = [args.executor, args.load_format, args.seed]
    if args.executor == "torch" and args.load_format != "dummy":
        blocks_outlive_engine = args.kv_disk is not None
        files = sorted(_files(folder))
        if head is not None:
            files += sorted(_files(head.folder))
        weights = [_file_identity(path, timed=blocks_outlive_engine) for path in files]
    cached_spec = spec.with_head_layer()
    formats = [asdict(kv_format) for kv_format in cached_spec.kv_formats]
    if head is not None:
        formats.append({"draft_head": head.spec.kind})
    quantization = spec.quantization
    if quantization is not None:  # in that of unquantized weights nothing changes
        formats.append(
            {
                "matrices": quantization.format.scheme.name,
                "plain": sorted(quantization.plain),
            }
        )
    if parts := [layer.state_parts for layer in spec.layers if layer.state_parts]:
        of_layers = [[asdict(part) for part in layer_parts] for layer_parts in parts]
        formats.append({"states": of_layers, "state_dtype": spec.state_dtype})
    if args.attention_window is not None:
        window = {"window": args.attention_window, "sinks": args.attention_sink_tokens}
        formats.append(window)
    if spec.long_factors:
        formats.append({"rope": "long factors"})
    identity = json.dumps([config, spec.dtype, formats, weights], sort_keys=True)
    return hashlib.sha256(identity.encode()).digest()


def _files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder; the loader reports errors."""
    try:
        return [path for path, _ in shards(folder)]
    except CheckpointError:
        return []


def _file_identity(path: Path, *, timed: bool) -> str:
    digest = hashlib.sha256(path.name.encode())
    # If a file cannot be read, the loader will report it.
    with suppress(OSError), path.open("rb") as file:
        status = path.stat()
        size = status.st_size
        digest.update(size.to_bytes(8, "little") + file.read(_HEAD_BYTES))
        if timed:
            digest.update(b"%d" % status.st_mtime_ns)
        for i in range(1, _NUM_SAMPLES + 1):
            file.seek(max(0, (size * i) // _NUM_SAMPLES - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
