"""An engine's actor in the cluster, by its name: it outlives the process that made it, so
that the next one finds it.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from attrs import frozen
from ray.exceptions import RayError

from minfer.effects.serving.distributed.engine_actor import EngineActor
from minfer.effects.serving.distributed.ray_cluster import CPU, GPU


@frozen
class EnginePlace:
    """The actor of an engine, which is there or is to be made."""

    name: str
    needs: Mapping[str, float]  # of one node

    @property
    def is_there(self) -> bool:
        """Whether it was made before, and has not ended for good."""
        with suppress(ValueError):
            ray.get_actor(self.name)
            return True
        return False

    def actor(self) -> Any:
        """The actor; a new one waits until a node has what it needs."""
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
    """Have Ray restart an actor, on any node that has room and is to stay."""
    with suppress(RayError):
        ray.kill(actor, no_restart=False)
