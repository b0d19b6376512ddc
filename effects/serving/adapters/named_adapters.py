"""The adapters that clients of a server may name as their model.

    name --> may the key use it? --> is it known? ---------------------> its digest
                  | no                    | no: on first use, from the operator's
                  v                       v     folders and list of the hub
            as if it were not there    AdapterLoads, in threads ------> its digest

Of an adapter that a key may not use, nothing is revealed: neither in lists nor in errors,
and a request for it loads nothing.
"""

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Final

from attrs import evolve

from minfer.effects.live.adapters.loading import AdapterLoads
from minfer.effects.live.adapters.registry import AdapterEntry
from minfer.effects.live.adapters.served_adapters import ServedAdapters
from minfer.effects.live.adapters.sources import AdapterSources
from minfer.effects.live.client import EngineClient
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.serving.access.api_keys import ApiKey
from minfer.effects.serving.access.authentication import Caller
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.setup.lora_settings import AdapterNameError, check_name

INVALID_ADAPTER: Final = "invalid_adapter"
EXISTS: Final = "adapter_exists"
NOT_FOUND: Final = 404


class NamedAdapters:
    """The adapters of one server, under their names."""

    def __init__(
        self,
        served: ServedAdapters,
        client: EngineClient,
        sources: AdapterSources,
        base_names: tuple[str, ...],
    ) -> None:
        """`base_names` are those of the model itself, which no adapter may have."""
        self.served = served
        self.sources = sources
        self._client = client
        self._base_names = base_names
        self._loads = AdapterLoads()

    def visible(self, key: ApiKey | None) -> list[AdapterEntry]:
        """Returns the adapters that a key may use, with their base models' names."""
        return [
            entry if entry.parent else evolve(entry, parent=self._base_names[0])
            for entry in self.served.registry.entries()
            if entry.name not in self._base_names and _may_use(key, entry.name)
        ]

    def find(self, name: str, caller: Caller) -> AdapterEntry | None:
        """Returns the adapter that a client names, if it is loaded and the client may use
        it.
        """
        return self.served.find(name) if _may_use(caller.key, name) else None

    async def load_on_first_use(self, name: str, caller: Caller) -> AdapterEntry | None:
        """Returns the adapter that a client names, loaded; None: there is none for this
        client. Raises ApiError, and OverloadedError.
        """
        if not self.sources.on_first_use or not _may_use(caller.key, name):
            return None
        try:
            check_name(name)
        except AdapterNameError:
            return None
        load = partial(self._load_on_first_use, name)
        try:
            return await _result(self._loads.begin(name, caller.name, load))
        except _UnknownAdapterError:
            return None
        except (AdapterError, AdapterNameError) as error:
            raise ApiError(str(error), "model", INVALID_ADAPTER) from None

    async def load(
        self, name: str, path: str, caller: Caller, *, replace: bool
    ) -> AdapterEntry:
        """Load an adapter for an administrator. Raises ApiError, and OverloadedError."""
        try:
            check_name(name)
            if name in self._base_names:
                reason = f"the model itself has the name {name!r}; choose another one"
                raise AdapterNameError(reason)  # noqa: TRY301 - as that of another name
        except AdapterNameError as error:
            raise ApiError(str(error), "lora_name") from None
        old = self.served.find(name)
        if old is not None and not replace:
            raise ApiError(
                f"there is an adapter {name!r} already (from {old.origin}); unload it "
                "first, or set load_inplace",
                "lora_name",
                EXISTS,
            )
        load = partial(self._load_path, name, path, replace=replace)
        try:
            entry = await _result(self._loads.begin_new(name, caller.name, load))
        except AdapterError as error:
            raise ApiError(str(error), "lora_path", INVALID_ADAPTER) from None
        except AdapterNameError as error:  # another API server was faster
            raise ApiError(str(error), "lora_name", EXISTS) from None
        if old is not None and old.digest != entry.digest:
            self._drop_unnamed(old.digest)
        return entry

    async def unload(self, name: str) -> None:
        """Take an adapter's name away; requests that have it go on. Raises ApiError."""
        try:
            entry = await asyncio.to_thread(self.served.registry.remove, name)
        except AdapterNameError as error:
            raise ApiError(str(error), "lora_name", "not_found", NOT_FOUND) from None
        self._drop_unnamed(entry.digest)

    def close(self) -> None:
        """Begin no more loads."""
        self._loads.close()

    def _drop_unnamed(self, digest: str) -> None:
        """Free the places of an adapter, unless another name has it, too."""
        if not self.served.registry.name_of(digest):
            self._client.drop_adapter(digest)

    def _load_on_first_use(self, name: str) -> AdapterEntry:
        """Load the adapter of a name, in a thread for that."""
        source = self.sources.of_name(name)
        if source is None:
            raise _UnknownAdapterError(name)
        return self.served.load(name, source)

    def _load_path(self, name: str, path: str, *, replace: bool) -> AdapterEntry:
        """Load an adapter of an administrator, in a thread for that."""
        source = self.sources.of_path(path)
        return self.served.load(name, source, replace=replace)


class _UnknownAdapterError(Exception):
    """No source has an adapter of that name."""


def _may_use(key: ApiKey | None, name: str) -> bool:
    return key is None or key.may_use(name)


async def _result(load: Future[AdapterEntry]) -> AdapterEntry:
    """Returns the result of a load, which goes on for others if this is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(load))
