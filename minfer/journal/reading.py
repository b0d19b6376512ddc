"""Reading a journal: records as turns (`minfer.journal.format` defines the format)."""

import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import evolve, frozen

from minfer.blocks.keys import block_keys
from minfer.journal.codec import RECORDS, load
from minfer.journal.decisions import Facts
from minfer.journal.format import (
    FORMAT,
    FRAME,
    MAGIC,
    READS_OLDER,
    RESULT,
    TICK,
    TURN,
    Head,
    JournalError,
)
from minfer.journal.projection import state_digest
from minfer.journal.wire_names import RemovedError
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Executed, Submit, Tick, clip
from minfer.records.plan import Yields
from minfer.records.request import Request
from minfer.records.state import EngineState
from minfer.records.token_logprobs import Logprobs, TokenLogprobs

_WIDEST: Final = 4  # bytes of a token id
# What a crafted file may claim, whose content takes no bytes of it: token ids of zero,
# and the size of a head, of which zlib makes up to a thousand bytes from one.
_MAX_ZERO_IDS: Final = 1 << 24
_MAX_EMPTY_HEAD: Final = 1 << 26
_MAX_HEAD_RATIO: Final = 64
# The first bytes of payloads after the head: a turn with its flags, a digest of a state
# and the end with their lengths before them.
_BEGINS: Final = re.compile(
    rb"T[\x00-\x03]|(?<=\x19\0\0\0....)S|(?<=\x09\0\0\0....)E", re.DOTALL
)


@frozen
class RecordedTurn:
    """A turn of a journal: its events and its recorded decisions."""

    events: tuple[Event, ...]
    facts: Facts
    digest: bytes


def payloads(
    data: bytes, where: str, *, torn: list[str] | None = None
) -> Iterator[bytes]:
    """The payloads of a segment, in order.

    An incomplete last record was cut off with the file: it is left out, and `torn`
    gets a message. Raises JournalError for any other incomplete record, with the number
    of turns after it.
    """
    _check_magic(data, where)
    at, number = len(MAGIC), 0
    while at < len(data):
        payload = _record_at(data, at)
        if payload is None:
            following = next(_found_behind(data, at), None)
            if following is not None or not _may_be_torn(data, at):
                damage = f"record {number} at byte {at} {_damage(data, at, following)}"
                raise JournalError(f"{where}: {damage}")
            if torn is not None:
                torn.append(
                    f"{where}: the last record is cut off after {len(data) - at} bytes"
                )
            return
        yield payload
        at, number = at + FRAME.size + len(payload), number + 1


def _record_at(data: bytes, at: int) -> bytes | None:
    """The payload of the record that begins there, if it is complete."""
    body = at + FRAME.size
    if body > len(data):
        return None
    size, crc = FRAME.unpack_from(data, at)
    if not 0 < size <= len(data) - body:
        return None
    payload = bytes(data[body : body + size])
    return payload if zlib.crc32(payload) == crc else None


def _found_behind(data: bytes, at: int) -> Iterator[int]:
    """The starts of complete records after an incomplete one, found by their first bytes
    and checksums.
    """
    end = at + 1
    for match in _BEGINS.finditer(data, at):
        begin = match.start() - FRAME.size
        if begin < end or not _may_begin(data, begin):
            continue
        payload = _record_at(data, begin)
        if payload is not None:
            yield begin
            end = begin + FRAME.size + len(payload)


def _may_begin(data: bytes, begin: int) -> bool:
    """Whether the lengths of a turn agree, if it is one: cheaper than its checksum."""
    body = begin + FRAME.size
    if data[body : body + 1] != b"T":
        return True
    if body + TURN.size > len(data):
        return False
    size, _ = FRAME.unpack_from(data, begin)
    *_, width, count = TURN.unpack_from(data, body)
    fits = TURN.size + width * count <= size <= len(data) - body
    return bool(fits and width <= _WIDEST)


def _damage(data: bytes, at: int, following: int | None) -> str:
    """What is wrong with an incomplete record, and what is complete after it."""
    body, end = at + FRAME.size, len(data) if following is None else following
    _, crc = FRAME.unpack_from(data, at)
    whole = zlib.crc32(data[body:end]) == crc
    why = f"is damaged: its {'length is wrong' if whole else 'checksum differs'}"
    if following is None:
        return f"{why}; no whole record follows it"
    places = _found_behind(data, at)
    turns = sum(data[place + FRAME.size] == ord("T") for place in places)
    return f"{why}; {turns} whole turns follow it, from byte {following} on"


def submitted(data: bytes, where: str) -> Iterator[str]:
    """The ids of the requests that arrived in a segment, without a replay. Raises
    JournalError.
    """
    for number, payload in enumerate(payloads(data, where)):
        if payload[:1] != b"T" or b'"Submit"' not in payload:
            continue
        try:
            ids = _submitted_in(payload)
        except Exception as error:  # a checksum says nothing about the content
            what = f"record {number} is no turn: {_worded(error)}"
            raise JournalError(f"{where}: {what}") from error
        yield from ids


def _submitted_in(payload: bytes) -> list[str]:
    """The ids of the requests that arrived in a turn."""
    *_, width, count = TURN.unpack_from(payload)
    record = json.loads(payload[TURN.size + width * count :])
    events = [one for one in record["events"] if one and one["is"] == "Submit"]
    ids = [one["request"]["id"] for one in events]
    if not all(isinstance(one, str) for one in ids):
        raise TypeError("an id of a request is no text")
    return ids


def _worded(error: Exception) -> str:
    """An error as a part of a message."""
    return clip(f"{type(error).__name__}: {error}")


def _check_magic(data: bytes, where: str) -> None:
    """Raise JournalError unless a file begins as a journal does."""
    if data[: len(MAGIC)] == MAGIC:
        return
    if not data:
        why = "empty"
    elif data[:15] == MAGIC[:15]:
        why = "of a newer format; use a newer minfer"
    else:
        why = "not a journal of minfer"
    raise JournalError(f"{where}: this file is {why}")


def _may_be_torn(data: bytes, at: int) -> bool:
    """Whether an incomplete record, without a complete one after it, may have been in
    writing when the process or the power failed.
    """
    body = at + FRAME.size
    if body > len(data):
        return True
    size, crc = FRAME.unpack_from(data, at)
    if body + size < len(data):
        # After a power failure, a file system may leave zeros.
        return size == 0 and not bytes(data[at:]).strip(b"\0")
    return body == len(data) or zlib.crc32(data[body:]) != crc


def headless(data: bytes, where: str) -> bool:
    """Whether a segment is cut off within its head. Raises JournalError."""
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
        record = json.loads(_decompressed(payload[1:]))
        bare, snapshot = _bare_head(record, classes), record["state"]
    except JournalError as error:
        raise JournalError(f"{where}: {error}") from error
    except RemovedError as error:
        raise JournalError(f"{where}: {_removed(record['format'], error)}") from error
    except Exception as error:  # a checksum says nothing about the content
        why = clip(str(error))
        raise JournalError(f"{where}: its head cannot be read: {why}") from error
    if snapshot is None or not with_state:
        return bare
    return evolve(bare, state=_read_snapshot(snapshot, bare, where, classes))


def _decompressed(data: bytes) -> bytes:
    """The text of a head. Raises ValueError if it is too large for its bytes."""
    most = max(_MAX_EMPTY_HEAD, _MAX_HEAD_RATIO * len(data))
    stream = zlib.decompressobj()
    text = stream.decompress(data, most)
    if not stream.eof:
        large = f"it has more than {most} bytes, compressed to {len(data)}"
        raise ValueError(large if stream.unconsumed_tail else "it is cut off")
    return text


def _bare_head(record: Any, classes: Mapping[str, type]) -> Head:
    """The head in a record, without its state. Raises JournalError for another format."""
    if record["format"] != FORMAT:
        raise JournalError(_other_format(record))
    bare = Head(
        config=load(record["config"], classes),
        turn=record["turn"],
        digest=bytes.fromhex(record["digest"]),
        state_digest=bytes.fromhex(record.get("state_digest", "")),
        format=record["format"],
        about=record["about"],
    )
    types = (bare.config, EngineConfig), (bare.turn, int), (bare.about, dict)
    if not all(isinstance(value, kind) for value, kind in types):
        raise TypeError("a part of it has another type")
    return bare


def _read_snapshot(
    record: Any, head: Head, where: str, classes: Mapping[str, type]
) -> EngineState:
    """The state in a head. Raises JournalError if it has records of an older version,
    from which no present state can be made.
    """
    try:
        state: EngineState = load(record, classes)
        found = state_digest(state)
    except RemovedError as error:
        raise JournalError(f"{where}: {_removed(head.format, error)}") from error
    except Exception as error:  # a checksum says nothing about the content
        raise JournalError(f"{where}: {_old_snapshot(head, _worded(error))}") from error
    if head.state_digest not in (b"", found):
        why = f"it reads as another state: {found.hex()}, not {head.state_digest.hex()}"
        raise JournalError(f"{where}: {_old_snapshot(head, why)}")
    return state


def _old_snapshot(head: Head, why: str) -> str:
    """The error for a snapshot that does not fit the present records."""
    return (
        f"it begins with a snapshot of the state before turn {head.turn} (format "
        f"{head.format}), of records that are not those of this minfer: {why}; if the "
        f"segment with turn 0 is still there, begin with that, else replay it with "
        f"{_writer(head.about)}"
    )


def _other_format(record: Mapping[str, Any]) -> str:
    """The error for a head of another format; `record` are its fields, which may be
    anything.
    """
    reads = (
        f"{READS_OLDER}, the last that reads it"
        if record["format"] < FORMAT
        else _writer(record.get("about") or {})
    )
    return (
        f"this journal has format {record['format']}, and this minfer reads format "
        f"{FORMAT}; replay it with {reads}"
    )


def _removed(form: int, error: RemovedError) -> str:
    """The error for a journal with a feature that is not supported any more."""
    return f"journal of format {form} with {error}"


def _writer(about: Mapping[str, Any]) -> str:
    """The version of minfer that wrote a journal."""
    return (
        f"minfer {about['minfer']}" if "minfer" in about else "the minfer that wrote it"
    )


def read_turn(payload: bytes, state: EngineState, head: Head) -> RecordedTurn:
    """The turn in a payload, taken in `state`; `head` is that of its segment. Raises
    JournalError, without a place.
    """
    block_size = head.config.block_size
    try:
        _, flags, time, digest, width, count = TURN.unpack_from(payload)
        ids, at = _unpacked(payload, width, count), TURN.size + width * count
        rest = _object(payload[at:]) if at < len(payload) else {}
        events: list[Event] = [Tick(time)] if flags & TICK else []
        begin = 0
        if flags & RESULT:
            plan = state.inflight[0]
            sizes = tuple(rest.get("sizes", plan.max_sampled_tokens))
            begin = sum(sizes)
            yields = _split(ids[:begin], sizes)
            logprobs = _logprobs(rest.get("logprobs", ()), yields)
            events.append(Executed(plan.step, yields, logprobs))
        for record in rest.get("events", ()):
            event, begin = _read_event(record, ids, begin, block_size)
            events.append(event)
        return RecordedTurn(tuple(events), rest.get("facts", {}), digest)
    except RemovedError as error:
        raise JournalError(_removed(head.format, error)) from error
    except Exception as error:  # a checksum says nothing about the content
        raise JournalError(f"it is no turn of this state: {_worded(error)}") from error


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object in a text."""
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise TypeError(f"its JSON is a {type(parsed).__name__}")
    return parsed


def _logprobs(record: Any, yields: Yields) -> Logprobs:
    """The column of log-probabilities, of rows that are beams of searches."""
    if not record:
        return ()
    column: list[tuple[TokenLogprobs, ...]] = [()] * len(yields)
    for at, logprob, rank, likeliest, logprobs in record:
        (token,) = yields[at]
        one = TokenLogprobs(token, logprob, rank, tuple(likeliest), tuple(logprobs))
        column[at] = (one,)
    return tuple(column)


def _unpacked(payload: bytes, width: int, count: int) -> tuple[int, ...]:
    if count > (1 << 28 if width else _MAX_ZERO_IDS):
        raise ValueError(f"{count} token ids")
    raw = bytearray(4 * count)
    for at in range(width):
        first = TURN.size + at * count
        raw[at::4] = payload[first : first + count]
    return tuple(array("I", bytes(raw)))


def _split(ids: tuple[int, ...], sizes: tuple[int, ...]) -> Yields:
    if sizes.count(1) == len(sizes) == len(ids):
        return tuple(zip(ids))
    it = iter(ids)
    return tuple([tuple([next(it) for _ in range(size)]) for size in sizes])


def _read_event(
    record: Any, ids: tuple[int, ...], at: int, size: int
) -> tuple[Event, int]:
    if record is None or record["is"] != "Submit":
        # None was not an event when it arrived, and is not now
        event: Event = load(record)
        return event, at
    fields = dict(record["request"])
    end, keys = at + fields.pop("prompt"), fields.pop("keys")
    bare: Request = load(fields | {"prompt": []})
    prompt = ids[at:end]
    known = block_keys(bare.root, prompt, size)[:keys] if keys else ()
    return Submit(evolve(bare, prompt=prompt, keys=known)), end
