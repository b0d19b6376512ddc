"""Requests that wait for fair shares, backends that come and go, and the journal."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.cli.main import main
from minfer.effects.live.journal.routing_journal_file import (
    RoutingJournalFile,
    routing_journals,
)
from minfer.effects.proxy.backend_dispatcher import (
    BackendDispatcher,
    NotPlacedError,
    TooManyWaitingError,
)
from minfer.journal.routing_journal import RoutingJournal
from minfer.routing.messages import RoutingRequest
from minfer.routing.policies import LeastLoaded, Prefix
from minfer.routing.state import RouterConfig
from minfer.values.checks import ConfigError
from tests.core.routing.routers import keys

SHARE = RouterConfig(Prefix(least=0, patience=0.0), 64)


def request(name: str, tenant: str = "x", *blocks: int, tokens: int = 1000) -> Any:
    return RoutingRequest(name, keys(*blocks), tokens, tenant)


def new_dispatcher(
    *names: str, config: RouterConfig = SHARE, **options: Any
) -> BackendDispatcher:
    settings = {"cache_blocks": 100, "max_waiting": 2, **options}
    dispatcher = BackendDispatcher(config, **settings)
    for name in names:
        dispatcher.join(name)
    return dispatcher


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def crowded(dispatcher: BackendDispatcher) -> "list[asyncio.Task[str]]":
    """Two tenants wait on the one backend; two more requests of one of them come."""
    assert await dispatcher.place(request("other", "y", tokens=1000)) == "a"
    assert await dispatcher.place(request("first", tokens=1000)) == "a"
    tasks = [asyncio.create_task(dispatcher.place(request(name))) for name in ("p", "q")]
    await settled()
    assert dispatcher.waiting == 2
    assert not any(task.done() for task in tasks)
    return tasks


def test_a_tenant_with_its_share_waits_until_one_of_its_requests_starts() -> None:
    async def case() -> None:
        dispatcher = new_dispatcher("a")
        tasks = await crowded(dispatcher)
        dispatcher.start("first")
        await settled()
        assert [task.done() for task in tasks] == [True, False], "in order"
        dispatcher.end("p")
        await settled()
        assert [await task for task in tasks] == ["a", "a"]
        assert dispatcher.waiting == 0
        assert dispatcher.counts.deferred == 2

    asyncio.run(case())


def test_a_backend_that_leaves_or_joins_wakes_all_who_wait() -> None:
    async def case() -> None:
        dispatcher = new_dispatcher("a")
        tasks = await crowded(dispatcher)
        dispatcher.leave("a")
        await settled()
        for task in tasks:
            with pytest.raises(NotPlacedError, match="no server"):
                task.result()
        dispatcher.join("a")
        tasks = await crowded(dispatcher)
        dispatcher.join("b")
        await settled()
        assert tasks[0].result() == "b"

    asyncio.run(case())


def test_those_that_wait_are_bounded_and_may_leave() -> None:
    async def case() -> None:
        dispatcher = new_dispatcher("a")
        tasks = await crowded(dispatcher)
        with pytest.raises(TooManyWaitingError, match="--max-waiting"):
            await dispatcher.place(request("r"))
        tasks[0].cancel()
        await settled()
        assert dispatcher.waiting == 1
        dispatcher.start("first")
        await settled()
        assert await tasks[1] == "a"
        assert "p" not in dispatcher.state.requests
        # One is placed, and cancelled before its task could know.
        task = asyncio.create_task(dispatcher.place(request("z")))
        await settled()
        assert dispatcher.waiting == 1
        dispatcher.end("q")
        assert dispatcher.state.requests["z"] == "a"
        task.cancel()
        await settled()
        assert task.cancelled()
        dispatcher.end("z")
        assert {*dispatcher.state.requests} == {"other", "first"}

    asyncio.run(case())


def test_users_of_a_tenant_take_turns() -> None:
    async def case() -> None:
        dispatcher = new_dispatcher("a", max_waiting=9)
        assert await dispatcher.place(request("other", "y", tokens=1000)) == "a"
        assert await dispatcher.place(request("first"), "p") == "a"
        placed = list[str]()

        async def place(name: str) -> None:
            await dispatcher.place(request(name), name[0])
            placed.append(name)

        names = ("p1", "p2", "p3", "q1", "r1")
        tasks = [asyncio.create_task(place(name)) for name in names]
        await settled()
        assert dispatcher.waiting == len(names)
        tasks[3].cancel()
        dispatcher.start("first")
        for count in range(1, len(names)):
            await settled()
            assert len(placed) == count
            dispatcher.end(placed[-1])
        assert placed == ["p1", "r1", "p2", "p3"]
        assert dispatcher.waiting == 0
        assert not dispatcher._queues._queues

    asyncio.run(case())


def test_what_was_sent_to_a_backend_is_assumed_to_be_there_up_to_a_bound() -> None:
    async def case() -> None:
        dispatcher = new_dispatcher("a", "b", cache_blocks=4)
        home = await dispatcher.place(request("1", "x", 1, 2, 3))
        assert dispatcher.assumed_blocks(home) == 3
        dispatcher.start("1")
        assert await dispatcher.place(request("2", "x", 1, 2, 3, 4)) == home
        assert dispatcher.counts.hit_blocks == 3
        other_name = next(name for name in "ab" if name != home)
        dispatcher.send_to(home, request("3", "x", 7, 8))  # evicts the ends of the others
        assert dispatcher.assumed_blocks(home) == 4
        for name in "123":
            dispatcher.end(name)
        dispatcher.drain(home)
        assert await dispatcher.place(request("4", "x", 1, 2)) == other_name
        dispatcher.leave(home)
        dispatcher.join(home)
        assert dispatcher.assumed_blocks(home) == 0
        dispatcher.end("4")
        assert await dispatcher.place(request("5", "x", 1, 2)) == other_name

    asyncio.run(case())


def test_a_request_moves_to_one_that_was_not_tried() -> None:
    async def case() -> None:
        dispatcher = new_dispatcher("a", "b", "c", config=RouterConfig(LeastLoaded()))
        request_1 = request("1")
        assert await dispatcher.place(request_1) == "a"
        assert dispatcher.move(request_1, ["a"]) == "b"
        assert dispatcher.state.requests["1"] == "b"
        dispatcher.leave("b")
        assert dispatcher.move(request_1, ["a", "b"]) == "c"
        assert dispatcher.move(request_1, ["a", "b", "c"]) is None
        dispatcher.end("1")
        assert not dispatcher.state.requests

    asyncio.run(case())


def test_a_recorded_router_replays(tmp_path: Path, capsys: Any) -> None:
    async def case() -> Path:
        journal = RoutingJournalFile(tmp_path / "runs", SHARE, 10**6)
        dispatcher = new_dispatcher("a", "b", journal=journal, cache_blocks=4)
        for i in range(20):
            await dispatcher.place(request(f"{i}", "xy"[i % 2], i % 3, 5, i))
            dispatcher.start(f"{i}")
            if i % 3 == 0:
                dispatcher.end(f"{i // 2}")
        dispatcher.leave("b")
        dispatcher.move(request("19"), ["b"])
        journal.close()
        return journal.path

    path = asyncio.run(case())
    assert path.stat().st_mode & 0o777 == 0o600
    journal = RoutingJournal(path.read_bytes())
    assert len([*journal.turns()]) > 40
    assert routing_journals(path) == routing_journals(path.parent) == [path]
    assert main(["replay", str(path.parent)]) == 0
    assert "verified   every decision" in capsys.readouterr().out
    assert main(["replay", str(path), "--at", "3"]) == 2
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"is":"Prefix"', b'"is":"Prefix","token":1.0', 1))
    assert main(["replay", str(path)]) == 1
    assert "DIVERGED   in turn 2" in capsys.readouterr().out
    path.write_bytes(data.replace(b'"cost"', b'"last"', 1))
    assert main(["replay", str(path), "--json"]) == 2


def test_a_journal_ends_at_its_size_and_the_router_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> Path:
        journal = RoutingJournalFile(tmp_path, SHARE, 1000)
        dispatcher = new_dispatcher("a", journal=journal)
        for i in range(20):
            await dispatcher.place(request(f"{i}"))
            dispatcher.end(f"{i}")
        assert not journal.recording
        journal.close()
        return journal.path

    path = asyncio.run(case())
    assert path.stat().st_size <= 1000
    journal = RoutingJournal(path.read_bytes())
    assert 0 < len([*journal.turns()]) < 20, "and what was written replays"
    assert caplog.text.count("ends here: it has the size that --journal-size allows") == 1
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        RoutingJournalFile(path, SHARE, 1000)
