"""What all answers of a server share: the model, its bounds, and whether the server is
stopping.
"""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.client import Died, Message
from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.access.retry_after import Pace
from minfer.effects.serving.access.server_bounds import Bounds
from minfer.effects.serving.errors import (
    INTERNAL,
    OVERLOADED,
    SHUTTING_DOWN,
    ApiError,
    told_of,
)
from minfer.effects.serving.protocol import GenerationRequest
from minfer.effects.serving.request_parsing.limits import Limits

# Retry-After of a full queue: the time in which one in so many of its places gets free.
_MOVED: Final = 4
_engine_log: Final = logging.getLogger("minfer.engine")


class Backend:
    """A served model; `pool` is where long prompts are prepared."""

    log: Final = logging.getLogger("uvicorn.error")

    def __init__(
        self, llm: AsyncLLM, limits: Limits | None = None, bounds: Bounds | None = None
    ) -> None:
        self.llm = llm
        self.limits = limits or Limits.of(llm)
        self.bounds = bounds or Bounds()
        self.pace = Pace(llm.client.clock)
        llm.front.on_end.append(self.pace.ended)
        llm.client.listen(self._hear)
        self.pool = ThreadPoolExecutor(2, "minfer-edge")
        self.closing = False

    def _hear(self, message: Message) -> None:
        """Log why the engine broke: errors refer clients to the log."""
        cause = self.llm.client.dead
        if isinstance(message, Died) and not isinstance(cause, EngineDeadError):
            _engine_log.error("%s", message.why, exc_info=cause)

    def window(self, n: int) -> int:
        """How many prompts of a request run at once, of `n` samples each."""
        return self.limits.window(n)

    def time_for(self, request: GenerationRequest) -> float | None:
        """Seconds that an answer may take; None: any number."""
        most = self.bounds.request_timeout or math.inf
        own = request.urgency.deadline if self.bounds.end_late else math.inf
        least = min(most, own)
        return None if math.isinf(least) else least

    def told(self, error: Exception, field: str, name: str) -> ApiError:
        """The client's error for an error in the request `name`; the log has more."""
        told = told_of(error, field)
        if told.status == INTERNAL and not isinstance(error, ApiError):
            self.log.error("%s failed", name, exc_info=error)
        # Its traceback holds the body, in a cycle that only the garbage collector frees.
        told.__traceback__ = told.__context__ = None
        if told.code == OVERLOADED:
            places = math.ceil(self.limits.line / _MOVED)
            told.retry_after = self.pace.seconds(places)
        return told

    def close(self) -> None:
        """End all answers; clients are notified that the server stops."""
        self.closing = True
        self.llm.front.abandon(EngineDeadError(SHUTTING_DOWN))
