"""More connections than a server may have file descriptors."""

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from minfer.effects.serving.wire.descriptors import (
    SPARE_DESCRIPTORS,
    UNAVAILABLE_RESPONSE,
    BoundedListener,
    raise_limit,
)
from tests.circles import claimed, long
from tests.effects.serving.process_deaths import API_SERVERS, server
from tests.effects.serving.test_tls import certified

SERVE: Final = f"exec {sys.executable} -m minfer serve --port 0 --dry-run"
SOON: Final = 10.0  # seconds


@contextlib.contextmanager
def limited(
    limit: int, soft: int, *options: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server that may have `limit` descriptors, of which it has `soft` at first."""
    command = f"ulimit -Sn {soft}; ulimit -Hn {limit}; {SERVE} {' '.join(options)}"
    raise_limit()  # of this process, for its ends of the connections
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().split()[-1].removesuffix("/v1"), running
        finally:
            running.kill()


def health(url: str) -> int:
    """The status that a probe gets, soon or not at all."""
    with httpx.Client(verify=False, timeout=SOON) as client:  # noqa: S501 - our own
        return client.get(f"{url}/health").status_code


@pytest.mark.parametrize(
    ("limit", "count", "api_servers", "tls"),
    [
        *long([(160, 200, 0, False)]),
        *claimed([(1024, 1060, 0, False), (1024, 2200, 2, False), (160, 200, 0, True)]),
    ],
)
def test_idle_connections_leave_one_for_health(
    tmp_path: Path, limit: int, count: int, api_servers: int, tls: bool
) -> None:
    options = [f"--api-processes={api_servers}", "--header-timeout=600"]
    if tls:
        certificates = certified(tmp_path)
        options += [
            f"--ssl-certfile={certificates}/cert.pem",
            f"--ssl-keyfile={certificates}/key.pem",
        ]
    with (
        limited(limit, limit // 2, *options) as (url, running),
        contextlib.ExitStack() as stack,
    ):
        host, port = url.split("//")[1].split(":")
        links = []
        for _ in range(count):
            link = socket.create_connection((host, int(port)), timeout=SOON)
            links.append(stack.enter_context(link))
            if len(links) % 50 == 0:
                assert health(url) == 200, len(links)
        for _ in range(5):
            assert health(url) == 200
        # What is beyond is refused, and what is not stays.
        time.sleep(2.0)
        poll = select.poll()
        for link in links:
            poll.register(link, select.POLLIN)
        readable = {number for number, _ in poll.poll(0)}
        assert 0 < len(readable) < count * 0.9
        if not tls:
            beyond = [link for link in links if link.fileno() in readable]
            assert {link.recv(65536) for link in beyond} == {UNAVAILABLE_RESPONSE}
        stack.close()
        end = time.monotonic() + SOON
        while (code := served(url)) != 200:
            assert time.monotonic() < end, code
        assert health(url) == 200
        running.terminate()
        assert running.stderr is not None
        message = running.stderr.read()
    assert "Traceback" not in message
    assert message.count("file descriptors run short") in range(max(2, api_servers + 1))
    assert len(message) < 1000 * max(1, api_servers)


BODY: Final = b'{"prompt": "a", "max_tokens": 500}'
POST: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)
REQUESTS: Final = {
    "a question": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a prompt": POST % (len(BODY), BODY),
    "half a prompt": POST % (2 * len(BODY), BODY),
    "nothing": b"",
}


@pytest.mark.long
def test_connections_that_are_closed_at_once_leave_descriptors() -> None:
    """Also those that the server has not noticed yet to be closed are connections."""
    max_connections = 32
    options = ("--dry-run", "--api-processes=1", f"--max-connections={max_connections}")
    with server(*options) as started:
        started.drain()
        number = started.children()[API_SERVERS[0]]
        host, port = started.url.split("//")[1].split(":")
        folder, counts = Path(f"/proc/{number}/fd"), dict[str, int]()
        before = len([*folder.iterdir()])
        for name, request in REQUESTS.items():
            counts[name] = 0
            for _ in range(20):
                for _ in range(25):
                    with socket.create_connection((host, int(port)), SOON) as link:
                        link.sendall(request)
                counts[name] = max(counts[name], len([*folder.iterdir()]) - before)
            end = time.monotonic() + 6 * SOON
            while len([*folder.iterdir()]) > before + SPARE_DESCRIPTORS:
                assert time.monotonic() < end, "connections stay open"
                time.sleep(0.05)
        assert max(counts.values()) <= max_connections + SPARE_DESCRIPTORS, counts
        assert served(started.url) == 200


def served(url: str) -> int:
    with httpx.Client(verify=False, timeout=SOON) as client:  # noqa: S501 - our own
        return client.get(f"{url}/v1/models").status_code


CHILD = """
import os, resource, socket
from minfer.effects.serving.wire.descriptors import BoundedListener

listener = BoundedListener.of(socket.create_server(("127.0.0.1", 0), backlog=100))
links = [socket.create_connection(listener.getsockname()) for _ in range(5)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for link in links:  # none is left: each is refused, and none waits
    try:
        listener.accept()
    except ConnectionAbortedError:
        assert link.recv(100).startswith(b"HTTP/1.1 503")
for one in taken[:40]:
    os.close(one)
with socket.create_connection(listener.getsockname()) as link:
    made, _ = listener.accept()
    made.sendall(b"x")
    assert link.recv(1) == b"x"
listener.close()
"""


@pytest.mark.long
def test_a_listener_without_descriptors_refuses_with_its_last() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert (child.returncode, child.stderr.count("\n")) == (0, 1), child.stderr


def test_a_listener_gives_all_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with BoundedListener.of(socket.create_server(("127.0.0.1", 0))):
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_limit_is_raised_as_far_as_it_goes() -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
