"""A body is what its event says."""

from minfer.effects.serving.wire.plain_body import PlainBody
from minfer.effects.serving.wire.transport import StreamEvent


def test_nothing_is_put_around_what_an_event_says() -> None:
    assert PlainBody.frame([StreamEvent('{"a": 1}', "ignored")]) == '{"a": 1}'
