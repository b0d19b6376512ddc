"""An answer in one piece: the body of a response."""

from collections.abc import Iterable

from minfer.effects.serving.wire.http import HttpTransport
from minfer.effects.serving.wire.transport import StreamEvent


class PlainBody(HttpTransport):
    """A body with the data of the answer's only event."""

    content_type = b"application/json"

    @staticmethod
    def frame(events: Iterable[StreamEvent]) -> str:
        """The events' data, without any framing."""
        return "".join([event.data for event in events])
