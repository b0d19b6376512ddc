"""KV blocks between two processes of this machine: through shared memory, TCP over
loopback, and, where it is installed, NIXL with what UCX finds here.

    python -m bench.peers

One process sends blocks with some threads, another one fetches them with as many into
memory of its own, as engines do; from the first send to the last fetch. Beside it, what a
copy in memory and a plain TCP connection, without checksums, come to with one thread.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.results import run, show, spread
from minfer.effects.execution.tiers.peers.peer_plan import PeerPlan
from minfer.effects.execution.tiers.peers.peers import Peers
from minfer.effects.execution.tiers.peers.remote_memory import is_installed
from minfer.effects.net.addresses import Address
from minfer.effects.net.framing import read_exactly

# Bytes of a block of 16 and of 64 tokens: of a 0.5B model (24 layers, 2 heads of 64), and
# of a 7B one (28 layers, 4 heads of 128), both in 16 bits.
SIZES: Final = {"0.3 MB": 24 * 2 * 2 * 64 * 2 * 24, "3.7 MB": 28 * 2 * 4 * 128 * 2 * 64}
LAYOUT: Final = b"bench"
TARGET: Final = "d"
NIXL: Final = "NIXL"
GIGA: Final = 1e9


def free_port() -> tuple[str, int]:
    """A TCP address that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
        return host, port


def keys_of(turn: int, count: int) -> list[bytes]:
    """The keys of a repetition's blocks."""
    numbers = range(turn * count, turn * count + count)
    return [number.to_bytes(32, "little") for number in numbers]


def in_threads(work: Callable[[bytes], None], keys: Sequence[bytes], count: int) -> None:
    """Do work for each key, in `count` threads."""

    def work_on_share(first: int) -> None:
        for key in keys[first::count]:
            work(key)

    threads = [
        threading.Thread(target=work_on_share, args=(first,)) for first in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(
    pipe: Connection, address: Address, size: int, blocks: int, *, nixl: bool
) -> None:
    """The process that gets blocks: fetches them, as often as it is told to."""
    plan = PeerPlan(name=TARGET, role="", listens=(address,), nixl=nixl)
    peers = Peers(plan, 1)
    peers.open(LAYOUT, size)
    local = threading.local()

    def fetch(key: bytes) -> None:
        if not hasattr(local, "into"):
            local.into = memoryview(bytearray(size))
        peers.read(key, LAYOUT, [local.into])

    pipe.send("listens")
    for turn, threads in iter(pipe.recv, None):
        in_threads(fetch, keys_of(turn, blocks), threads)
        pipe.send("fetched")
    peers.close()


def rates(
    address: Address, size: int, args: argparse.Namespace, *, nixl: bool
) -> dict[str, dict[str, float]]:
    """GB/s by number of threads."""
    blocks = max(1, args.bytes // size)
    parent_end, child_end = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=receive, args=(child_end, address, size, blocks), kwargs={"nixl": nixl}
    )
    child.start()
    parent_end.recv()
    peers = Peers(PeerPlan(name="p", role="", sends={TARGET: address}), 1)
    peers.open(LAYOUT, size)
    block = [memoryview(bytearray(os.urandom(size)))]
    results, turn = {}, 0
    for threads in args.threads:
        speeds = []
        for number in range(args.repetitions + 1):
            keys = keys_of(turn, blocks)
            peers.want(tuple(keys), TARGET)
            begin = time.perf_counter()
            parent_end.send((turn, threads))
            in_threads(lambda key: peers.write(key, LAYOUT, block), keys, threads)
            parent_end.recv()
            if number:  # the first one touches the memory
                speeds.append(blocks * size / (time.perf_counter() - begin) / GIGA)
            turn += 1
        results[f"{threads} threads"] = spread(speeds)
    parent_end.send(None)
    child.join()
    peers.close()
    return results


def copying(size: int, args: argparse.Namespace) -> dict[str, float]:
    """GB/s of copies from memory to memory, in one thread."""
    count = max(1, args.bytes // size)
    source = np.ones(size, np.uint8)
    targets = [np.ones(size, np.uint8) for _ in range(16)]
    speeds = []
    for _ in range(args.repetitions):
        begin = time.perf_counter()
        for number in range(count):
            np.copyto(targets[number % len(targets)], source)
        speeds.append(count * size / (time.perf_counter() - begin) / GIGA)
    return spread(speeds)


def plain_tcp(size: int, args: argparse.Namespace) -> dict[str, float]:
    """GB/s of a TCP connection that carries nothing else, with a thread at each end."""
    count = max(1, args.bytes // size)
    address = free_port()
    with socket.create_server(address) as listener:
        child = multiprocessing.get_context("spawn").Process(
            target=_pour, args=(address, size, count * args.repetitions)
        )
        child.start()
        sock, _ = listener.accept()
        into, speeds = memoryview(bytearray(size)), []
        with sock:
            for _ in range(args.repetitions):
                begin = time.perf_counter()
                for _ in range(count):
                    read_exactly(sock, into)
                speeds.append(count * size / (time.perf_counter() - begin) / GIGA)
        child.join()
    return spread(speeds)


def _pour(address: tuple[str, int], size: int, count: int) -> None:
    data = bytes(size)
    with socket.create_connection(address) as sock:
        for _ in range(count):
            sock.sendall(data)


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """GB/s by way, size of blocks and threads."""
    results: dict[str, Any] = {"unit": "GB/s"}
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            ways: dict[str, Address] = {
                "shared memory": Path(folder) / "kv",
                "TCP": free_port(),
            }
            if is_installed():
                ways[NIXL] = free_port()
            by_way = {
                way: rates(address, size, args, nixl=way == NIXL)
                for way, address in ways.items()
            }
        beside = {"a copy": copying(size, args), "plain TCP": plain_tcp(size, args)}
        results[name] = {"bytes": size, **by_way, **beside}
        show({name: results[name]})
    return results


if __name__ == "__main__":
    run(
        "peers",
        measure,
        {
            "--bytes": {"type": int, "default": 1 << 30, "help": "in each repetition"},
            "--repetitions": {"type": int, "default": 5},
            "--threads": {"type": int, "nargs": "+", "default": [1, 4]},
        },
    )
