"""A Unix socket to listen at, in place of a host and port: `--uds`."""

import atexit
import os
import socket
from functools import partial
from pathlib import Path
from typing import Final

from minfer.values.checks import ConfigError

PREFIX: Final = "unix:"  # of a host that is the path of a socket


def unix_path(host: str) -> str | None:
    """Returns the path of a host that is a Unix socket."""
    return host.removeprefix(PREFIX) if host.startswith(PREFIX) else None


def listen_at_path(path: str, backlog: int) -> socket.socket:
    """Returns a socket that listens at a path; one that a server left there is replaced.
    It is removed when this process ends. Raises ConfigError.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not path:  # to the system, that is an address of its own choice
            raise OSError("the path is empty")  # noqa: TRY301 - in the form of its errors
        _remove_unused(path)
        listening.bind(path)
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen at {path!r}: {reason}; choose another path with --uds"
        ) from None
    # Processes that this one forks end before it, and without it.
    atexit.register(partial(_remove_own, Path(path).absolute(), os.getpid()))
    return listening


def _remove_own(path: Path, pid: int) -> None:
    """Remove a socket in the process that listened at it alone."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _remove_unused(path: str) -> None:
    """Remove a socket at which nobody listens. Others stay, and bind reports them."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
