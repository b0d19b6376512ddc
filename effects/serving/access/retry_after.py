"""How fast the waiting queue moves: the `Retry-After` of a refusal when it is full."""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from attrs import field, frozen

from minfer.effects.text.output_processor import OutputProcessor

MAX_REMEMBERED_ENDS: Final = 256  # requests that ended last
WINDOW_SECONDS: Final = 60.0  # after which an end is no longer counted
MIN_RETRY_SECONDS: Final = 1
MAX_RETRY_SECONDS: Final = 60


@frozen
class _EndedRequest:
    time: float  # seconds
    samples: int


@frozen
class QueuePace:
    """The last samples that ended, and when. `note_end` may be called in any thread."""

    clock: Callable[[], float]  # seconds
    _ends: deque[_EndedRequest] = field(
        factory=lambda: deque(maxlen=MAX_REMEMBERED_ENDS), init=False
    )

    def note_end(self, job: OutputProcessor) -> None:
        """Note the end of a request."""
        self._ends.append(_EndedRequest(self.clock(), job.request.n))

    def seconds(self, samples: int) -> int:
        """The estimated time until `samples` samples have ended, in seconds, bounded."""
        now = self.clock()
        recent_ends = [
            end for end in tuple(self._ends) if now - end.time <= WINDOW_SECONDS
        ]
        if not recent_ends:
            return MIN_RETRY_SECONDS
        elapsed = max(now - recent_ends[0].time, 1e-3)
        ended_samples = sum(end.samples for end in recent_ends)
        return min(
            MAX_RETRY_SECONDS,
            max(MIN_RETRY_SECONDS, math.ceil(samples * elapsed / ended_samples)),
        )
