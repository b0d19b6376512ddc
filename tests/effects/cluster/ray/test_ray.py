"""`minfer serve --distributed ray` on a cluster of this machine, of which an engine, the
process that keeps the engines, and a node are lost under load: no request is.
`bench.ray_deaths` kills more of them, and more often.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from minfer import SamplingParams
from minfer.effects.live.llm import LLM
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError
from minfer.version import __version__
from tests.effects.cluster.ray.ray_nodes import RayNodes, ray_nodes
from tests.effects.serving.process_deaths import ENGINE, SOON, Load, Server, server
from tests.effects.serving.test_two_machines import BODIES, PROMPTS, TOKENS

pytest.importorskip("ray", reason="the extra ray is not installed")

OPTIONS: Final = (
    "--distributed=ray",
    "--dtype=float32",
    "--num-gpu-blocks-override=128",
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A cluster of one node."""
    with ray_nodes(1) as started:
        yield started


async def until(true: Callable[[], object], within: float = SOON) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.05)


async def until_ready(served: Server, count: int) -> None:
    expected = f"{count} of 2 replicas"
    await until(lambda: served.get("/health").json()["ready"] == expected)


def received(served: Server) -> float:
    """Blocks that engines have got from others."""
    text = served.get("/metrics").text
    match = re.search(r"^minfer_kv_received_blocks_total{.*} (.*)$", text, re.M)
    return float(match[1]) if match else 0.0


@pytest.mark.long
def test_no_request_is_lost_with_engines_keepers_and_nodes(nodes: RayNodes) -> None:
    node, load = nodes.join(), Load("", BODIES)

    async def run(served: Server) -> None:
        await served.until_ready()
        await until_ready(served, 2)
        replicas = served.get("/health").json()["replicas"]
        machine = f"{socket.gethostname()} ({node.node_ip_address})"
        assert [replica["machine"] for replica in replicas] == [machine] * 2
        async with load.clients(2):
            await load.flows(time.monotonic())
            await until(lambda: received(served) > 0)
            keeper = served.kill(ENGINE)
            os.kill(Random(0).choice(nodes.engines()), signal.SIGKILL)
            await served.successor(ENGINE, keeper)
            await until_ready(served, 1)
            await load.flows(time.monotonic())
            await until_ready(served, 2)
            nodes.remove(node)
            await until_ready(served, 1)
            await load.flows(time.monotonic())
            nodes.remove(nodes.join())  # one that leaves before anything runs there
            nodes.join()
            await until_ready(served, 2)

    with server(*OPTIONS, "--prefill=1", "--decode=1") as served:
        load.url = served.url
        served.drain()
        asyncio.run(run(served))
        served.process.send_signal(signal.SIGINT)  # its actors end with it
        served.process.wait(SOON)
    assert not nodes.engines()
    assert load.lost() == []
    llm = LLM(dtype="float32", device="cpu", num_gpu_blocks_override=128)
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    right = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    assert {(which, answer.text[0]) for which, answer in load.ended} == set(
        enumerate(right)
    )


@pytest.mark.long
def test_bad_nodes_are_named_at_the_start(nodes: RayNodes, tmp_path: Path) -> None:
    from minfer.effects.cluster.ray.ray_cluster import alive_nodes as found
    from minfer.effects.cluster.ray.ray_cluster import check_nodes

    old = tmp_path / "old" / "minfer"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "version.py").write_text("__version__ = '0.0.7'")
    old_node = nodes.join(env_vars={"PYTHONPATH": str(old.parent)})
    try:
        failed = serve_in_vain(tmp_path)
        assert f"{old_node.node_id[:8]}): it has minfer 0.0.7" in failed
        assert failed.count("node ") == 1
        with pytest.raises(ConfigError, match="each replica needs 1 GPU of one") as error:
            check_nodes(EngineArgs(device="cuda"), found())
        assert str(error.value).count(" has 0") == len(found())
    finally:
        nodes.remove(old_node)


@pytest.mark.long
def test_an_engine_without_a_keeper_ends(nodes: RayNodes) -> None:
    import ray

    place, ask = actor_of("test 0", keeper_timeout=2.0)

    async def run() -> None:
        end = time.monotonic() + 4.0
        while time.monotonic() < end or not nodes.engines():
            assert (await ask()).code is None
            await asyncio.sleep(0.1)
        await until(lambda: not (place.is_there or nodes.engines()))

    asyncio.run(run())
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(ask())


@pytest.mark.long
def test_an_engine_that_hangs_is_killed_and_one_that_cannot_start_says_why(
    nodes: RayNodes,
) -> None:
    import ray

    hung, ask = actor_of("test 1")

    async def run() -> None:
        async with asyncio.timeout(SOON):
            while (await ask()).blocks is None:
                await asyncio.sleep(0.1)
            (engine,) = nodes.engines()
            os.kill(engine, signal.SIGSTOP)
            while (state := await ask()).code is None:
                await asyncio.sleep(0.1)
        assert state.code == -signal.SIGKILL
        assert "has not answered for too long" in state.why

    asyncio.run(run())
    ray.kill(hung.actor())

    wrong, ask_wrong = actor_of("test 2", model="/nowhere/model")

    async def fail() -> None:
        async with asyncio.timeout(SOON):
            while (state := await ask_wrong()).code is None:
                await asyncio.sleep(0.1)
        assert state.code == 2
        assert "/nowhere/model" in state.why

    asyncio.run(fail())
    ray.kill(wrong.actor())


def actor_of(
    name: str, *, model: str | None = None, keeper_timeout: float = 30.0
) -> tuple[Any, Callable[[], Any]]:
    """The place of an engine's actor, and a call that asks it for the engine's state."""
    from minfer.effects.cluster.ray.engine_plan import EnginePlan
    from minfer.effects.cluster.ray.ray_engine import EnginePlace

    args = EngineArgs(model=model, dtype="float32", num_gpu_blocks_override=128)
    plan = EnginePlan(
        number=0,
        replicas=1,
        api_servers=1,
        args=args,
        secret=bytes(32),
        keeper_timeout=keeper_timeout,
    )
    place = EnginePlace(name, {"CPU": 1})
    actor = place.actor()
    return place, lambda: actor.keep.remote(__version__, plan)


@pytest.mark.long
def test_a_cluster_where_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from minfer.effects.cluster.ray import ray_cluster
    from minfer.effects.cluster.ray.ray_cluster import connected

    private = "_last_address"  # is not asked where RAY_ADDRESS says it
    last_address = ray_cluster._last_address
    monkeypatch.setattr(ray_cluster, private, lambda: pytest.fail("it is asked"))
    for address, reason in (
        ("127.0.0.1:9", "refused"),
        ("ray://127.0.0.1:9", "refused"),
        ("[::1]:9", "refused|Cannot assign|not supported"),
        ("http://127.0.0.1:9", "HTTP address"),  # of its dashboard, as for `ray job`
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        pattern = f"cluster {re.escape(address)} cannot be used: .*({reason})"
        with pytest.raises(ConfigError, match=pattern), connected():
            raise AssertionError
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray_cluster, private, last_address)
    function = (
        "ray._private.utils.read_ray_address"  # of the cluster that was started last
    )
    monkeypatch.setattr(function, lambda *_: "127.0.0.1:9")
    pattern = "of this machine cannot be used: .*refused"
    with pytest.raises(ConfigError, match=pattern), connected():
        raise AssertionError


def serve_in_vain(folder: Path) -> str:
    """What a server says that cannot start, in a folder: Ray's workers import from it."""
    completed = subprocess.run(
        [sys.executable, "-m", "minfer", "serve", "--port=0", *OPTIONS],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
        cwd=folder,
    )
    assert completed.returncode == 2, completed.stderr
    return completed.stderr.splitlines()[-1]
