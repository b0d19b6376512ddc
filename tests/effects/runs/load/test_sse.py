"""Events come whole, however their bytes are cut."""

import pytest

from minfer.effects.runs.load import sse
from minfer.effects.runs.load.http import HttpError
from minfer.effects.runs.load.sse import EventReader

TEXT = (
    b": hello\n\ndata: one\n\nevent: x\r\ndata:two\r\ndata:  three\r\n\r\n"
    b"id: 4\n\ndata: 5\n\n"
)


@pytest.mark.parametrize("size", range(1, 12))
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    reader, found = EventReader(), list[bytes]()
    for at in range(0, len(TEXT), size):
        found += reader.feed(TEXT[at : at + size])
    assert found == [b"one", b"two\n three", b"5"]


def test_an_event_comes_with_the_line_that_ends_it() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\n") == [b"a"]
    assert reader.feed(b"data: never ended") == []


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST", 100)
    reader = EventReader()
    with pytest.raises(HttpError, match="a line of more than 100 bytes"):
        reader.feed(b"data: " + b"x" * 100)
