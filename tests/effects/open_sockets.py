"""Sockets at which processes can be reached, as the kernel lists them (Linux)."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final

from attrs import frozen

LISTENS: Final = "0A"  # states in the kernel's tables
UNCONNECTED: Final = "07"  # of UDP: receives from every address
TABLES: Final = {"tcp": LISTENS, "tcp6": LISTENS, "udp": UNCONNECTED, "udp6": UNCONNECTED}


@frozen
class OpenSocket:
    """A socket that accepts what is sent to its address."""

    process: int
    command: str
    table: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        address = ip_address(self.address)
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return address.is_loopback


def process_tree(root: int) -> list[int]:
    """A process and all its descendants."""
    processes = [root]
    for process in processes:  # which grows meanwhile
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # its thread has ended
                processes += map(int, file.read_text().split())
    return processes


def open_sockets(processes: Iterable[int]) -> list[OpenSocket]:
    """The open sockets of these processes."""
    return [open_socket for process in processes for open_socket in _of_process(process)]


def _of_process(process: int) -> Iterator[OpenSocket]:
    folder = Path(f"/proc/{process}")
    inodes = set[str]()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            inodes.add(os.readlink(descriptor))
    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    for table, state in TABLES.items():
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                yield OpenSocket(process, command, table, _text(address), int(port, 16))


def _text(address: str) -> str:
    """An address as people write it; the kernel's tables have words in the machine's byte
    order.
    """
    data = bytes.fromhex(address)
    if sys.byteorder == "little":
        data = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data)
