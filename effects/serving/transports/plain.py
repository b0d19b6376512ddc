"""An answer in one piece: the body of a response."""

from collections.abc import Iterable

from minfer.effects.serving.transports.http import HttpTransport
from minfer.effects.serving.transports.transport import Event


class PlainBody(HttpTransport):
    """The body is what the answer's event says; there is one."""

    content_type = b"application/json"

    @staticmethod
    def frame(events: Iterable[Event]) -> str:
        """What the events say, and nothing around it."""
        return "".join([event.data for event in events])
