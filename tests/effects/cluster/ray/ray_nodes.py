"""A cluster of Ray's on this machine, whose nodes join, leave and are killed."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

from attrs import define

from tests.effects.serving.process_deaths import processes

MEMORY: Final = 80 * 2**20  # bytes of a node's object store: nothing is in it
# A node that is gone is noticed within seconds; by default it takes half a minute.
QUICK: Final = {"health_check_period_ms": 500, "health_check_failure_threshold": 6}
USUAL: Final = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
ENVIRONMENT: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@define(eq=False)
class RayNodes:
    """A cluster, as `ray.cluster_utils` makes one on a single machine."""

    cluster: Any

    def join(self, **settings: Any) -> Any:
        """A node that has room for one engine; it has joined."""
        return self.cluster.add_node(**{**USUAL, **settings})

    def remove(self, node: Any, *, kill: bool = True) -> None:
        """Kill a node's processes, or end them as `ray stop` does."""
        self.cluster.remove_node(node, allow_graceful=not kill)

    def drain(self, node: Any) -> None:
        """Tell the cluster that a node is about to leave."""
        ray = Path(sys.executable).with_name("ray")
        asked = ["--address", self.cluster.address, "--node-id", node.node_id]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        limit = ["--deadline-remaining-seconds", "600"]
        subprocess.run(
            [ray, "drain-node", *asked, *reason, *limit], check=True, capture_output=True
        )

    def others(self) -> list[Any]:
        """The nodes but the first one."""
        return list(self.cluster.worker_nodes)

    def engines(self) -> list[int]:
        """The processes of engines on these nodes."""
        running, child = processes(), b"minfer.effects.cluster.ray.engine_child"
        nodes = [self.cluster.head_node, *self.cluster.worker_nodes]
        raylets = {node.all_processes["raylet"][0].process.pid for node in nodes}
        actors = {i for i, process in running.items() if process.parent in raylets}
        children = [i for i, process in running.items() if process.parent in actors]
        return sorted(i for i in children if child in _said(i))

    def kill_actor(self, rng: Random) -> None:
        """Kill one of the engines' actors, which Ray restarts."""
        import ray

        actors = ray.util.list_named_actors(all_namespaces=True)
        name = rng.choice(sorted(actor["name"] for actor in actors))
        ray.kill(ray.get_actor(name, namespace="minfer"), no_restart=False)


@contextlib.contextmanager
def ray_nodes(count: int, *, hooks: bool = True) -> Iterator[RayNodes]:
    """A cluster of so many nodes, to which this process and servers connect; without
    hooks for its end, nodes can join in any thread.
    """
    import ray
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    head = {**USUAL, "_system_config": QUICK}
    cluster = Cluster(True, head_node_args=head, shutdown_at_exit=hooks)
    try:
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, namespace="minfer", log_to_driver=False)
        nodes = RayNodes(cluster)
        for _ in range(count - 1):
            nodes.join()
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _said(process: int) -> list[bytes]:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return []
