"""What processes count together is counted once, whichever of them dies."""

import asyncio
import contextlib
import json
import select
import socket
from pathlib import Path

import httpx
import pytest

from minfer.effects.serving.observability.live_view import MAX_VIEWERS
from minfer.effects.serving.wire.shared_counts import SharedCount, SharedCounts
from tests.effects.serving.process_deaths import API_SERVERS, server
from tests.effects.waiting import until

CONNECTIONS = 40
MORE = 8  # than are let in


def test_a_new_process_clears_its_place() -> None:
    count = SharedCount.of(3)
    first, second = count.at(0), count.at(1)
    first.set(4)
    second.set(7)
    assert (first.own, second.own, first.total, second.total) == (4, 7, 11, 11)
    assert count.at(1).own == 0
    assert first.total == 4


def test_fronts_count_separately() -> None:
    shared = SharedCounts.of(2)
    shared.at(0).viewers.set(2)
    shared.at(1).connections.set(3)
    assert (shared.viewers.total, shared.connections.total) == (2, 3)


def status_of(url: str, key: str) -> int:
    """The status of a request on a connection of its own."""
    head = {"authorization": f"Bearer {key}", "connection": "close"}
    body = {"prompt": [5], "max_tokens": 1}
    response = httpx.post(f"{url}/v1/completions", json=body, headers=head, timeout=20)
    return response.status_code


def num_refused(host: str, port: int) -> int:
    """Connects to a server by more links than it has room for; returns how many it
    refuses.
    """
    with contextlib.ExitStack() as stack:
        links = [
            stack.enter_context(socket.create_connection((host, port)))
            for _ in range(CONNECTIONS + MORE)
        ]
        until(lambda: len(select.select(links, [], [], 0)[0]) >= MORE, seconds=20)
        refused = select.select(links, [], [], 0)[0]
        for link in refused:
            assert link.recv(65536).startswith(b"HTTP/1.1 503 Service Unavailable")
        return len(refused)


@pytest.mark.long  # others ask it of one API server and of another's counts
def test_two_fronts_have_the_limits_of_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"name": "free", "key": "sk-f"}]))
    options = ("--dry-run", f"--api-keys-file={path}", "--access-log=json")
    with server(*options, f"--max-connections={CONNECTIONS}") as served:
        assert [status_of(served.url, "sk-f") for _ in range(24)] == [200] * 24
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=20))
            head = {"authorization": "Bearer sk-f"}

            def views() -> int:
                """The status of one more view, which stays open."""
                live = client.stream("GET", f"{served.url}/live", headers=head)
                return stack.enter_context(live).status_code

            assert [views() for _ in range(MAX_VIEWERS + 2)] == [200] * MAX_VIEWERS + [
                503
            ] * 2
            served.kill(API_SERVERS[0])
            until(lambda: API_SERVERS[0] in served.children(), seconds=20)
            asyncio.run(served.until_ready())
            before = [views() for _ in range(MAX_VIEWERS)]
            assert 0 < before.count(200) < MAX_VIEWERS, (
                "those of the API server that died are free"
            )
        host, port = served.url.removeprefix("http://").split(":")
        until(lambda: status_of(served.url, "sk-f") == 200, seconds=20)
        # There is room for the others, once the server notices what was closed.
        until(lambda: num_refused(host, int(port)) < 2 * MORE, seconds=20)
        assert served.process.stdout is not None
        served.process.terminate()
        lines = [line for line in served.process.stdout if line.startswith("{")]
        posts = [json.loads(line) for line in lines if '"POST"' in line]
        assert {line["process"] for line in posts} == {"api 0", "api 1"}
