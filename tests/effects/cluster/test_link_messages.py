"""Every message crosses the link whole, and what no end sends is refused."""

from math import inf
from typing import Any

import attrs
import msgspec
import pytest

from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.client import Snapshot, TurnOutputs
from minfer.effects.live.totals import Histogram, Totals
from minfer.records.messages import (
    Admitted,
    Finish,
    Finished,
    Missed,
    Preempted,
    QueueBlocked,
)
from minfer.records.request import (
    Continuation,
    KvTransfer,
    PromptOnly,
    Request,
    SamplingParams,
)
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.beam import BeamRound, BeamSearch
from minfer.sampling.params import RequestOutputKind
from minfer.sampling.structured import StructuredOutputs
from tests.effects.cluster.ends import IDLE, linked, other

SAMPLING = other(
    SamplingParams(),
    temperature=0.25,
    top_p=0.5,
    top_k=7,
    min_p=0.125,
    logprobs=3,
    n=2,
    best_of=4,
    prompt_logprobs=5,
    seed=-5,
    max_tokens=None,
    stop=("\n\n", "ß"),
    stop_token_ids=(4, 5),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    detokenize=False,
    output_kind=RequestOutputKind.DELTA,
    structured_outputs=StructuredOutputs(choice=("ja", "ß")),
    typical_p=0.75,
    repetition_penalty=1.5,
    frequency_penalty=-0.5,
    presence_penalty=0.25,
    min_tokens=3,
    logit_bias=((4, -1.5), (9, 2.0)),
    allowed_token_ids=(3, 4, 9),
    bad_words=("a", "ß"),
)
REQUEST = other(
    Request(id="a", prompt=(1,), prompt_only=PromptOnly()),
    id="b#2",
    prompt=(5, 2**32 - 1, 0),
    max_tokens=1,
    prompt_only=None,
    stop_ids=frozenset({3, 9}),
    bad_words=((3,), (4, 5)),
    n=3,
    first_sample=2,
    seed=-(2**63),
    sampling=SAMPLING,
    priority=-4,
    client="müller",
    deadline=1.5,
    root=b"\x00\xff",
    keys=(b"k1", b"\xfe"),
    output=(8, 7),
    needs_host_mask=True,
    continuation=other(
        Continuation(),
        tail_keys=(b"", b"k3"),
        place=((1.5, -2.0), 7, 3),
        beam_round=other(
            BeamRound(id="", width=1, prompt=1, most=1),
            id="s",
            width=4,
            prompt=9,
            most=5,
            number=2,
            beam=3,
            how=BeamSearch(length_penalty=0.5, early_stopping="never"),
        ),
    ),
    kv_transfer=other(
        KvTransfer(), first_block=2, num_stored_blocks=6, push_to="engine 2"
    ),
    taken=True,
    adapter="0f",
)
FINISHED = other(
    Finished("", 0, "", 0),
    id="a",
    sample=2,
    reason="stop",
    length=5,
    error="é",
    cached=64,
)
TOTALS = other(
    Totals({}, {}),
    counts={"a": 1.5},
    histograms={"h": Histogram((1.0, 2.0), (1, 2, 3), 4.5)},
)
REASONS = (
    other(
        Admitted("", 0, 0.0, 0, 0),
        id="a",
        sample=1,
        waited=0.5,
        hit=1,
        known=2,
        copied=3,
        cached=4,
        prompt=5,
    ),
    other(
        QueueBlocked("", 0, ""), id="a", sample=1, cause="blocks", needs=3, available=2
    ),
    other(
        Preempted("", 0, ("", 0), 0, 0),
        id="a",
        sample=1,
        by=("c", 2),
        known=3,
        computed=4,
    ),
    other(Missed("", 0, 0, 0), id="a", sample=1, block=2, blocks=3),
)


def to_engine(message: wire.ToEngine) -> Any:
    return wire.read_to_engine(wire.encode(message))


def same(decoded: Any, original: Any) -> None:
    """Equal in every field, those too that an equality leaves out."""
    assert decoded == original
    assert type(decoded) is type(original)
    for field in attrs.fields(type(original)):
        assert getattr(decoded, field.name) == getattr(original, field.name), field.name


def test_a_request_is_the_same_on_the_other_side() -> None:
    (request,) = to_engine(wire.SubmitRequests((REQUEST,))).requests
    same(request, REQUEST)
    same(request.sampling, SAMPLING)
    plain = Request(id="a", prompt=(1,), max_tokens=1)
    assert plain.deadline == inf
    pooled = Request(id="a", prompt=(1,), prompt_only=PromptOnly("mean"))
    for one in (plain, pooled):
        same(to_engine(wire.SubmitRequests((one,))).requests[0], one)


def test_what_fronts_say_is_the_same_on_the_other_side() -> None:
    for message in (
        wire.ApiServerHello(3, 2**61, 7, (wire.Resumed(REQUEST, 1, 2),)),
        wire.CancelRequests(("a", "b")),
        wire.EndSamples((Finish("a", 1, 5, "stop"),)),
        wire.ResetCache(),
        wire.UnloadAdapter("0f"),
    ):
        assert to_engine(message) == message


def test_news_are_the_same_for_who_listens_to_a_front() -> None:
    reported = other(
        TurnOutputs(time=0.0),
        time=4.5,
        ids=(("a", 0), ("a", 2)),
        tokens=((1, 2), ()),
        logprobs=(
            (TokenLogprobs(3, -0.5, 2, (7,), (-0.25,)), TokenLogprobs(4, -1.5, 1)),
            (),
        ),
        pooled=(b"", b"\x00\x80\xff?"),
        drafts=(3, 0),
        finished=(FINISHED,),
        arrived=("a",),
        places={"a": ((0.5,), 3, 0)},
        reasons=REASONS,
        waits={"blocks": 2.5},
    )
    ends = linked()
    ends.remotes[0].submit([attrs.evolve(REQUEST, id="a", n=3, output=())])
    ends.engine.say(reported)
    ends.carry()
    (heard,) = ends.heard[0]
    same(heard, reported)
    same(heard.finished[0], FINISHED)  # type: ignore[union-attr]  # they are News


def test_every_reason_that_is_reported_has_a_form_on_the_wire() -> None:
    assert {type(reason) for reason in REASONS} == set(wire.REASONS)


def test_a_snapshot_is_the_same_for_who_asks_a_front() -> None:
    ends = linked()
    reported = {
        "draining": True,
        "requests": 1,
        "running": 2,
        "waiting": 3,
        "waiting_for": {"blocks": 3},
        "blocks": 5,
        "blocks_free": 4,
        "blocks_cached": 2,
        "stalled": 0.5,
        "failing": 6,
        "totals": TOTALS,
        "journal_writing": False,
        "journal_errors": 7,
        "running_adapters": ("0f",),
        "waiting_adapters": ("1f",),
    }
    # An API server has its own clock and its own end. How often the cache was reset, and
    # what API servers have counted, the host was told by them.
    front_fields = {"time", "dead", "resets", "api_servers", "replicas"}
    assert reported.keys() | front_fields == attrs.fields_dict(Snapshot).keys(), (
        "does it cross?"
    )
    ends.engine.state = attrs.evolve(IDLE, **reported)
    ends.remotes[0].count(TOTALS)
    ends.host.tick()
    ends.carry()
    snapshot = ends.remotes[0].snapshot()
    assert {name: getattr(snapshot, name) for name in reported} == reported
    assert snapshot.api_servers == TOTALS


GOOD = wire.encode(wire.CancelRequests(("ab",)))


def fields_of(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    return fields


def packed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\x00",
        b"\xc1",
        b"\x91" * 100_000,
        packed(type="reset")[:-6] + b"\x91" * 100_000,
        b"\x82\xa4type\xa5reset\xa1x" + b"\x91" * 100_000,  # deep, in what is skipped
        GOOD.replace(b"\xa2ab", b"\xa2\xff\xfe"),  # no text
        packed(type="cancel", ids=1)[:-1] + b"\xdd\xff\xff\xff\xff",  # 2^32 of them
        packed(type="cancel", ids=1)[:-1] + b"\xdb\xff\xff\xff\xff",
        packed(type="nonsense"),
        packed(ids=["a"]),
        packed(type="cancel", ids=[1]),
        packed(type="cancel"),
        packed(type="hello", api_server="0", life=1, resets=0, resumed=[]),
        packed(
            type="end", ends=[{"id": "a", "sample": 0, "length": 1, "reason": "error"}]
        ),
        wire.encode(wire.ProbingRequest("a")),
    ],
)
def test_what_no_front_says_is_an_error_of_the_link(data: bytes) -> None:
    with pytest.raises(wire.LinkError, match="an API server says what it must not"):
        wire.read_to_engine(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("prompt", [-1]),
        ("prompt", [2**32]),
        ("prompt", ["1"]),
        ("max_tokens", 2**63),
        ("n", 1.5),
        ("first_sample", -1),
        ("deadline", float("nan")),
        ("deadline", -1.0),
        ("sampling", {"temperature": -1.0}),
        ("sampling", {"stop": [5]}),
        ("priority", 2**60),
        ("needs_host_mask", "yes"),
        ("keys", "k"),
        ("output", [None]),
    ],
)
def test_a_request_that_cannot_be_is_an_error_of_the_link(field: str, value: Any) -> None:
    fields = fields_of(Request(id="a", prompt=(1,), max_tokens=1))
    good = packed(type="submit", requests=[fields])
    assert to_engine(wire.SubmitRequests(())) == wire.SubmitRequests(())
    wire.read_to_engine(good)
    with pytest.raises(wire.LinkError):
        wire.read_to_engine(packed(type="submit", requests=[{**fields, field: value}]))


def test_what_a_request_derives_is_not_taken_from_the_line() -> None:
    fields = fields_of(Request(id="a", prompt=(7,), max_tokens=1))
    forged = packed(type="submit", requests=[{**fields, "largest": 0}])
    message = wire.read_to_engine(forged)
    assert isinstance(message, wire.SubmitRequests)
    assert message.requests[0].largest == 7
