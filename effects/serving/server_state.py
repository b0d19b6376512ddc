"""The state that all answers of a server share: the model, its bounds, and whether the
server is stopping.
"""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.client import EngineDied, EngineMessage
from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.access.retry_after import QueuePace
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.client_errors import (
    INTERNAL,
    OVERLOADED,
    SHUTTING_DOWN,
    ApiError,
    to_api_error,
)
from minfer.effects.serving.protocol import GenerationRequest
from minfer.effects.serving.request_parsing.limits import Limits

# Retry-After of a full queue: the time in which a quarter of its places gets free.
_FREED_DIVISOR: Final = 4
_engine_log: Final = logging.getLogger("minfer.engine")


class ServerState:
    """A served model; `pool` is where long prompts are prepared."""

    log: Final = logging.getLogger("uvicorn.error")

    def __init__(
        self,
        llm: AsyncLLM,
        limits: Limits | None = None,
        bounds: ServerBounds | None = None,
    ) -> None:
        self.llm = llm
        self.limits = limits or Limits.of(llm)
        self.bounds = bounds or ServerBounds()
        self.pace = QueuePace(llm.client.clock)
        llm.frontend.on_end.append(self.pace.note_end)
        llm.client.listen(self._log_death)
        self.pool = ThreadPoolExecutor(2, "minfer-edge")
        self.closing = False

    def _log_death(self, message: EngineMessage) -> None:
        """Log why the engine broke: errors refer clients to the log."""
        cause = self.llm.client.dead
        if isinstance(message, EngineDied) and not isinstance(cause, EngineDeadError):
            _engine_log.error("%s", message.reason, exc_info=cause)

    def max_running_prompts(self, n: int) -> int:
        """How many prompts of a request run at once, of `n` samples each."""
        return self.limits.max_running_prompts(n)

    def time_limit(self, request: GenerationRequest) -> float | None:
        """Seconds that an answer may take; None: any number."""
        server_limit = self.bounds.request_timeout or math.inf
        own_limit = (
            request.urgency.deadline if self.bounds.enforce_deadlines else math.inf
        )
        limit = min(server_limit, own_limit)
        return None if math.isinf(limit) else limit

    def api_error(self, error: Exception, field: str, name: str) -> ApiError:
        """The client's error for an error in the request `name`; the log has more."""
        api_error = to_api_error(error, field)
        if api_error.status == INTERNAL and not isinstance(error, ApiError):
            self.log.error("%s failed", name, exc_info=error)
        # Its traceback holds the body, in a cycle that only the garbage collector frees.
        api_error.__traceback__ = api_error.__context__ = None
        if api_error.code == OVERLOADED:
            places = math.ceil(self.limits.max_waiting / _FREED_DIVISOR)
            api_error.retry_after = self.pace.seconds(places)
        return api_error

    def close(self) -> None:
        """End all answers; clients are notified that the server stops."""
        self.closing = True
        self.llm.frontend.abandon(EngineDeadError(SHUTTING_DOWN))
