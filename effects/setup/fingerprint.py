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
from minfer.effects.setup.engine_args import EngineArgs

_HEAD: Final = 1 << 16  # bytes read at the start of a weight file to identify it
_WINDOW: Final = 4096  # bytes of each sample read from the rest of it
_SAMPLES: Final = 16


def fingerprint(
    args: EngineArgs, config: Mapping[str, object], spec: ModelSpec, folder: Path
) -> bytes:
    """Returns a digest of a model's config.json, its dtype in use, the format of its
    cache, the window and sink tokens that settings give its layers, and its weights.
    """
    weights: list[Any] = [args.executor, args.load_format, args.seed]
    if args.executor == "torch" and args.load_format != "dummy":
        outlived = args.kv_disk is not None
        files = sorted(_files(folder))
        weights = [_file_identity(path, timed=outlived) for path in files]
    formats = [asdict(one) for one in spec.kv_formats]
    how = spec.quantization
    if how is not None:  # in that of unquantized weights nothing changes
        formats.append({"matrices": how.format.scheme.name, "plain": sorted(how.plain)})
    if args.attention_window is not None:
        kept = {"window": args.attention_window, "sinks": args.attention_sink_tokens}
        formats.append(kept)
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
        about = path.stat()
        size = about.st_size
        digest.update(size.to_bytes(8, "little") + file.read(_HEAD))
        if timed:
            digest.update(b"%d" % about.st_mtime_ns)
        for i in range(1, _SAMPLES + 1):
            file.seek(max(0, (size * i) // _SAMPLES - _WINDOW))
            digest.update(file.read(_WINDOW))
    return digest.hexdigest()
