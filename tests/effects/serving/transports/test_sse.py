"""Events as text, as the standard on server-sent events has it."""

from minfer.effects.serving.wire.sse import EventStream
from minfer.effects.serving.wire.transport import Event


def test_each_event_has_a_frame_of_its_own() -> None:
    assert EventStream.frame([Event('{"a": 1}')]) == 'data: {"a": 1}\n\n'
    assert EventStream.frame([Event("a"), Event("b")]) == "data: a\n\ndata: b\n\n"
    assert EventStream.frame([]) == ""


def test_an_event_that_has_a_name_says_so_first() -> None:
    events = [Event("{}", "message_start"), Event("{}")]
    assert EventStream.frame(events) == "event: message_start\ndata: {}\n\ndata: {}\n\n"
