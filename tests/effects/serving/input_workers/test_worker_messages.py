"""What crosses to a worker and back is the same there, and can be nothing else."""

import math

import msgspec
import pytest

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.input_workers.task import PreparedRequest, QueryResult
from minfer.effects.serving.input_workers.worker_messages import (
    Refusal,
    WorkerReply,
    WorkerRequest,
    decode_reply,
    encode,
    request_decoder,
)
from minfer.effects.serving.protocol import GenerationRequest, Include
from minfer.effects.text.tools.formats import Parsing
from minfer.records.request import SamplingParams

REQUEST = GenerationRequest(
    prompts=(
        TokenizedPrompt("a text", [1, 2**31], b"\x00salt"),
        TokenizedPrompt(None, [5]),
    ),
    params=SamplingParams(
        temperature=0.5, top_k=7, stop=("x", "y"), max_tokens=None, seed=-(2**62)
    ),
    urgency=SchedulingHints(priority=-3, client="ü", deadline=math.inf),
    stream=True,
    include=Include(usage=True, echo=("ab", "")),
    parsing=Parsing(tools="hermes", reasoning="think", names=("f", "g"), opened=True),
)


def test_a_request_is_the_same_on_the_other_side() -> None:
    reply = WorkerReply(prepared=PreparedRequest(model="m", request=REQUEST))
    assert decode_reply(encode(reply)) == reply
    answered = WorkerReply(answer=QueryResult(json="{}", ignored=("a_hint",)))
    assert decode_reply(encode(answered)) == answered
    refused = WorkerReply(
        refusal=Refusal(message="no", param="n", code=None, status=400), last=True
    )
    assert decode_reply(encode(refused)) == refused
    ask = WorkerRequest(path="/v1/x", data=bytes(range(256)))
    assert request_decoder.decode(encode(ask)) == ask


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{}", msgspec.msgpack.encode({"a": 1})])
def test_nothing_else_is_read(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        request_decoder.decode(data)
