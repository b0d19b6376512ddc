"""Events as text, as the standard on server-sent events has it."""

from minfer.effects.serving.wire.sse import EventStream
from minfer.effects.serving.wire.transport import StreamEvent


def test_each_event_has_a_frame_of_its_own() -> None:
    assert EventStream.frame([StreamEvent('{"a": 1}')]) == 'data: {"a": 1}\n\n'
    assert (
        EventStream.frame([StreamEvent("a"), StreamEvent("b")])
        == "data: a\n\ndata: b\n\n"
    )
    assert EventStream.frame([]) == ""


def test_an_event_that_has_a_name_says_so_first() -> None:
    events = [StreamEvent("{}", "message_start"), StreamEvent("{}")]
    assert EventStream.frame(events) == "event: message_start\ndata: {}\n\ndata: {}\n\n"
