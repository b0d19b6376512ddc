"""An answer in one piece: the body of a response."""

from collections.abc import Iterable

from minfer.effects.serving.wire.http import HttpTransport
from minfer.effects.serving.wire.transport import Event


class PlainBody(HttpTransport):
    """A body with the data of the answer's only event."""

    content_type = b"application/json"

    @staticmethod
    def frame(events: Iterable[Event]) -> str:
        """The events' data, without any framing."""
        return "".join([event.data for event in events])
