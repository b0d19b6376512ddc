"""Frames come whole, in order and once, however the bytes come; else the link is over."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.net.frames import LARGEST, FrameReader, FrameWriter
from minfer.effects.net.framing import PeerError

MESSAGES = st.lists(st.binary(max_size=40), min_size=1, max_size=8)


def framed(messages: list[bytes]) -> list[bytes]:
    writer = FrameWriter()
    return [writer.frame(message) for message in messages]


@given(MESSAGES, st.lists(st.integers(1, 30), min_size=1))
def test_messages_come_whole_however_they_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(framed(messages))
    reader = FrameReader()
    found: list[bytes] = []
    at = 0
    while at < len(data):
        size = cuts[at % len(cuts)]
        found += reader.feed(data[at : at + size])
        at += size
    assert found == messages


@given(MESSAGES, st.data())
def test_a_frame_that_is_lost_doubled_or_late_is_found(
    messages: list[bytes], data: st.DataObject
) -> None:
    frames = framed([*messages, b"last"])
    at = data.draw(st.integers(0, len(frames) - 2))
    match data.draw(st.sampled_from(["lost", "doubled", "late"])):
        case "lost":
            del frames[at]
        case "doubled":
            frames.insert(at, frames[at])
        case _:
            frames[at : at + 2] = [frames[at + 1], frames[at]]
    with pytest.raises(PeerError, match="came instead of frame"):
        FrameReader().feed(b"".join(frames))


def test_a_length_that_no_front_sends_is_refused_before_its_bytes_come() -> None:
    reader = FrameReader()
    assert reader.feed(struct.pack("<IQ", LARGEST, 0)) == []
    with pytest.raises(PeerError, match=rf"a frame of {LARGEST + 1} bytes; the largest"):
        FrameReader().feed(struct.pack("<IQ", LARGEST + 1, 0))


def test_what_is_no_frame_at_all() -> None:
    with pytest.raises(PeerError, match="came instead of frame 0"):
        FrameReader().feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_link_that_is_out_of_step_stays_so() -> None:
    reader = FrameReader()
    first, second = framed([b"a", b"b"])
    for data in (second, first):
        with pytest.raises(PeerError):
            reader.feed(data)


def test_what_was_read_is_let_go() -> None:
    reader, writer = FrameReader(), FrameWriter()
    for _ in range(100):
        reader.feed(writer.frame(b"x" * 1000))
    assert not reader._buffer
