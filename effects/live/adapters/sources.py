"""Where adapters may come from, as the operator says when a server is started.

    --lora-modules NAME=PATH    named at the start; any folder, or a name on the hub
    --lora-folders DIR          below it, requests and administrators may load
    --lora-hub NAME=ORG/REPO@REVISION
                                of the hub, these alone, on first use

A request brings a name and no path. So all that is on the hub or elsewhere on the disk is
out of its reach.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import field, frozen

from minfer.effects.live.adapters.adapter_files import AdapterPathError
from minfer.effects.models.adapters.peft_config import CONFIG_NAME, AdapterError
from minfer.effects.models.adapters.peft_files import WEIGHTS_NAME
from minfer.effects.models.checkpoint.hub import HubError, is_id, snapshot
from minfer.effects.setup.engine_args import MAX_ADAPTER_BYTES
from minfer.effects.setup.lora_settings import AdapterNameError, check_name

_FILES: Final = (CONFIG_NAME, WEIGHTS_NAME)


@frozen
class AdapterSource:
    """Where the files of an adapter are to be read."""

    path: str  # a folder, or a name on the hub
    origin: str  # as clients are told
    # Folders below which all files must be, without links in their paths; None: anywhere.
    allowed: tuple[Path, ...] | None = None
    is_hub: bool = False  # `path` is a name on the hub


@frozen(kw_only=True)
class AdapterSources:
    """Where the adapters of requests and administrators may come from."""

    folders: tuple[Path, ...] = ()  # absolute, without links
    hub: Mapping[str, str] = field(factory=dict)  # names, and each one's name on the hub
    runtime_updates: bool = False  # administrators may load and unload
    max_bytes: int = MAX_ADAPTER_BYTES  # of the weights of one
    download_dir: str | Path | None = None

    @property
    def on_first_use(self) -> bool:
        """Whether a request may name an adapter that is not loaded yet."""
        return bool(self.folders or self.hub)

    def of_name(self, name: str) -> AdapterSource | None:
        """Returns the source of an adapter that a request names; None: there is none. It
        looks at the disk.
        """
        try:
            check_name(name)
        except AdapterNameError:
            return None
        if (hub_name := self.hub.get(name)) is not None:
            return AdapterSource(hub_name, hub_name, is_hub=True)
        for folder in self.folders:
            path = folder / name
            # OSError: as if there were none.
            with contextlib.suppress(OSError):
                if (path / CONFIG_NAME).is_file():
                    return AdapterSource(str(path), name, self.folders)
        return None

    def of_path(self, path: str) -> AdapterSource:
        """Returns the source of an adapter that an administrator loads: a folder below
        the allowed ones, also by a path that begins there, or one of the hub's names of
        the list. Raises AdapterPathError.
        """
        if path in self.hub.values():
            return AdapterSource(path, path, is_hub=True)
        for folder in self.folders:
            # ValueError, RuntimeError: no path, or links in a circle.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                actual = (folder / path).resolve()
                if actual != folder and actual.is_relative_to(folder):
                    origin = str(actual.relative_to(folder))
                    return AdapterSource(str(actual), origin, self.folders)
        raise AdapterPathError(
            f"lora_path {path!r:.200}: adapters are loaded from below the folders of "
            "--lora-folders, and from the names of --lora-hub; this is neither"
        )


def trusted_source(path: str | Path) -> AdapterSource:
    """Returns the source of an adapter that the program itself or the command line names:
    any folder, or any name on the hub.
    """
    text = str(path)
    is_hub = "/" in text and is_id(text) and not os.path.exists(text)
    return AdapterSource(text, text, is_hub=is_hub)


def fetch(source: AdapterSource, max_bytes: int, download_dir: str | Path | None) -> Path:
    """Returns the folder of a source, downloaded if necessary. Raises AdapterError."""
    if not source.is_hub:
        return Path(source.path)
    try:
        check_hub_size(source.path, max_bytes)
        return snapshot(source.path, download_dir, files=_FILES)
    except HubError as error:
        raise AdapterError(f"adapter {source.path!r}: {error}") from None


def check_hub_size(name: str, max_bytes: int) -> None:
    """Raise AdapterError for weights on the hub that are larger than allowed, before they
    are downloaded. Where the hub does not say how large they are, the copy's limit holds.
    """
    from huggingface_hub import HfApi

    repository, _, revision = name.partition("@")
    try:
        found = HfApi().model_info(
            repository, revision=revision or None, files_metadata=True
        )
    except Exception:  # also an error of its HTTP library
        return  # `snapshot` says what is wrong, or reads the local cache
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    if sizes.get(WEIGHTS_NAME, 0) > max_bytes:
        raise AdapterError(
            f"adapter {name!r}: {WEIGHTS_NAME} has {sizes[WEIGHTS_NAME]} bytes, which is "
            "more than an adapter may have here (--max-lora-size)"
        )
