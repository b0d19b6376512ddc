"""The request router of Ray Serve, with replicas that are not there."""

import asyncio
import json
from typing import Any

import pytest
from attrs import define, field

pytest.importorskip("ray.serve", reason="the extra ray-serve is not installed")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, ReplicaID

from minfer.effects.serving.distributed.asgi_calls import post_head
from minfer.effects.serving.distributed.serve_router import MinferRequestRouter

OURS = DeploymentID(name="engine", app_name="app")
ROOM = 4  # requests of a replica at once

pytestmark = pytest.mark.long  # Ray takes a second to import


@define(eq=False)
class Replica:
    """What a router sees of a replica."""

    name: str
    routing_stats: dict[str, Any] = field(factory=dict)
    max_ongoing_requests: int = ROOM
    queue: int = 0

    @property
    def replica_id(self) -> Any:
        return identity(self.name)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        del deadline_s
        return self.queue


def router(*replicas: Replica, policy: str = "prefix") -> Any:
    made = MinferRequestRouter(
        deployment_id=OURS,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    made.initialize_state(policy=policy)
    made.update_replicas([*replicas])
    return made


def pending(name: str, text: str, home: str = "") -> Any:
    body = json.dumps({"prompt": text}).encode()
    meta = RequestMetadata(request_id=name, internal_request_id=name)
    args = [post_head("/v1/completions", len(body)), body, home]
    return PendingRequest(args=args, kwargs={}, metadata=meta)


def identity(name: str) -> Any:
    return ReplicaID(unique_id=name, deployment_id=OURS)


def text(session: int) -> str:
    return f"{session} " * 1000


async def choose(made: Any, request: Any) -> str:
    """Have a request routed to the replica that is chosen; returns its name."""
    ranks = await made.choose_replicas([*made.curr_replicas.values()], request)
    chosen = next(one for rank in ranks for one in rank)
    made.on_request_routed(request, chosen.replica_id, None)
    return str(chosen.name)


def live(made: Any) -> dict[str, int]:
    """The requests that count on each replica."""
    replicas = made._dispatcher.state.replicas
    return {name: len(one.live) for name, one in replicas.items()}


async def check_sessions() -> None:
    made = router(Replica("a"), Replica("b"))
    first = [await choose(made, pending(f"r{i}", text(i))) for i in range(4)]
    assert sorted(first) == ["a", "a", "b", "b"]
    again = [await choose(made, pending(f"s{i}", text(i) + "!")) for i in range(4)]
    assert again == first
    assert live(made) == {"a": 4, "b": 4}
    for i, name in enumerate(first):
        made.on_request_completed(identity(name), f"r{i}")
        made.on_request_completed(identity(name), f"s{i}")
    assert live(made) == {"a": 0, "b": 0}
    assert made._requests == {}


def test_sessions_stay_and_new_ones_spread() -> None:
    asyncio.run(check_sessions())


async def check_changes() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a)
    assert await choose(made, pending("r0", text(0))) == "a"
    made.update_replicas([a, b])
    assert await choose(made, pending("r1", text(1))) == "b"
    assert await choose(made, pending("r2", text(0))) == "a"
    made.on_replica_actor_died(identity("a"))
    assert await choose(made, pending("r3", text(0))) == "b"
    made.update_replicas([b, Replica("c")])
    assert live(made) == {"b": 2, "c": 0}
    assert made._requests.keys() > {"r1", "r3"}
    made.on_request_completed(identity("a"), "r0")  # the one that is gone
    assert "r0" not in made._requests


def test_replicas_join_and_leave() -> None:
    asyncio.run(check_changes())


async def check_loads() -> None:
    idle = {"replica": "a", "waiting": 0, "running": 0, "prefill": 0, "pages": 9}
    a, b = Replica("a"), Replica("b")
    made = router(a, b, policy="least_loaded")
    a.routing_stats = {"number": 1, **idle, "running": 9}
    b.routing_stats = {"number": 1, **idle, "replica": "b"}
    made.update_replicas([a, b])
    each = [await choose(made, pending(f"r{i}", text(i))) for i in range(8)]
    assert each == ["b"] * 8
    made.update_replicas([a, b])  # the same reports: b has got these since
    assert await choose(made, pending("r8", text(8))) == "b"
    assert await choose(made, pending("r9", text(9))) == "a"
    b.routing_stats = {"number": 2, **idle, "replica": "b"}
    made.update_replicas([a, b])
    assert await choose(made, pending("r10", text(10))) == "b"


def test_loads_that_replicas_report_count() -> None:
    asyncio.run(check_loads())


async def check_elsewhere() -> None:
    a, b = Replica("a"), Replica("b")
    made = router(a, b)
    assert await choose(made, pending("r0", text(0))) == "a"
    request = pending("r1", text(0))
    ranks = await made.choose_replicas([a, b], request)
    assert ranks == [[a], [b]]  # b is for when a is full
    made.on_request_routed(request, b.replica_id, None)
    assert live(made) == {"a": 1, "b": 1}
    made.on_request_completed(a.replica_id, "r1")  # that a has refused
    assert live(made) == {"a": 1, "b": 1}
    assert await choose(made, pending("r2", text(0), home="b")) == "b"
    given_up = pending("r3", text(3))
    await made.choose_replicas([a, b], given_up)
    given_up.future.cancel()
    await asyncio.sleep(0)
    assert live(made) == {"a": 1, "b": 2}


def test_requests_that_go_elsewhere_or_nowhere() -> None:
    asyncio.run(check_elsewhere())


async def check_others() -> None:
    a = Replica("a")
    made = router(a)
    calls: tuple[list[Any], ...] = (
        [],
        ["text"],
        [{"path": 1}, b"{"],
        [{"headers": 1}, b"{}"],
    )
    for number, args in enumerate(calls):
        name = f"r{number}"
        meta = RequestMetadata(request_id=name, internal_request_id=name)
        call = PendingRequest(args=args, kwargs={}, metadata=meta)
        assert await made.choose_replicas([a], call) == [[a], []]
    assert await made.choose_replicas([a], None) == [[a]]
    assert await router().choose_replicas([], pending("r1", "")) == [[]]


def test_calls_that_are_no_requests_are_routed_too() -> None:
    asyncio.run(check_others())
