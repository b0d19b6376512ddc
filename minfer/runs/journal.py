"""A journal: every input of the engine and a digest of every decision, as bytes.

Theory. The engine is a function, so its inputs replay it: the configuration, and per turn
the events, of which time, results and arrivals are all that is nondeterministic. What can
be told from the state is not written: a result names no step and no row, since the plan
first in flight does; content keys come from tokens. So a turn over 256 decoding rows is
256 tokens and 22 bytes.

Decisions are written as *facts*: how a turn's plans differ from the plan before them, who
ended, and the reasons. A steady decode has none. Facts and the columns of plans go into a
digest that is chained from turn to turn, so a replay that decides otherwise is told so in
that turn, with the field, what was decided then and what is decided now.

A file is one segment:

    "minfer journal 1\n", then records: u32 length, u32 CRC-32, payload (little-endian
    throughout)

    H  head, zlib of JSON: format, version, configuration, the number of its first turn,
       the digest before it, the state before it (null: the engine's first) and that
       state's digest, and about: what ran, and where
    T  a turn: u8 flags (1: the first event is the time; 2: the next is the good result of
       the plan first in flight), f64 seconds, 8 bytes of digest, u8 width, u32 count;
       then `count` token ids as `width` planes of their bytes, lowest first: the result's
       by row, then those of prompts; then JSON, or nothing:
         events  all others, records as `minfer.runs.codec` writes them; prompt and keys
                 are counts
         sizes   tokens by row, unless all rows yielded their most
         scores  by row, if any row has some
         facts   see `minfer.runs.decisions`
    S  digest of the state after so many turns, a multiple of 16,384 or all so far: u64,
       16 bytes
    E  the engine was closed; u64 number of turns

A file may end anywhere: what follows the last whole record was never acknowledged.
Digests of states are those of `minfer.runs.projection`, which leaves out token ids and
keys, so that a journal without token ids has the same. Format 2 had others, over the
records as they were then: its journals are replayed by their decisions alone.
"""

import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
from attrs import frozen

from minfer.config import EngineConfig
from minfer.keys import block_keys
from minfer.messages import EVENTS, Event, Executed, Failed, Submit, Tick
from minfer.plan import Plan, Yields, flaw_beside, tokens_of
from minfer.request import Request
from minfer.runs.codec import RECORDS, CodecError, dump, load
from minfer.runs.decisions import Facts, chained, compact, facts
from minfer.runs.projection import state_digest
from minfer.state import EngineState, Turn, initial

MAGIC: Final = b"minfer journal 1\n"
FORMAT: Final = (
    3  # of heads, facts and digests; what MAGIC counts is how records are framed
)
OLDEST: Final = 2  # format that can be replayed
EVERY: Final = 1 << 14  # turns from one digest of the state to the next
_FRAME: Final = struct.Struct("<II")
_TURN: Final = struct.Struct("<cBd8sBI")
_MARK: Final = struct.Struct("<cQ")
_NO_STEP: Final = 2**63  # a number that no step has
_TICK: Final = 1
_RESULT: Final = 2
START: Final = bytes(8)  # the digest before the first turn


class JournalError(ValueError):
    """A journal cannot be read; the message says which, where, and why."""


@frozen(kw_only=True)
class Head:
    """What a segment begins with."""

    config: EngineConfig
    turn: int = 0  # the number of its first turn
    digest: bytes = START
    state: EngineState | None = None  # None: the engine's first, or it was not read
    state_digest: bytes = (
        b""  # of `state`, where that is not the engine's first; format 3 and on
    )
    format: int = FORMAT
    about: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def begin(self) -> EngineState:
        """The state before the segment's first turn."""
        return initial(self.config) if self.state is None else self.state


# --- records ----------------------------------------------------------------------------


def framed(payload: bytes) -> bytes:
    """A payload as a record."""
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def head_record(head: Head) -> bytes:
    """The record that begins a segment. Raises CodecError for a policy that cannot be
    written.
    """
    told = {
        "format": FORMAT,
        "turn": head.turn,
        "digest": head.digest.hex(),
        "config": dump(head.config),
        "about": head.about,
        "state": None,
    }
    if head.state is not None:
        told["state"] = dump(head.state)
        told["state_digest"] = state_digest(head.state).hex()
    return framed(b"H" + zlib.compress(compact(told), 1))


def turn_record(turn: Turn, told: bytes, digest: bytes) -> bytes:
    """The record of a turn with its facts, as JSON, and the digest after it."""
    events, time, flags = turn.events, 0.0, 0
    first = turn.before.inflight[0] if turn.before.inflight else None
    rest: dict[str, Any] = {}
    ids = array("I")
    if events and type(events[0]) is Tick:
        time, events, flags = events[0].time, events[1:], _TICK
    if first and events and type(events[0]) is Executed:
        found = _yielded(first, events[0], rest)
        if found is not None:
            ids, events, flags = found, events[1:], flags | _RESULT
    if events:
        rest["events"] = [_event(event, ids) for event in events]
    raw = ids.tobytes()
    planes = [raw[at::4] for at in range(4)]
    while planes and planes[-1].count(0) == len(ids):
        del planes[-1]
    head = _TURN.pack(b"T", flags, time, digest, len(planes), len(ids))
    tail = compact(rest)
    if told:
        tail = (tail[:-1] + b"," if tail else b"{") + b'"facts":' + told + b"}"
    return framed(b"".join([head, *planes, tail]))


def _packed_ids(yields: Any) -> "array[int] | None":
    """The token ids of results as packed numbers, if they are any."""
    tokens = tokens_of(yields)
    try:
        return None if tokens is None else array("I", tokens)
    except OverflowError:
        return None


def _yielded(plan: Plan, event: Executed, rest: dict[str, Any]) -> "array[int] | None":
    """The token ids of the result of `plan`, if it is that and can be packed; adds their
    sizes to
    `rest` if need be.
    """
    if type(event.step) is not int or event.step != plan.step:
        return None
    ids = _packed_ids(event.yields)
    if ids is None or len(event.yields) != len(plan.most):
        return None
    sizes = tuple(map(len, event.yields))
    if flaw_beside(event.scores, event.logprobs, sizes):
        return None
    if sizes != plan.most:
        rest["sizes"] = sizes
    if event.scores:
        rest["scores"] = event.scores
    return ids


def _event(event: Event, ids: "array[int]") -> Any:
    """An event as JSON; token ids of prompts go to `ids`."""
    if type(event) is Submit:
        request = event.request
        ids.extend(request.prompt)
        told = dump(request, without=("prompt", "keys"))
        told["prompt"], told["keys"] = len(request.prompt), len(request.keys)
        return {"is": "Submit", "request": told}
    return dump(as_written(event))


def as_written(event: Any) -> Event | None:
    """An event as it can be written: of what is none, nothing, and of results that cannot
    be, none.

    What cannot be written is refused or ignored, and so is what is written in its place.
    """
    if not isinstance(event, Executed | Failed) or type(event) not in EVENTS:
        return event if type(event) in EVENTS else None
    fits = type(event.step) is int and 0 <= event.step < _NO_STEP
    step = event.step if fits else _NO_STEP
    if isinstance(event, Failed):
        return Failed(step, event.error if isinstance(event.error, str) else "")
    if _packed_ids(event.yields) is None:
        return Executed(step, ())
    sizes = tuple(map(len, event.yields))
    if flaw_beside(event.scores, event.logprobs, sizes):
        return Executed(step, ())
    return Executed(step, event.yields, event.scores)


def state_record(turns: int, state: EngineState) -> bytes:
    """The record of a state's digest, after so many turns."""
    return framed(_MARK.pack(b"S", turns) + state_digest(state))


def end_record(turns: int) -> bytes:
    """The record of an orderly end, after so many turns."""
    return framed(_MARK.pack(b"E", turns))


# --- reading ----------------------------------------------------------------------------


@frozen
class Written:
    """A turn as a journal has it: what came in, and what was decided then."""

    events: tuple[Event, ...]
    facts: Facts
    digest: bytes


def payloads(
    data: bytes, where: str, *, torn: list[str] | None = None
) -> Iterator[bytes]:
    """The payloads of a segment, in order.

    A record cut off by the end of the file is left out; `torn` is told. Raises
    JournalError.
    """
    if data[: len(MAGIC)] != MAGIC:
        known = data[:15] == MAGIC[:15]
        why = (
            "of a newer format; use a newer minfer"
            if known
            else "not a journal of minfer"
        )
        raise JournalError(f"{where}: this file is {why if data else 'empty'}")
    at, number = len(MAGIC), 0
    while at < len(data):
        body = at + _FRAME.size
        size, crc = _FRAME.unpack_from(data, at) if body <= len(data) else (len(data), 0)
        payload = bytes(data[body : body + size])
        whole = 0 < size <= len(data) - body
        if not whole or zlib.crc32(payload) != crc:
            rest = bytes(data[at:])  # where power fails, a file system may leave zeros
            closed = rest[-9:-8] == b"E" and framed(rest[-9:]) == rest[-17:]
            if (
                closed
                or (whole and body + size < len(data))
                or (not size and rest.strip(b"\0"))
            ):
                why = "is damaged: its checksum differs"
                raise JournalError(f"{where}: record {number} at byte {at} {why}")
            if torn is not None:
                torn.append(
                    f"{where}: the last record is cut off after {len(data) - at} bytes"
                )
            return
        yield payload
        at, number = body + size, number + 1


def headless(data: bytes, where: str) -> bool:
    """Whether a segment is cut off before its head was whole. Raises JournalError."""
    begin = bytes(data[: len(MAGIC)])
    return MAGIC.startswith(begin) and (begin != MAGIC or not any(payloads(data, where)))


def read_head(
    data: bytes,
    where: str,
    classes: Mapping[str, type] = RECORDS,
    *,
    with_state: bool = True,
) -> Head:
    """The head of a segment; `classes` are the records that may be in it. Raises
    JournalError.

    `with_state`: with the state before its first turn, which a replay needs of its first
    segment.
    """
    payload = next(payloads(data, where), b"")
    if payload[:1] != b"H":
        raise JournalError(
            f"{where}: it has no head: nothing of it was ever acknowledged"
        )
    try:
        told = json.loads(zlib.decompress(payload[1:]))
        if not OLDEST <= told["format"] <= FORMAT:
            raise JournalError(f"{where}: {_other_format(told)}")
        return Head(
            config=load(told["config"], classes),
            turn=told["turn"],
            digest=bytes.fromhex(told["digest"]),
            state=load(told["state"], classes) if with_state else None,
            state_digest=bytes.fromhex(told.get("state_digest", "")),
            format=told["format"],
            about=told["about"],
        )
    except (CodecError, KeyError, TypeError, ValueError, zlib.error) as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"{where}: its head cannot be read: {error}") from error


def _other_format(told: Mapping[str, Any]) -> str:
    """What a head of another format is told; `told` is all that can be relied on."""
    about, older = told.get("about") or {}, told["format"] < OLDEST
    wrote = (
        f"minfer {about['minfer']}" if "minfer" in about else "the minfer that wrote it"
    )
    what = "it records decisions otherwise" if older else "it is newer"
    return (
        f"this journal has format {told['format']}, and this minfer reads formats "
        f"{OLDEST} to "
        f"{FORMAT}: {what}; replay it with {wrote}"
    )


def read_turn(payload: bytes, state: EngineState, block_size: int) -> Written:
    """The turn that a payload holds, taken in `state`. Raises JournalError, without a
    place.
    """
    try:
        _, flags, time, digest, width, count = _TURN.unpack_from(payload)
        ids, at = _unpacked(payload, width, count), _TURN.size + width * count
        rest = json.loads(payload[at:]) if at < len(payload) else {}
        events: list[Event] = [Tick(time)] if flags & _TICK else []
        begin = 0
        if flags & _RESULT:
            plan = state.inflight[0]
            sizes = tuple(rest.get("sizes", plan.most))
            begin = sum(sizes)
            scores = tuple(map(tuple, rest.get("scores", ())))
            events.append(Executed(plan.step, _split(ids[:begin], sizes), scores))
        for told in rest.get("events", ()):
            event, begin = _read_event(told, ids, begin, block_size)
            events.append(event)
        return Written(tuple(events), rest.get("facts", {}), digest)
    except (
        CodecError,
        LookupError,
        StopIteration,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise JournalError(f"it is no turn of this state: {error!r}") from error


def _unpacked(payload: bytes, width: int, count: int) -> tuple[int, ...]:
    if count > 1 << 28:  # which zeros could pretend without a byte
        raise ValueError(f"{count} token ids")
    raw = bytearray(4 * count)
    for at in range(width):
        first = _TURN.size + at * count
        raw[at::4] = payload[first : first + count]
    return tuple(array("I", bytes(raw)))


def _split(ids: tuple[int, ...], sizes: tuple[int, ...]) -> Yields:
    if sizes.count(1) == len(sizes) == len(ids):
        return tuple(zip(ids))
    it = iter(ids)
    return tuple([tuple([next(it) for _ in range(size)]) for size in sizes])


def _read_event(told: Any, ids: tuple[int, ...], at: int, size: int) -> tuple[Event, int]:
    if told is None or told["is"] != "Submit":
        event: Event = load(told)  # None was no event when it came, and is none now
        return event, at
    fields = dict(told["request"])
    end, keys = at + fields.pop("prompt"), fields.pop("keys")
    bare: Request = load(fields | {"prompt": []})
    prompt = ids[at:end]
    known = block_keys(bare.root, prompt, size)[:keys] if keys else ()
    return Submit(attrs.evolve(bare, prompt=prompt, keys=known)), end


def encode_journal(
    config: EngineConfig,
    turns: Iterable[Turn],
    about: Mapping[str, Any] | None = None,
    *,
    states: bool = True,
) -> bytes:
    """A whole journal of one segment: what simulations and tests keep.

    `states`: with a digest of the last state, which must be what `turns` lead to.
    """
    parts, digest, head = [MAGIC], START, Head(config=config, about=about or {})
    last = None
    for last in turns:
        if len(parts) == 1:
            state = None if last.before == head.begin else last.before
            parts.append(head_record(attrs.evolve(head, turn=last.number, state=state)))
        told = compact(facts(last.before, last.transition))
        digest = chained(digest, last.transition, told)
        parts.append(turn_record(last, told, digest))
    if last is None:
        return b"".join([MAGIC, head_record(head), end_record(0)])
    count = last.number + 1
    final = state_record(count, last.transition.state) if states else b""
    return b"".join([*parts, final, end_record(count)])
