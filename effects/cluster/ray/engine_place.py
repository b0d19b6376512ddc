"""The actor of an engine in the cluster, by name. It is detached: it outlives the keeper
that created it, and the next keeper finds it.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from attrs import frozen
from ray.exceptions import RayError

from minfer.effects.cluster.ray.engine_actor import EngineActor
from minfer.effects.cluster.ray.ray_cluster import CPU, GPU


@frozen
class EnginePlace:
    """The name of an engine's actor, and the resources that it needs."""

    name: str
    needs: Mapping[str, float]  # of one node, by Ray's name of the resource

    @property
    def is_there(self) -> bool:
        """Whether an earlier keeper created the actor, and it has not ended for good."""
        with suppress(ValueError):
            ray.get_actor(self.name)
            return True
        return False

    def actor(self) -> Any:
        """The actor, which is created if there is none. Returns at once: Ray starts a new
        actor when a node has the resources.
        """
        made = ray.remote(EngineActor).options(
            name=self.name,
            num_cpus=self.needs.get(CPU, 0),
            num_gpus=self.needs.get(GPU, 0),
            max_restarts=-1,
            lifetime="detached",
            get_if_exists=True,
        )
        return made.remote()


def restart(actor: Any) -> None:
    """Have Ray restart an actor, on any node that has room and is not being drained."""
    with suppress(RayError):
        ray.kill(actor, no_restart=False)
