"""Server-sent events: an answer in parts, as they come.

    event: its name, if it has one
    data: its data
                                     an empty line ends it

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Iterable

from minfer.effects.serving.wire.http import HttpTransport
from minfer.effects.serving.wire.transport import StreamEvent


class EventStream(HttpTransport):
    """Each event has a frame of its own; those of one write are sent together."""

    content_type = b"text/event-stream"
    # Neither caches nor proxies may buffer events.
    headers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

    @staticmethod
    def frame(events: Iterable[StreamEvent]) -> str:
        """The frames of events, one after the other."""
        return "".join([_frame(event) for event in events])


def _frame(event: StreamEvent) -> str:
    frame = f"data: {event.data}\n\n"
    return f"event: {event.name}\n{frame}" if event.name else frame
