"""Addresses of other processes: paths of local sockets, and TCP ports."""

import os
import socket
import struct
from pathlib import Path
from typing import Final, TypeAlias

from minfer.effects.net.framing import Socket
from minfer.effects.net.handshake import HANDSHAKE_SECONDS, RefusedError

Port: TypeAlias = tuple[str, int]  # a host, or an address; empty: all of this machine
Address: TypeAlias = Path | Port
# Without any sign of the other machine for this long, a connection is over.
DEAD_PEER_SECONDS: Final = 8
_WILDCARD_HOSTS: Final = ("", "0.0.0.0", "::")  # noqa: S104 - it is compared
_CREDENTIALS: Final = struct.Struct("3i")  # Linux's ucred: process, user, group
_KEEPALIVE_SECONDS = 2  # until the first probe, and between probes
_KEEPALIVE_PROBES = 3


def read_port(text: str) -> Port:
    """Returns a host and a port: `HOST:PORT`, `[ADDRESS]:PORT` or `PORT`. Raises
    ValueError.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not port.isdecimal() or not 1 <= int(port) < 2**16:
        raise ValueError(f"{text!r} must be HOST:PORT, with a port from 1 to 65535")
    return host, int(port)


def port_text(address: Port) -> str:
    """Returns an address as `read_port` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(address: Port) -> bool:
    """Returns whether an address stands for all networks of a machine."""
    return address[0] in _WILDCARD_HOSTS


def address_text(address: Address) -> str:
    """Returns an address for logs and errors."""
    return address.name if isinstance(address, Path) else port_text(address)


def listen_at(address: Address) -> Socket:
    """Returns a socket that listens. Raises OSError."""
    if not isinstance(address, Path):
        host, port = address
        flags = socket.AI_PASSIVE
        candidates = socket.getaddrinfo(
            host or None, port, 0, socket.SOCK_STREAM, 0, flags
        )
        family, _, _, _, socket_address = candidates[0]
        return socket.create_server(socket_address[:2], family=family)
    address.unlink(missing_ok=True)  # of an earlier engine
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(address))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def dial(address: Address) -> Socket:
    """Returns a connection, with a time limit for its handshake. Raises OSError, and
    RefusedError for a local socket of another user.
    """
    if not isinstance(address, Path):
        sock = socket.create_connection(address, HANDSHAKE_SECONDS)
        enable_keepalive(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.connect(os.fspath(address))
        check_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_user(sock: Socket) -> None:
    """Raise RefusedError if the other side of a local socket is a process of another
    user. On systems without SO_PEERCRED, only the mode of the socket's folder keeps other
    users out.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return
    data = sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise RefusedError(f"it is a process of user {user}, not of {os.geteuid()}")


def enable_keepalive(sock: Socket) -> None:
    """Send TCP keepalive probes, so that a connection ends some seconds after the network
    between the machines has failed, whether anything is sent or not; and send at once.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", _KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        # What was sent is not acknowledged.
        ("TCP_USER_TIMEOUT", DEAD_PEER_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # some systems have not all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
