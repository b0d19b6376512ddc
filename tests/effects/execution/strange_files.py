"""What may stand in place of a file of a KV folder."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def _make_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def _make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        # The length of an address is bounded.
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def _link_to_fifo(path: Path) -> None:
    fifo = path.with_name(f"{path.name}.fifo")
    os.mkfifo(fifo)
    path.symlink_to(fifo.name)


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": os.mkdir,
    "full folder": _make_full_folder,
    "FIFO": os.mkfifo,
    "socket": _make_socket,
    "symlink loop": _make_loop,
    "link to a FIFO": _link_to_fifo,
    "link to a device": lambda path: path.symlink_to(os.devnull),
    "link to nothing": lambda path: path.symlink_to("missing"),
}
