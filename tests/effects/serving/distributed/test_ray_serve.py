"""Deployments of Ray Serve on a cluster of this machine: what their clients get, and
where their requests go.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from attrs import define

from minfer import LLM, SamplingParams
from minfer.effects.cli.ray_serve import build
from minfer.values.checks import ConfigError
from tests.circles import claimed, long
from tests.effects.serving.process_deaths import SOON, Load, bodies, processes

ray = pytest.importorskip("ray", reason="the extra ray-serve is not installed")
serve = pytest.importorskip("ray.serve", reason="the extra ray-serve is not installed")

MEMORY: Final = 80 * 2**20  # bytes of a node's object store: nothing is in it
SCALED: Final = 3 * SOON  # seconds for two engines more, where others keep the CPU busy
SMALL: Final = {"dtype": "float32", "num_gpu_blocks_override": 128, "preparers": 0}
PROMPT: Final = "def fibonacci(n):\n"
GREEDY: Final[dict[str, Any]] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
# One replica for each two requests at once, as soon as that shows.
SCALING: Final = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
    "metrics_interval_s": 0.25,
    "look_back_period_s": 1.0,
}


@define(eq=False)
class RayServe:
    """A cluster with Ray Serve."""

    url: str

    def run(self, name: str, **args: Any) -> "Served":
        """An application, below the path of its name."""
        app = build({**SMALL, **args})
        handle = serve.run(app, name=name, route_prefix=f"/{name}")
        return Served(name, f"{self.url}/{name}", handle)


@define(eq=False)
class Served:
    """An application that serves a model."""

    name: str
    url: str
    handle: Any

    def engines(self) -> dict[str, int]:
        """How many replicas its engine has, by their states."""
        app = serve.status().applications[self.name]
        states = app.deployments["engine"].replica_states
        return {str(getattr(k, "value", k)): count for k, count in states.items()}

    def processes(self) -> list[int]:
        """The processes of its engine's replicas."""
        title = f"ray::ServeReplica:{self.name}:engine".encode()
        every = {i: Path(f"/proc/{i}/cmdline") for i in processes()}
        return [i for i, path in every.items() if title in path.read_bytes()]

    async def until_engines(self, count: int) -> None:
        """Wait until it has so many, and no others that start or stop."""
        async with asyncio.timeout(SCALED):
            while await asyncio.to_thread(self.engines) != {"RUNNING": count}:
                await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayServe]:
    patch = pytest.MonkeyPatch()
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_worker_niceness", "0"),
        ("OMP_NUM_THREADS", "1"),
    ):
        patch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=MEMORY,
        include_dashboard=False,
        namespace="serve",
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield RayServe(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()


def alone() -> str:
    """The greedy text of one engine, in this process."""
    with LLM(dtype="float32", num_gpu_blocks_override=128) as llm:
        (done,) = llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=0))
    return done.outputs[0].text


# The variables that Ray wants in its place do not pass its check of the period above.
@pytest.mark.filterwarnings("ignore:The `metrics_interval_s`:DeprecationWarning")
@pytest.mark.parametrize("seconds", [*long([1.0]), *claimed([30.0])])
def test_it_scales_under_load_and_loses_no_request(
    cluster: RayServe, seconds: float
) -> None:
    served = cluster.run("scaled", autoscaling_config=SCALING)
    check_clients(served)
    load = Load(served.url, bodies(1, 60))

    async def run() -> None:
        await load.learn()
        for _ in range(1 if seconds < SOON / 4 else 3):
            load.stopping = False
            async with load.clients(8):
                await served.until_engines(3)
                await asyncio.sleep(seconds)
            load.stopping = False
            async with load.clients(1):
                await served.until_engines(1)

    asyncio.run(run())
    assert load.lost() == []
    assert load.different() == []
    assert len(load.ended) > len(load.bodies)
    serve.delete("scaled")


@pytest.mark.claimed
def test_a_replica_that_is_killed_is_replaced(cluster: RayServe) -> None:
    served = cluster.run("killed", num_replicas=2, health_check_period_s=0.5)
    load = Load(served.url, bodies(1, 60))
    clients = 4

    async def run() -> None:
        await load.learn()
        for number in range(1, 4):
            load.stopping = False
            async with load.clients(clients):
                await load.flows(time.monotonic())
                one, other = served.processes()
                os.kill(one, signal.SIGKILL)
                async with asyncio.timeout(SCALED):
                    while len({*served.processes()} - {one, other}) < 1:
                        await asyncio.sleep(0.2)
                await served.until_engines(2)
                # Some of those that were being answered there, and no others.
                assert len(load.lost()) <= number * clients
                before = len(load.lost())
                await load.flows(time.monotonic())
                await asyncio.sleep(1.0)
            assert len(load.lost()) == before

    asyncio.run(run())
    assert load.different() == []
    serve.delete("killed")


def check_clients(served: Served) -> None:
    """OpenAI's client and Ray Serve's get the text of one engine."""
    right = alone()
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    whole = client.completions.create(model="bundled", **GREEDY)
    assert whole.choices[0].text == right
    parts = client.completions.create(model="bundled", stream=True, **GREEDY)
    assert "".join(one.choices[0].text for one in parts) == right
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", **GREEDY)
    long_one = {**GREEDY, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="bundled", stream=True, **long_one) as left:
        name = next(left).id
    assert ends_of(served, name) == ["cancelled"]

    handle = served.handle
    answer = handle.ask.remote("/v1/completions", GREEDY).result()
    assert answer["choices"][0]["text"] == right
    stream = handle.options(stream=True).stream
    events = [*stream.remote("/v1/completions", GREEDY)]
    assert len(events) > 2
    assert "".join(one["choices"][0]["text"] for one in events) == right
    with pytest.raises(RuntimeError, match="400: max_tokens"):
        handle.ask.remote("/v1/completions", {**GREEDY, "max_tokens": "x"}).result()


def ends_of(served: Served, name: str) -> object:
    """Why a request has ended, which is about to."""
    for _ in range(100):
        answer = httpx.get(f"{served.url}/v1/requests/{name}", timeout=SOON)
        record = answer.raise_for_status().json()
        if record["state"] == "ended":
            break
        time.sleep(0.05)
    return record["prompts"][0]["finish_reasons"]


@pytest.mark.claimed
def test_turns_of_a_session_go_where_its_prefix_is(cluster: RayServe) -> None:
    # No model, which is not asked what is cached: replicas start sooner.
    two = {"dry_run": True, "num_replicas": 2, "num_gpu_blocks_override": 4096}
    ours = cluster.run("ours", **two)
    rays = cluster.run("rays", **two, routing="ray")
    cached = talk(ours, sessions=120, turns=3)
    assert all(cached)
    elsewhere = talk(rays, sessions=120, turns=3)
    assert not all(elsewhere)
    assert sum(cached) > sum(elsewhere)
    serve.delete("ours")
    serve.delete("rays")


def talk(served: Served, sessions: int, turns: int) -> list[int]:
    """Sessions that take turns, one after the other: the tokens that were cached at each
    turn but the first.
    """
    cached = []
    texts = [f"# {session}\n" + f"x{session} = 1\n" * 60 for session in range(sessions)]
    with httpx.Client(timeout=SOON) as client:
        for turn in range(turns):
            for session in range(sessions):
                texts[session] += f"y{turn} = {session}\n" * 10
                body = {"prompt": texts[session], "max_tokens": 1}
                answer = client.post(f"{served.url}/v1/completions", json=body)
                usage = answer.raise_for_status().json()["usage"]
                if turn:
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    return cached


@pytest.mark.long
def test_what_cannot_be_is_named_before_it_is_deployed(cluster: RayServe) -> None:
    del cluster
    with pytest.raises(ConfigError, match=r"node .*: .*no-such-model"):
        build({"model": "/no-such-model"})
    with pytest.raises(ConfigError, match=r"Ray Serve takes .*num_replicas"):
        build({**SMALL, "num_replicas": "few"})
    for name, value in (
        ("autoscaling_config", {"replicas": 2}),
        ("max_replicas_per_node", "few"),
        ("ray_actor_options", 2),
        ("ray_actor_options", {"num_cpus": "few"}),
        ("ray_actor_options", {"cpus": 2}),
    ):
        with pytest.raises(ConfigError, match=f"{name}|num_cpus"):
            build({**SMALL, name: value})
