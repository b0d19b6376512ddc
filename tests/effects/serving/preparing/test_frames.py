"""What crosses to a worker and back is the same there, and can be nothing else."""

import math
import socket
import threading

import msgspec
import pytest

from minfer.effects.live.edge import Urgency
from minfer.effects.live.prompts import Asked
from minfer.effects.serving.preparing.frames import (
    HEADER,
    Ask,
    Refusal,
    Reply,
    packed,
    read_ask,
    read_reply,
    received,
)
from minfer.effects.serving.preparing.task import Prepared
from minfer.effects.serving.protocol import GenerationRequest, Include
from minfer.effects.text.tools.formats import Parsing
from minfer.request import SamplingParams

REQUEST = GenerationRequest(
    prompts=(Asked("a text", [1, 2**31], b"\x00salt"), Asked(None, [5])),
    params=SamplingParams(
        temperature=0.5, top_k=7, stop=("x", "y"), max_tokens=None, seed=-(2**62)
    ),
    urgency=Urgency(priority=-3, client="ü", deadline=math.inf),
    stream=True,
    include=Include(usage=True, echo=("ab", "")),
    parsing=Parsing(tools="hermes", reasoning="think", names=("f", "g"), opened=True),
)


def test_a_request_is_the_same_on_the_other_side() -> None:
    reply = Reply(prepared=Prepared(model="m", request=REQUEST))
    assert read_reply(packed(reply)[HEADER:]) == reply
    refused = Reply(
        refusal=Refusal(message="no", param="n", code=None, status=400), last=True
    )
    assert read_reply(packed(refused)[HEADER:]) == refused
    ask = Ask(path="/v1/x", data=bytes(range(256)))
    assert read_ask(packed(ask)[HEADER:]) == ask


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{}", msgspec.msgpack.encode({"a": 1})])
def test_nothing_else_is_read(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_ask(data)


def test_frames_come_in_pieces_and_end() -> None:
    ours, theirs = socket.socketpair()
    large = Ask(path="/", data=b"a" * 1_000_000)
    frames = packed(large) + packed(Ask(path="/", data=b""))
    with theirs:
        thread = threading.Thread(target=ours.sendall, args=(frames + b"\x05\x00",))
        thread.start()
        first = received(theirs)
        assert first is not None
        assert read_ask(first) == large
        assert received(theirs) is not None
        thread.join()
        ours.close()
        assert received(theirs) is None  # in the middle of a length
