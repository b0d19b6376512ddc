"""Clients that send a request again, with the same id, when their connection breaks.

That is what clients do whose API server or router was killed: a connection cannot be
moved to another process. A request is lost if all its retries fail.
"""

import asyncio
import time
from itertools import pairwise
from typing import Final

from attrs import define

from tests.effects.serving.process_deaths import ClientAnswer, Load, ask

RETRIES: Final = 50  # of a client, until another process is ready
RETRY_SECONDS: Final = 0.2  # between two of these


@define(eq=False)
class RetriedLoad(Load):
    """Clients that retry up to `tries` times, and rest between two requests."""

    rest: float = 0.0  # seconds between two requests of a client
    tries: int = 1
    retried: int = 0  # requests that were sent more than once
    longest: float = 0.0  # seconds that a client waited for the next event
    _sent: int = 0

    async def once(self, number: int) -> ClientAnswer:
        """Send one of the bodies, until it is answered."""
        which = number % len(self.bodies)
        self._sent += 1
        request_id, times = f"request-{self._sent}", [time.monotonic()]
        for attempt in range(self.tries):
            answer = ClientAnswer()
            self.live.append(answer)
            await ask(self.url, self.bodies[which], answer, request_id)
            self.live.remove(answer)
            times += answer.times
            if answer.done:
                break
            self.retried += attempt == 0 and self.tries > 1
            await asyncio.sleep(RETRY_SECONDS)
        self.longest = max([self.longest, *(b - a for a, b in pairwise(times))])
        self.ended.append((which, answer))
        await asyncio.sleep(self.rest)
        return answer
