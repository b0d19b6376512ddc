"""The two files of an adapter, as a private copy that nobody else can change.

    folder of others --> open, without following what is outside --> check what is open
                     --> copy, up to a limit --> private folder --> read as if trusted

What is checked is what was opened, not a path that may lead elsewhere a moment later. A
file that is shortened while it is mapped into memory would end the process; the copy is
not. It is removed at once: what has it mapped or open keeps it.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from minfer.effects.models.adapters.peft_config import CONFIG_NAME, AdapterError
from minfer.effects.models.adapters.peft_files import WEIGHTS_NAME

MAX_CONFIG_BYTES: Final = 2**20
# Of the list of tensors: of 60 layers with 128 experts each, it has 7 MB.
MAX_HEADER_BYTES: Final = 2**24
_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_LENGTH_BYTES: Final = 8  # at the start of a file: the length of its header
_CHUNK_BYTES: Final = 2**20  # copied at once
_MAX_PATH_CHARS: Final = 300  # of a path in an error
# Not to wait for a pipe; not to pass the file on to other programs.
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)


class AdapterPathError(AdapterError):
    """An adapter's path is not one that adapters may be loaded from."""


@contextlib.contextmanager
def private_copy(
    folder: Path,
    max_bytes: int,
    allowed: Sequence[Path] | None = None,
    origin: str = "",
) -> Iterator[Path]:
    """A private folder with copies of an adapter's files, until the end of the context.

    All files must be below one of the `allowed` folders, which have no links in their
    paths; None: anywhere. Errors call the folder by its `origin`, if that is given.
    Raises AdapterError, or AdapterPathError for files elsewhere.
    """
    shown = Path(origin) if origin else folder
    with contextlib.ExitStack() as stack:
        try:
            source = _open_folder(stack, folder, shown)
            _check_place(source, shown, allowed)
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory("-minfer-lora")))
            for name, limit in (
                (CONFIG_NAME, MAX_CONFIG_BYTES),
                (WEIGHTS_NAME, max_bytes),
            ):
                _copy_file(source, shown / name, copy / name, limit, allowed)
            _check_header(shown / WEIGHTS_NAME, copy / WEIGHTS_NAME)
        except OSError as error:
            reason = error.strerror or str(error)
            raise AdapterError(
                f"adapter {_shown(shown)}: its files cannot be read: {reason}"
            ) from None
        yield copy


def _shown(path: Path) -> str:
    """Returns a path as an error shows it."""
    return repr(str(path)[:_MAX_PATH_CHARS])


def _open_folder(stack: contextlib.ExitStack, folder: Path, shown: Path) -> int:
    try:
        opened = os.open(folder, _FLAGS | os.O_DIRECTORY)
    except FileNotFoundError:
        raise AdapterError(
            f"adapter {_shown(shown)}: there is no such folder; give that with its "
            f"{CONFIG_NAME} and {WEIGHTS_NAME}"
        ) from None
    except NotADirectoryError:
        raise AdapterError(
            f"adapter {_shown(shown)}: it is no folder; give the one with its "
            f"{CONFIG_NAME} and {WEIGHTS_NAME}"
        ) from None
    stack.callback(os.close, opened)
    return opened


def _copy_file(
    source: int, path: Path, copy: Path, limit: int, allowed: Sequence[Path] | None
) -> None:
    """Copy a file of the folder that is open as `source`."""
    with contextlib.ExitStack() as stack:
        try:
            opened = os.open(path.name, _FLAGS, dir_fd=source)
        except FileNotFoundError:
            raise _missing_file(source, path) from None
        stack.callback(os.close, opened)
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(f"adapter {_shown(path.parent)}: {path.name} is no file")
        _check_place(opened, path, allowed)
        with copy.open("wb") as written:
            while data := os.read(opened, _CHUNK_BYTES):
                limit -= len(data)
                if limit < 0:
                    raise _too_large(path, status.st_size)
                written.write(data)


def _check_header(path: Path, copy: Path) -> None:
    """Raise AdapterError for weights whose list of tensors would take long to read: all
    threads would wait meanwhile.
    """
    with copy.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(
            f"adapter {_shown(path.parent)}: {path.name} says that its header has "
            f"{length} bytes; at most {MAX_HEADER_BYTES} are read"
        )


def _missing_file(source: int, path: Path) -> AdapterError:
    """Returns the error about a file that is not there."""
    pickles = [name for name in _PICKLES if name in os.listdir(source)]
    if pickles and path.name == WEIGHTS_NAME:
        return AdapterError(
            f"adapter {_shown(path.parent)}: {pickles[0]} is a pickle, which could run "
            f"code, and is not read; save it as {WEIGHTS_NAME} (PEFT: "
            "save_pretrained(..., safe_serialization=True))"
        )
    return AdapterError(
        f"adapter {_shown(path.parent)}: there is no {path.name}; an adapter in PEFT's "
        f"form has {CONFIG_NAME} and {WEIGHTS_NAME}"
    )


def _too_large(path: Path, size: int) -> AdapterError:
    if path.name == CONFIG_NAME:
        return AdapterError(
            f"adapter {_shown(path.parent)}: {path.name} has {size} bytes; at most "
            f"{MAX_CONFIG_BYTES} are read"
        )
    return AdapterError(
        f"adapter {_shown(path.parent)}: {path.name} has {size} bytes, which is more "
        "than an adapter may have here (--max-lora-size)"
    )


def _check_place(opened: int, path: Path, allowed: Sequence[Path] | None) -> None:
    """Raise AdapterPathError if an open file or folder is not below an allowed folder."""
    if allowed is None:
        return
    actual = Path(os.readlink(f"/proc/self/fd/{opened}"))
    if not any(actual.is_relative_to(folder) for folder in allowed):
        raise AdapterPathError(
            f"adapter {_shown(path)}: it is not below a folder that adapters may be "
            "loaded from; these are named when the server is started (--lora-folders)"
        )
