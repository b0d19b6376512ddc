"""Whether requests are served: healthy only while steps make progress, and ready only
while new requests are taken, too.
"""

from typing import Final

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
            "replicas": [
                {
                    "replica": one.name,
                    "status": one.unready or "ready",
                    "running": one.running,
                    "waiting": one.waiting,
                }
                for one in each
            ],
        }

    def unreadiness(self) -> str:
        """Why no new request should come now, or an empty string."""
        client = self._state.llm.client
        if why := client.unready:
            return why
        if client.snapshot().draining:
            return SHUTTING_DOWN
        return self.illness()
