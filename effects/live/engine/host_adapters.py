"""The adapters in an engine's host memory, between files and the slots of the device.

    LoadAdapter --> in host memory --> the executor copies it to its slot
                --> not there --> a thread reads its files, then the same; or
                                  AdapterFailed, with what was wrong

At most `limit` adapters are kept; the least recently used goes. The core bounds how many
loads run at once, as each has a slot. Files are found by digest, and the executor refuses
those whose digest is another one by now: so KV of one adapter never mixes with that of
another, whatever happens to files.
"""

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from minfer.effects.execution.contract import AdapterExecutor, Executor, ReportLoad
from minfer.effects.live.adapters.adapter_files import private_copy
from minfer.effects.live.adapters.registry import AdapterRegistry
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.engine_args import EngineArgs
from minfer.records.messages import AdapterFailed, AdapterLoaded, LoadAdapter

_log: Final = logging.getLogger("minfer.adapters")


class HostAdapters:
    """The adapters of one engine in host memory."""

    def __init__(
        self,
        executor: AdapterExecutor,
        registry: AdapterRegistry,
        limit: int,
        max_bytes: int,
    ) -> None:
        self._executor = executor
        self._registry = registry
        self._limit = limit
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._resident: dict[str, None] = {}  # digests, the least recently used first
        # Slots into which adapters are being loaded, by adapter: these stay.
        self._loading: dict[str, int] = {}
        # One thread: an adapter is never removed while it is added.
        self._pool = ThreadPoolExecutor(1, "minfer-adapters")

    def load(self, command: LoadAdapter, report: ReportLoad) -> None:
        """Begin a load; `report` is called at its end, from any thread."""

        def end(result: AdapterLoaded | AdapterFailed) -> None:
            with self._lock:
                self._loading.pop(command.adapter, None)
            report(result)

        with self._lock:
            self._loading[command.adapter] = command.slot
            is_resident = command.adapter in self._resident
            if is_resident:
                self._touch(command.adapter)
        if is_resident:
            self._executor.load_adapter(command, end)
            return
        # RuntimeError: the engine is being closed, and nothing waits for it any more.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._read, command, end)

    def forget(self, digest: str) -> None:
        """Free the host memory of an adapter that was unloaded, unless it is just being
        loaded. A request that still has it may have it read again.
        """
        with contextlib.suppress(RuntimeError):  # it is being closed
            self._pool.submit(self._evict, digest)

    def close(self) -> None:
        """Begin no more loads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, command: LoadAdapter, end: ReportLoad) -> None:
        """Read an adapter's files, and load it, in a thread for that."""
        try:
            self._make_resident(command.adapter)
            self._executor.load_adapter(command, end)
        except Exception as error:  # whatever is wrong with it, no other request ends
            expected = isinstance(error, AdapterError | OSError | MemoryError)
            _log.error(
                "an adapter cannot be loaded: %s",
                error,
                exc_info=None if expected else error,
            )
            end(AdapterFailed(command.adapter, command.slot, str(error) or repr(error)))

    def _make_resident(self, digest: str) -> None:
        """Read an adapter into host memory. Raises AdapterError."""
        folder = self._registry.folder_of(digest)
        if folder is None:
            raise AdapterError(
                f"adapter {digest[:12]}: it was unloaded, and its folder is not known "
                "any more; load it again"
            )
        with private_copy(Path(folder), self._max_bytes) as copy:
            try:
                self._executor.add_adapter(bytes.fromhex(digest), str(copy))
            except CheckpointError as error:  # also of a damaged file
                raise AdapterError(str(error).replace(str(copy), folder)) from None
        with self._lock:
            self._touch(digest)
            excess = max(0, len(self._resident) - self._limit)
            unused = [name for name in self._resident if name not in self._loading]
        for name in unused[:excess]:
            self._evict(name)

    def _evict(self, digest: str) -> None:
        """Free the host memory of an adapter, in the thread for files."""
        with self._lock:
            if digest in self._loading or digest not in self._resident:
                return
            del self._resident[digest]
        self._executor.remove_adapter(bytes.fromhex(digest))

    def _touch(self, digest: str) -> None:
        """Note that an adapter is used; the caller holds the lock."""
        self._resident.pop(digest, None)
        self._resident[digest] = None


def host_adapters(
    executor: Executor, registry: AdapterRegistry | None, args: EngineArgs
) -> HostAdapters | None:
    """Returns what loads an engine's adapters; None: it has none, or computes nothing."""
    if registry is None or not isinstance(executor, AdapterExecutor):
        return None
    return HostAdapters(executor, registry, args.host_adapters, args.max_lora_size)
