"""Whether requests are served: ready only while steps make progress."""

from minfer.effects.serving.backend import Backend
from minfer.effects.serving.errors import SHUTTING_DOWN
from minfer.effects.serving.metrics import Metrics


class Health:
    """The health of a backend. After `stall` seconds without a step it is ill."""

    def __init__(self, backend: Backend, metrics: Metrics, stall: float) -> None:
        self._backend = backend
        self._metrics = metrics
        self._stall = stall

    def illness(self) -> str:
        """What is wrong, or nothing."""
        worker = self._backend.llm.worker
        now = worker.driver.clock()
        arrivals = [job.arrived for job in list(worker.jobs.values())]
        still = now - max(self._metrics.moved, min(arrivals, default=now))
        if self._backend.closing:
            return SHUTTING_DOWN
        if worker.dead is not None:
            return f"the engine broke: {worker.dead!r}"
        policy_waits = (worker.driver.wake or 0) > now
        if still > self._stall and not policy_waits:
            return f"requests wait, and no step for {still:.0f} s"
        return ""
