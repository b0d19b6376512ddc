"""The adapters of a served model, as the text side of it sees them: from a name to the
digest that requests carry.

    find     a name that is known: at once, in an event loop
    load     files --> private copy --> checked against the model, digest --> a name
    unload   the name goes; requests that have the digest go on

`load` and `unload` touch disks, so they are not for an event loop.
"""

import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Final

from minfer.effects.live.adapters.adapter_files import private_copy
from minfer.effects.live.adapters.lora_request import LoRARequest
from minfer.effects.live.adapters.registry import AdapterEntry, AdapterRegistry
from minfer.effects.live.adapters.sources import AdapterSource, fetch, trusted_source
from minfer.effects.live.errors import RequestError
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.models.adapters.peft_files import read_adapter
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.engine_args import MAX_ADAPTER_BYTES
from minfer.effects.setup.lora_settings import AdapterNameError, LoraModule
from minfer.effects.setup.prepare import Setup
from minfer.values.checks import ConfigError

NOT_ENABLED: Final = "adapters are not enabled; set enable_lora (--enable-lora)"


class ServedAdapters:
    """The adapters of one model; several may share a registry."""

    def __init__(
        self,
        registry: AdapterRegistry,
        spec: ModelSpec,
        max_rank: int,
        *,
        max_bytes: int = MAX_ADAPTER_BYTES,
        download_dir: str | Path | None = None,
    ) -> None:
        self.registry = registry
        self._spec = spec
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._download_dir = download_dir

    @classmethod
    def of(cls, setup: Setup) -> "ServedAdapters | None":
        """Returns the adapters of a model with this setup; None: it takes none."""
        args = setup.args
        if not args.enable_lora:
            return None
        return cls(
            AdapterRegistry(Path(args.lora_registry)),
            setup.spec,
            args.max_lora_rank,
            max_bytes=args.max_lora_size,
            download_dir=args.download_dir,
        )

    def warm(self) -> None:
        """Load what reads adapters now: all threads of this process wait for it, which
        should not happen during requests.
        """
        import_module("safetensors.torch")

    def find(self, name: str) -> AdapterEntry | None:
        """Returns the adapter of a name, if it is one."""
        return self.registry.find(name)

    def load(
        self, name: str, source: AdapterSource, *, parent: str = "", replace: bool = False
    ) -> AdapterEntry:
        """Read an adapter, and give it a name. Raises AdapterError, which says where it
        comes from, but no path of this machine, and AdapterNameError if another one has
        the name, unless this is to `replace` it.
        """
        origin = source.origin
        folder = _resolved(fetch(source, self._max_bytes, self._download_dir), origin)
        with private_copy(folder, self._max_bytes, source.allowed, origin) as copy:
            try:
                adapter = read_adapter(copy, self._spec, self._max_rank)
            except CheckpointError as error:  # also of a damaged file
                message = str(error).replace(str(copy), origin)
                raise AdapterError(message) from None
        entry = AdapterEntry(
            name=name,
            digest=adapter.digest.hex(),
            folder=str(folder),
            origin=origin,
            parent=parent,
            rank=adapter.rank,
            size=adapter.bytes,
            created=int(time.time()),
        )
        self.registry.add(entry, replace=replace)
        return entry

    def load_modules(self, modules: Iterable[LoraModule]) -> None:
        """Load the adapters that a server is started with, unless that was done before.
        Raises ConfigError.
        """
        if self.registry.modules_read:
            return
        for module in modules:
            source = trusted_source(module.path)
            try:
                self.load(module.name, source, parent=module.base_model_name)
            except (AdapterError, AdapterNameError) as error:
                message = f"--lora-modules {module.name}={module.path}: {error}"
                raise ConfigError(message) from None
        self.registry.note_modules_read()

    def of_request(self, request: LoRARequest) -> str:
        """Returns the digest of a program's adapter, which is read unless it was before.
        Raises RequestError.
        """
        entry = self.find(request.name)
        path = request.path
        is_known = entry is not None and entry.origin == path
        if entry is not None and is_known and not request.load_inplace:
            return entry.digest
        try:
            loaded = self.load(
                request.name,
                trusted_source(path),
                parent=request.base_model_name or "",
                replace=request.load_inplace,
            )
        except (AdapterError, AdapterNameError) as error:
            raise RequestError(f"lora_request: {error}", param="lora_request") from None
        return loaded.digest

    def describe(self, digest: str) -> str:
        """Returns how people know a digest: a name of it, or its first digits."""
        return self.registry.name_of(digest) or digest[:12]


def _resolved(folder: Path, origin: str) -> Path:
    """Returns a folder's path without links. Raises AdapterError."""
    try:
        return folder.resolve()
    except (OSError, ValueError, RuntimeError):  # circles of links, zero bytes
        raise AdapterError(
            f"adapter {origin!r:.300}: this cannot be the path of a folder; give that "
            "with its adapter_config.json and adapter_model.safetensors"
        ) from None


def digest_of(adapters: ServedAdapters | None, request: object) -> str:
    """Returns the digest of the adapter of a request, or nothing for None. Raises
    RequestError.
    """
    if request is None:
        return ""
    if not isinstance(request, LoRARequest):
        reason = f"lora_request must be a LoRARequest, not {type(request).__name__}"
        raise RequestError(reason, param="lora_request")
    if adapters is None:
        raise RequestError(f"lora_request: {NOT_ENABLED}", param="lora_request")
    return adapters.of_request(request)
