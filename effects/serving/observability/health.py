"""Whether requests are served: healthy only while steps make progress, and ready only
while new requests are taken, too.
"""

from typing import Final

import minfer
from minfer.effects.live.client import ReplicaState
from minfer.effects.serving.client_errors import BROKEN, SHUTTING_DOWN
from minfer.effects.serving.server_state import ServerState

FAILING: Final = 8  # steps that fail in a row: no request makes progress


class Health:
    """The health of a backend; unhealthy after `stall` seconds without a step."""

    def __init__(self, state: ServerState, stall: float) -> None:
        self._state = state
        self._stall = stall

    def illness(self) -> str:
        """What is wrong, or an empty string."""
        engine = self._state.llm.client.snapshot()
        if self._state.closing:
            return SHUTTING_DOWN
        if engine.dead:
            return BROKEN  # an exception's text is not for clients
        if engine.stalled > self._stall:
            return f"requests wait, and no step for {engine.stalled:.0f} s"
        if engine.failing >= FAILING:
            return f"the last {engine.failing} steps failed"
        return ""

    def replicas(self) -> dict[str, object]:
        """The states of several engines, and how many are ready; nothing of one."""
        each = self._state.llm.client.snapshot().replicas
        if not each:
            return {}
        ready = sum(not one.unready for one in each)
        return {
            "ready": f"{ready} of {len(each)} replicas",
            "replicas": [_replica(one) for one in each],
        }

    def figures(self) -> dict[str, object]:
        """What `minfer status` shows: sums, and each engine, even if there is one."""
        client = self._state.llm.client
        now = client.snapshot()
        alone = ReplicaState(
            name="0",
            machine=client.machine,
            unready=client.unready,
            running=now.running,
            waiting=now.waiting,
            blocks=now.blocks,
            blocks_free=now.blocks_free,
        )
        return {
            "version": minfer.__version__,
            "running": now.running,
            "waiting": now.waiting,
            **self.replicas(),
            "replicas": [_replica(one) for one in now.replicas or [alone]],
        }

    def unreadiness(self) -> str:
        """Why no new request should come now, or an empty string."""
        client = self._state.llm.client
        if why := client.unready:
            return why
        if client.snapshot().draining:
            return SHUTTING_DOWN
        return self.illness()


def _replica(one: ReplicaState) -> dict[str, object]:
    return {
        "replica": one.name,
        "role": one.role,
        "machine": one.machine,
        "status": one.unready or "ready",
        "running": one.running,
        "waiting": one.waiting,
        "kv_cache_usage": round(one.usage, 4),
    }
