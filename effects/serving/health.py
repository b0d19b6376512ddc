"""Whether requests are served: ready only while steps make progress."""

from minfer.effects.serving.backend import Backend
from minfer.effects.serving.errors import SHUTTING_DOWN


class Health:
    """The health of a backend. After `stall` seconds without a step it is ill."""

    def __init__(self, backend: Backend, stall: float) -> None:
        self._backend = backend
        self._stall = stall

    def illness(self) -> str:
        """What is wrong, or nothing."""
        engine = self._backend.llm.client.snapshot()
        if self._backend.closing:
            return SHUTTING_DOWN
        if engine.dead:
            return f"the engine broke: {engine.dead}"
        if engine.stalled > self._stall:
            return f"requests wait, and no step for {engine.stalled:.0f} s"
        return ""
