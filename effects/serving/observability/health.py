"""Whether requests are served: healthy only while steps make progress, and ready only
while new requests are taken, too.
"""

from typing import Final

import minfer
from minfer.effects.live.client import ReplicaState, Snapshot
from minfer.effects.serving.client_errors import ENGINE_STOPPED, SHUTTING_DOWN
from minfer.effects.serving.server_state import ServerState

MIN_FAILED_STEPS: Final = 8  # steps that fail in a row: no request makes progress


class Health:
    """The health of a backend; unhealthy after `stall` seconds without a step."""

    def __init__(self, state: ServerState, stall: float) -> None:
        self._state = state
        self._stall = stall

    def health_error(self) -> str:
        """The reason why the server is not healthy, or an empty string."""
        engine = self._state.llm.client.snapshot()
        if self._state.closing:
            return SHUTTING_DOWN
        if engine.dead:
            return ENGINE_STOPPED  # an exception's text is not for clients
        if engine.stalled > self._stall:
            return f"requests wait, and no step for {engine.stalled:.0f} s"
        if engine.failing >= MIN_FAILED_STEPS:
            return f"the last {engine.failing} steps failed"
        return ""

    def replicas(self) -> dict[str, object]:
        """The states of several engines, and how many are ready; nothing of one."""
        states = self._state.llm.client.snapshot().replicas
        if not states:
            return {}
        ready = sum(not state.unready for state in states)
        return {
            "ready": f"{ready} of {len(states)} replicas",
            "replicas": [_replica(state) for state in states],
        }

    def figures(self) -> dict[str, object]:
        """The figures of `minfer status`: sums, and each engine, even if there is one."""
        client = self._state.llm.client
        snapshot = client.snapshot()
        own_state = ReplicaState(
            name="0",
            machine=client.machine,
            unready=client.unready,
            running=snapshot.running,
            waiting=snapshot.waiting,
            blocks=snapshot.blocks,
            blocks_free=snapshot.blocks_free,
        )
        return {
            "version": minfer.__version__,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            **self._adapters(snapshot),
            **self.replicas(),
            "replicas": [_replica(state) for state in snapshot.replicas or [own_state]],
        }

    def _adapters(self, snapshot: Snapshot) -> dict[str, object]:
        """How many adapters there are; nothing if there are never any. Names are not for
        everyone.
        """
        adapters = self._state.llm.adapters
        if adapters is None:
            return {}
        return {
            "adapters": {
                "named": len(adapters.registry.entries()),
                "running": len(snapshot.running_adapters),
                "waiting": len(snapshot.waiting_adapters),
                "slots": self._state.llm.setup.config.adapter_slots,
            }
        }

    def unready_reason(self) -> str:
        """The reason why no request should be sent now, or an empty string."""
        client = self._state.llm.client
        if reason := client.unready:
            return reason
        if client.snapshot().draining:
            return SHUTTING_DOWN
        return self.health_error()


def _replica(state: ReplicaState) -> dict[str, object]:
    return {
        "replica": state.name,
        "role": state.role,
        "machine": state.machine,
        "status": state.unready or "ready",
        "running": state.running,
        "waiting": state.waiting,
        "kv_cache_usage": round(state.usage, 4),
    }
