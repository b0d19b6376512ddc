"""Messages come whole and in order, however the bytes come, or the connection is over."""

import socket
import struct
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.net.framing import (
    EndedError,
    FrameReader,
    PeerError,
    frame,
    framed,
    read_frame,
    read_message,
)

MESSAGES = st.lists(st.binary(max_size=40), min_size=1, max_size=8)
LARGEST = 1000


class Said(msgspec.Struct, tag=True):
    """A record."""

    what: str


SAID = msgspec.msgpack.Decoder(Said)


@given(MESSAGES, st.lists(st.integers(1, 30), min_size=1))
def test_messages_come_whole_however_they_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(map(frame, messages))
    reader = FrameReader(LARGEST)
    received: list[bytes] = []
    offset = 0
    while offset < len(data):
        size = cuts[offset % len(cuts)]
        received += reader.feed(data[offset : offset + size])
        offset += size
    assert received == messages


@given(MESSAGES, st.data())
def test_a_cut_at_any_byte_leaves_the_messages_before_it(
    messages: list[bytes], data: st.DataObject
) -> None:
    sent = b"".join(map(frame, messages))
    cut = data.draw(st.integers(0, len(sent)))
    complete = FrameReader(LARGEST).feed(sent[:cut])
    assert complete == messages[: len(complete)]
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(sent[:cut])
        sender.close()
        assert [read_frame(receiver, LARGEST) for _ in complete] == complete
        with pytest.raises(EndedError):
            read_frame(receiver, LARGEST)


def test_a_length_that_no_peer_sends_is_refused_before_its_bytes_come() -> None:
    reader = FrameReader(LARGEST)
    assert reader.feed(struct.pack("<I", LARGEST)) == []
    large = struct.pack("<I", LARGEST + 1)
    with pytest.raises(PeerError, match="a message of 1001 bytes; the largest has 1000"):
        FrameReader(LARGEST).feed(large)
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(large)
        with pytest.raises(PeerError, match="a message of 1001 bytes"):
            read_frame(receiver, LARGEST)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa1x", b"\x91" * 900])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(frame(data))
        with pytest.raises(PeerError, match="cannot be read"):
            read_message(receiver, SAID, LARGEST)


def test_records_are_read_one_by_one_and_a_first_byte_may_be_there() -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(framed(Said("a")) + framed(Said("b")))
        assert read_message(receiver, SAID, LARGEST) == Said("a")
        assert read_message(receiver, SAID, LARGEST, first=receiver.recv(1)) == Said("b")


def test_an_end_that_stalls_is_waited_for_until_a_moment() -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(frame(b"whole")[:-1])
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            read_frame(receiver, LARGEST, deadline=began + 0.05)
        assert time.monotonic() < began + 1


def test_what_was_read_is_let_go() -> None:
    reader = FrameReader(LARGEST)
    for _ in range(100):
        reader.feed(frame(b"x" * 1000))
    assert not reader._buffer
