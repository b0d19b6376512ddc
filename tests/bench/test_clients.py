"""The client of the benchmarks: its pace, its latencies and its failures."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean, pvariance
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from attrs import define, evolve, field

from bench.clients import (
    FIRST_ID,
    LoadPlan,
    RequestTimes,
    due_times,
    figures_of,
    put,
    send_all,
)
from tests.effects.served import Serving, serving

TOKENS = 4
PAUSE = 0.05  # seconds before each event


@define
class Stub:
    """A server that sends an event after each pause."""

    last: list[dict[str, Any]] = field(
        factory=lambda: [{"usage": {"completion_tokens": TOKENS}, "choices": []}]
    )
    status: int = 200
    bodies: list[dict[str, Any]] = field(factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(TOKENS):
            await asyncio.sleep(PAUSE)
            await self.send(response, {"usage": None, "choices": [{"text": "a"}]})
        for event in self.last:
            await self.send(response, event)
        self.in_flight -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


def plan_of(count: int, clients: int, **options: Any) -> LoadPlan:
    return LoadPlan("", 8, TOKENS, 100, count, clients, **options)


def sent(stub: Stub, plan: LoadPlan) -> dict[int, RequestTimes]:
    """Put a load on a stub, from this process."""

    async def run() -> dict[int, RequestTimes]:
        app = web.Application()
        app.router.add_post("/v1/completions", stub.answer)
        async with TestServer(app) as server:
            served_plan = evolve(plan, url=str(server.make_url("")).rstrip("/"))
            bodies = [served_plan.body(number) for number in range(served_plan.count)]
            take = itertools.count().__next__
            return await send_all(served_plan, bodies, served_plan.clients, take)

    return asyncio.run(run())


def test_events_are_timed_when_they_come() -> None:
    (times,) = sent(Stub(), plan_of(1, 1)).values()
    assert len(times.events) == times.output_tokens == TOKENS
    assert [*times.events] == sorted({*times.events})
    for number, event in enumerate(times.events, 1):
        assert event - times.sent >= 0.9 * PAUSE * number


def test_a_closed_loop_has_so_many_requests_in_flight() -> None:
    stub = Stub()
    times = sent(stub, plan_of(7, 3))
    assert sorted(times) == [*range(7)]
    assert stub.most_in_flight == 3
    assert len({tuple(body["prompt"]) for body in stub.bodies}) == 7


def test_an_open_loop_sends_when_due_whether_or_not_others_are_answered() -> None:
    due_seconds = (0.0, 0.06, 0.12)
    times = sent(Stub(), plan_of(3, 3, due=due_seconds))
    assert all(
        times[number].sent >= seconds for number, seconds in enumerate(due_seconds)
    )
    assert times[2].sent < times[0].events[-1]


@pytest.mark.parametrize(
    ("stub", "message"),
    [
        (Stub(status=503), "HTTP 503: no room"),
        (Stub(last=[]), f"ended without usage, after {TOKENS} events"),
        (Stub(last=[{"error": {"message": "broken"}}]), "error in a stream: .*broken"),
    ],
    ids=["status", "cut off", "error"],
)
def test_a_request_that_fails_ends_the_load(stub: Stub, message: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        sent(stub, plan_of(2, 2))
    assert caught.group_contains(RuntimeError, match=message)


def test_a_prompt_is_a_function_of_seed_and_number() -> None:
    plan = plan_of(2, 1)
    assert plan.body(1) == plan.body(1) != plan.body(0)
    assert plan.body(1) != evolve(plan, seed="1").body(1)
    prompt = json.loads(evolve(plan, prompt_tokens=2000).body(0))["prompt"]
    assert len(prompt) == 2000
    assert {*prompt} == {*range(FIRST_ID, 100)}


def test_due_times_are_those_of_a_poisson_process() -> None:
    times = due_times(20_001, 50.0, seed=1)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 50)
    assert pvariance(gaps) * 50**2 == pytest.approx(1, rel=0.1)
    assert due_times(9, 1.0, seed=1) != due_times(9, 1.0, seed=2)


def test_figures_of_requests_that_are_known() -> None:
    requests = [
        RequestTimes(start, (start + 0.5, start + 1.0, start + 1.5), 5)
        for start in range(8)
    ]
    figures = figures_of(requests)
    assert figures["duration"] == 8.5
    assert figures["total_output_tokens"] == 40
    assert figures["output_throughput"] == pytest.approx(40 / 8.5)
    for name, value in (("ttft", 500), ("tpot", 250), ("itl", 500)):
        assert figures[f"median_{name}_ms"] == pytest.approx(value)
        assert figures[f"p99_{name}_ms"] == pytest.approx(value)
    assert requests[0].meets({"ttft": 500, "tpot": 251})
    assert not requests[0].meets({"ttft": 501, "tpot": 249})


@pytest.fixture(scope="module")
def dry() -> Iterator[Serving]:
    with serving(executor="dry", num_gpu_blocks_override=64) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 9])
def test_processes_share_the_requests_and_the_clients(
    dry: Serving, processes: int
) -> None:
    plan = LoadPlan(dry.url, 32, 16, 2000, 60, 3, seed=str(processes))
    requests = put(plan, processes)
    assert len(requests) == 60
    assert [request.output_tokens for request in requests] == [16] * 60
    in_flight = [
        sum(earlier.sent <= request.sent < earlier.events[-1] for earlier in requests)
        for request in requests
    ]
    assert max(in_flight) <= plan.clients
