"""How fast the waiting queue moves: the `Retry-After` of a refusal when it is full."""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from attrs import field, frozen

from minfer.effects.text.output_processor import OutputProcessor

REMEMBERED: Final = 256  # requests that ended last
WINDOW: Final = 60.0  # seconds after which an end is no longer counted
SOONEST: Final = 1  # seconds
LATEST: Final = 60  # seconds


@frozen
class _EndedRequest:
    time: float  # seconds
    samples: int


@frozen
class QueuePace:
    """The last samples that ended, and when. `note_end` may be called in any thread."""

    clock: Callable[[], float]  # seconds
    _ends: deque[_EndedRequest] = field(
        factory=lambda: deque(maxlen=REMEMBERED), init=False
    )

    def note_end(self, job: OutputProcessor) -> None:
        """Note the end of a request."""
        self._ends.append(_EndedRequest(self.clock(), job.request.n))

    def seconds(self, samples: int) -> int:
        """The estimated time until `samples` samples have ended, in seconds, bounded."""
        now = self.clock()
        recent_ends = [end for end in tuple(self._ends) if now - end.time <= WINDOW]
        if not recent_ends:
            return SOONEST
        elapsed = max(now - recent_ends[0].time, 1e-3)
        ended_samples = sum(end.samples for end in recent_ends)
        return min(LATEST, max(SOONEST, math.ceil(samples * elapsed / ended_samples)))
