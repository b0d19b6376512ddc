"""What the network reaches of a server: its own address, and no socket of the processes
behind it. The kernel says which sockets listen, and where.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests.effects.open_sockets import open_sockets, process_tree
from tests.effects.serving.process_deaths import SOON, server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FLOAT: Final = ("--device=cpu", "--dtype=float32", "--num-gpu-blocks-override=128")
APART: Final = ("--prefill=1", "--decode=1")
TWO_RANKS: Final = "--tensor-parallel-size=2"
TIERS: Final = ("--kv-host-memory=64M", "--kv-disk={folder}", "--kv-disk-size=64M")
LOCAL: Final = [  # each with two API servers
    ("--replicas=2", *TIERS),
    APART,
    (TWO_RANKS, "--replicas=2"),
    (TWO_RANKS, *APART),
    ("--pipeline-parallel-size=2",),
]


def lan_interface() -> str:
    """An interface that other machines reach; empty if there is none."""
    for _, name in socket.if_nameindex():
        state = Path(f"/sys/class/net/{name}/operstate").read_text()
        if name != "lo" and state == "up\n":
            return name
    return ""


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings with which gloo and NCCL listen where other machines reach them. Without
    these, gloo does so where the name of the machine stands for such an address.
    """
    if name := lan_interface():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", name)


def test_the_kernel_s_tables_show_what_listens() -> None:
    everywhere = "0.0.0.0"  # noqa: S104 - what this file is about
    with (
        socket.create_server((everywhere, 0)) as tcp,
        socket.create_server(("127.0.0.1", 0)) as local,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as local6,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("::", 0))
        listed = {
            (entry.table, entry.address, entry.port, entry.is_loopback)
            for entry in open_sockets([os.getpid()])
        }
        expected = {
            ("tcp", everywhere, tcp.getsockname()[1], False),
            ("tcp", "127.0.0.1", local.getsockname()[1], True),
            ("tcp6", "::1", local6.getsockname()[1], True),
            ("udp6", "::", udp.getsockname()[1], False),
        }
    assert expected <= listed


@pytest.mark.long
@pytest.mark.parametrize("options", LOCAL, ids=" ".join)
def test_other_machines_reach_no_socket_but_the_server_s(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with server(
        *FLOAT, *(option.format(folder=tmp_path) for option in options)
    ) as served:
        served.drain()
        asyncio.run(served.until_ready())
        if "--replicas=2" in options:
            end = time.monotonic() + SOON
            while served.get("/health").json()["ready"] != "2 of 2 replicas":
                assert time.monotonic() < end
                time.sleep(0.1)
        sockets = open_sockets(process_tree(served.process.pid))
        assert [entry for entry in sockets if not entry.is_loopback] == []
        port = int(served.url.rpartition(":")[2])
        assert port in {entry.port for entry in sockets}


@pytest.mark.long
def test_other_machines_reach_no_socket_but_torchrun_s() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--standalone", "-m", "minfer", "serve", "--port=0", *FLOAT, TWO_RANKS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as torchrun:
        try:
            assert torchrun.stdout is not None
            assert "is served at" in torchrun.stdout.readline()
            _, *pids = process_tree(torchrun.pid)
            sockets = open_sockets(pids)
        finally:
            torchrun.terminate()
    assert len(pids) > 2
    assert [entry for entry in sockets if not entry.is_loopback] == []
