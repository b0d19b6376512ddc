"""`minfer serve --distributed ray` on a cluster of this machine, of which actors, their
processes and whole nodes are lost under load: no request is.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from attrs import define

from tests.circles import claimed, long
from tests.effects.serving.process_deaths import (
    SOON,
    Load,
    Server,
    bodies,
    processes,
    server,
)

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

MEMORY: Final = 80 * 2**20  # bytes of a node's object store: nothing is in it
# A node that is gone is noticed within seconds; by default it takes half a minute.
QUICK: Final = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
JOINED: Final = 5.0  # seconds in which a node that has joined takes load
OPTIONS: Final = (
    "--distributed=ray",
    "--dtype=float32",
    "--num-gpu-blocks-override=128",
    "--routing=round_robin",
)


@define(eq=False)
class RayNodes:
    """A cluster, as `ray.cluster_utils` makes one on a single machine."""

    cluster: Any

    def join(self, **more: Any) -> Any:
        """A node that has room for one replica."""
        usual = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
        return self.cluster.add_node(**{**usual, **more})

    def remove(self, node: Any) -> None:
        """Kill a node's processes."""
        self.cluster.remove_node(node, allow_graceful=False)

    def actors(self) -> list[Any]:
        found = ray.util.list_named_actors(all_namespaces=True)
        names = sorted(one["name"] for one in found)
        return [ray.get_actor(name, namespace="minfer") for name in names]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A cluster of two nodes, of which the second one has been added."""
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_worker_niceness", "0")
    head: dict[str, Any] = {
        "num_cpus": 1,
        "object_store_memory": MEMORY,
        "include_dashboard": False,
    }
    head["_system_config"] = QUICK
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        patch.setenv("RAY_ADDRESS", cluster.address)
        ray.init(address=cluster.address, namespace="minfer", log_to_driver=False)
        yield RayNodes(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()


def engines() -> dict[int, int]:
    """Processes of engines on this machine, and those of their actors."""
    every = processes()
    actors = {
        i for i in every if b"ray::EngineActor" in Path(f"/proc/{i}/cmdline").read_bytes()
    }
    return {
        i: one.parent
        for i, one in every.items()
        if one.parent in actors
        and b"engine_child" in Path(f"/proc/{i}/cmdline").read_bytes()
    }


async def until(true: Callable[[], object], within: float = SOON) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.05)


def ready(served: Server) -> str:
    return str(served.get("/health").json()["ready"])


async def until_ready(served: Server, said: str) -> None:
    await until(lambda: ready(served) == said)


def running(served: Server) -> dict[str, int]:
    """Requests that run, by replica."""
    each = served.get("/health").json()["replicas"]
    return {one["replica"]: one["running"] for one in each}


@pytest.mark.parametrize(("kills", "tokens"), [*long([(1, 100)]), *claimed([(20, 200)])])
def test_no_request_is_lost_with_actors_and_nodes(
    nodes: RayNodes, kills: int, tokens: int
) -> None:
    rng = Random(kills)
    asked = bodies(1, tokens)
    with server("--dtype=float32", "--num-gpu-blocks-override=128") as alone:
        alone.drain()
        one = Load(alone.url, asked)
        asyncio.run(one.learn())
    node = nodes.join()

    async def run(served: Server) -> Load:
        nonlocal node
        await served.until_ready()
        await until_ready(served, "2 of 2 replicas")
        load = Load(served.url, asked, right=one.right)  # one engine's answers
        async with load.clients(2):
            for _ in range(kills):
                await load.flows(time.monotonic())
                await asyncio.sleep(rng.uniform(0, 0.3))
                ray.kill(rng.choice(nodes.actors()), no_restart=False)
                await until_ready(served, "1 of 2 replicas")
                await until_ready(served, "2 of 2 replicas")
                for which in range(2):  # an engine's process, and an actor's
                    process = rng.choice([*engines().items()])[which]
                    os.kill(process, signal.SIGKILL)
                    await until_ready(served, "1 of 2 replicas")
                    await until_ready(served, "2 of 2 replicas")
                nodes.remove(node)
                await until_ready(served, "1 of 2 replicas")
                await load.flows(time.monotonic())
                node = nodes.join()
                await until_ready(served, "2 of 2 replicas")
                await until(lambda: all(running(served).values()), JOINED)
        return load

    with server(*OPTIONS, "--replicas=2") as served:
        served.drain()
        load = asyncio.run(run(served))
    assert load.lost() == []
    assert load.different() == []
    assert load.flawed() == []
    assert len(load.ended) >= len(asked)
    nodes.remove(node)


@pytest.mark.long
def test_bad_nodes_are_named_at_the_start(nodes: RayNodes, tmp_path: Path) -> None:
    old = tmp_path / "old" / "minfer"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "version.py").write_text("__version__ = '0.0.7'")
    other = nodes.join(env_vars={"PYTHONPATH": str(old.parent)})
    try:
        failed = serve_in_vain(tmp_path, "--replicas=2")
        assert f"{other.node_id[:8]}): it has minfer 0.0.7" in failed
        assert failed.count("node ") == 1
        failed = serve_in_vain(tmp_path, "--device=cuda")
        assert "each replica needs 1 GPU of one node" in failed
        assert len(re.findall(r" has 0", failed)) == 2
    finally:
        nodes.remove(other)


def serve_in_vain(folder: Path, *options: str) -> str:
    """What a server says that cannot start, in a folder: Ray's workers import from it."""
    done = subprocess.run(
        [sys.executable, "-m", "minfer", "serve", "--port=0", *OPTIONS, *options],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]
