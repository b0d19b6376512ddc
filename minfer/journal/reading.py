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
    HAS_RESULT,
    HAS_TICK,
    MAGIC,
    READS_OLDER,
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

_MAX_TOKEN_BYTES: Final = 4  # bytes of a token id
# What a crafted file may claim, whose content takes no bytes of it: token ids of zero,
# and the size of a head, of which zlib makes up to a thousand bytes from one.
_MAX_ZERO_IDS: Final = 1 << 24
_MAX_HEAD_BYTES: Final = 1 << 26
_MAX_HEAD_RATIO: Final = 64
# The first bytes of payloads after the head: a turn with its flags, a digest of a state
# and the end with their lengths before them.
_RECORD_STARTS: Final = re.compile(
    rb"T[\x00-\x03]|(?<=\x19\0\0\0....)S|(?<=\x09\0\0\0....)E", re.DOTALL
)


@frozen
class RecordedTurn:
    """A turn of a journal: its events and its recorded decisions."""

    events: tuple[Event, ...]
    facts: Facts
    digest: bytes


def payloads(
    data: bytes, file_name: str, *, torn: list[str] | None = None
) -> Iterator[bytes]:
    """The payloads of a segment, in order.

    An incomplete last record was cut off with the file: it is left out, and `torn`
    gets a message. Raises JournalError for any other incomplete record, with the number
    of turns after it.
    """
    _check_magic(data, file_name)
    offset, number = len(MAGIC), 0
    while offset < len(data):
        payload = _record_at(data, offset)
        if payload is None:
            following = next(_records_after(data, offset), None)
            if following is not None or not _may_be_torn(data, offset):
                damage = _damage(data, offset, following)
                raise JournalError(
                    f"{file_name}: record {number} at byte {offset} {damage}"
                )
            if torn is not None:
                size = len(data) - offset
                torn.append(f"{file_name}: the last record is cut off after {size} bytes")
            return
        yield payload
        offset, number = offset + FRAME.size + len(payload), number + 1


def _record_at(data: bytes, offset: int) -> bytes | None:
    """The payload of the record that begins there, if it is complete."""
    body = offset + FRAME.size
    if body > len(data):
        return None
    size, crc = FRAME.unpack_from(data, offset)
    if not 0 < size <= len(data) - body:
        return None
    payload = bytes(data[body : body + size])
    return payload if zlib.crc32(payload) == crc else None


def _records_after(data: bytes, offset: int) -> Iterator[int]:
    """The starts of complete records after an incomplete one, found by their first bytes
    and checksums.
    """
    end = offset + 1
    for match in _RECORD_STARTS.finditer(data, offset):
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
    return bool(fits and width <= _MAX_TOKEN_BYTES)


def _damage(data: bytes, offset: int, following: int | None) -> str:
    """What is wrong with an incomplete record, and what is complete after it."""
    body, end = offset + FRAME.size, len(data) if following is None else following
    _, crc = FRAME.unpack_from(data, offset)
    is_whole = zlib.crc32(data[body:end]) == crc
    damage = f"is damaged: its {'length is wrong' if is_whole else 'checksum differs'}"
    if following is None:
        return f"{damage}; no whole record follows it"
    starts = _records_after(data, offset)
    turns = sum(data[start + FRAME.size] == ord("T") for start in starts)
    return f"{damage}; {turns} whole turns follow it, from byte {following} on"


def submitted_ids(data: bytes, file_name: str) -> Iterator[str]:
    """The ids of the requests that arrived in a segment, without a replay. Raises
    JournalError.
    """
    for number, payload in enumerate(payloads(data, file_name)):
        if payload[:1] != b"T" or b'"Submit"' not in payload:
            continue
        try:
            ids = _submitted_ids(payload)
        except Exception as error:  # a checksum says nothing about the content
            problem = f"record {number} is no turn: {_error_text(error)}"
            raise JournalError(f"{file_name}: {problem}") from error
        yield from ids


def _submitted_ids(payload: bytes) -> list[str]:
    """The ids of the requests that arrived in a turn."""
    *_, width, count = TURN.unpack_from(payload)
    record = json.loads(payload[TURN.size + width * count :])
    events = [event for event in record["events"] if event and event["is"] == "Submit"]
    ids = [event["request"]["id"] for event in events]
    if not all(isinstance(request_id, str) for request_id in ids):
        raise TypeError("an id of a request is no text")
    return ids


def _error_text(error: Exception) -> str:
    """An error as a part of a message."""
    return clip(f"{type(error).__name__}: {error}")


def _check_magic(data: bytes, file_name: str) -> None:
    """Raise JournalError unless a file begins as a journal does."""
    if data[: len(MAGIC)] == MAGIC:
        return
    if not data:
        problem = "empty"
    elif data[:15] == MAGIC[:15]:
        problem = "of a newer format; use a newer minfer"
    else:
        problem = "not a journal of minfer"
    raise JournalError(f"{file_name}: this file is {problem}")


def _may_be_torn(data: bytes, offset: int) -> bool:
    """Whether an incomplete record, without a complete one after it, may have been in
    writing when the process or the power failed.
    """
    body = offset + FRAME.size
    if body > len(data):
        return True
    size, crc = FRAME.unpack_from(data, offset)
    if body + size < len(data):
        # After a power failure, a file system may leave zeros.
        return size == 0 and not bytes(data[offset:]).strip(b"\0")
    return body == len(data) or zlib.crc32(data[body:]) != crc


def lacks_head(data: bytes, file_name: str) -> bool:
    """Whether a segment is cut off within its head. Raises JournalError."""
    begin = bytes(data[: len(MAGIC)])
    return MAGIC.startswith(begin) and (
        begin != MAGIC or not any(payloads(data, file_name))
    )


def read_head(
    data: bytes,
    file_name: str,
    classes: Mapping[str, type] = RECORDS,
    *,
    with_state: bool = True,
) -> Head:
    """The head of a segment; `classes` are the records that may be in it. Raises
    JournalError.

    `with_state`: with the state before its first turn, which a replay needs of its first
    segment.
    """
    payload = next(payloads(data, file_name), b"")
    if payload[:1] != b"H":
        raise JournalError(
            f"{file_name}: it has no head: nothing of it was ever acknowledged"
        )
    try:
        record = json.loads(_decompressed(payload[1:]))
        bare, snapshot = _bare_head(record, classes), record["state"]
    except JournalError as error:
        raise JournalError(f"{file_name}: {error}") from error
    except RemovedError as error:
        raise JournalError(
            f"{file_name}: {_removed_feature(record['format'], error)}"
        ) from error
    except Exception as error:  # a checksum says nothing about the content
        problem = clip(str(error))
        raise JournalError(f"{file_name}: its head cannot be read: {problem}") from error
    if snapshot is None or not with_state:
        return bare
    return evolve(bare, state=_read_snapshot(snapshot, bare, file_name, classes))


def _decompressed(data: bytes) -> bytes:
    """The text of a head. Raises ValueError if it is too large for its bytes."""
    max_bytes = max(_MAX_HEAD_BYTES, _MAX_HEAD_RATIO * len(data))
    stream = zlib.decompressobj()
    text = stream.decompress(data, max_bytes)
    if not stream.eof:
        message = f"it has more than {max_bytes} bytes, compressed to {len(data)}"
        raise ValueError(message if stream.unconsumed_tail else "it is cut off")
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
    record: Any, head: Head, file_name: str, classes: Mapping[str, type]
) -> EngineState:
    """The state in a head. Raises JournalError if it has records of an older version,
    from which no present state can be made.
    """
    try:
        state: EngineState = load(record, classes)
        digest = state_digest(state)
    except RemovedError as error:
        raise JournalError(
            f"{file_name}: {_removed_feature(head.format, error)}"
        ) from error
    except Exception as error:  # a checksum says nothing about the content
        raise JournalError(
            f"{file_name}: {_old_snapshot(head, _error_text(error))}"
        ) from error
    if head.state_digest not in (b"", digest):
        expected = head.state_digest.hex()
        problem = f"it reads as another state: {digest.hex()}, not {expected}"
        raise JournalError(f"{file_name}: {_old_snapshot(head, problem)}")
    return state


def _old_snapshot(head: Head, problem: str) -> str:
    """The error for a snapshot that does not fit the present records."""
    return (
        f"it begins with a snapshot of the state before turn {head.turn} (format "
        f"{head.format}), of records that are not those of this minfer: {problem}; if "
        f"the segment with turn 0 is still there, begin with that, else replay it with "
        f"{_writer_version(head.about)}"
    )


def _other_format(record: Mapping[str, Any]) -> str:
    """The error for a head of another format; `record` are its fields, which may be
    anything.
    """
    readers = (
        f"{READS_OLDER}, the last that reads it"
        if record["format"] < FORMAT
        else _writer_version(record.get("about") or {})
    )
    return (
        f"this journal has format {record['format']}, and this minfer reads format "
        f"{FORMAT}; replay it with {readers}"
    )


def _removed_feature(number: int, error: RemovedError) -> str:
    """The error for a journal with a feature that is not supported any more."""
    return f"journal of format {number} with {error}"


def _writer_version(about: Mapping[str, Any]) -> str:
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
        ids, offset = _unpacked(payload, width, count), TURN.size + width * count
        rest = _object(payload[offset:]) if offset < len(payload) else {}
        events: list[Event] = [Tick(time)] if flags & HAS_TICK else []
        begin = 0
        if flags & HAS_RESULT:
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
        raise JournalError(_removed_feature(head.format, error)) from error
    except Exception as error:  # a checksum says nothing about the content
        raise JournalError(
            f"it is no turn of this state: {_error_text(error)}"
        ) from error


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
    for index, logprob, rank, likeliest, logprobs in record:
        (token,) = yields[index]
        entry = TokenLogprobs(token, logprob, rank, tuple(likeliest), tuple(logprobs))
        column[index] = (entry,)
    return tuple(column)


def _unpacked(payload: bytes, width: int, count: int) -> tuple[int, ...]:
    if count > (1 << 28 if width else _MAX_ZERO_IDS):
        raise ValueError(f"{count} token ids")
    raw = bytearray(4 * count)
    for plane in range(width):
        first = TURN.size + plane * count
        raw[plane::4] = payload[first : first + count]
    return tuple(array("I", bytes(raw)))


def _split(ids: tuple[int, ...], sizes: tuple[int, ...]) -> Yields:
    if sizes.count(1) == len(sizes) == len(ids):
        return tuple(zip(ids))
    tokens = iter(ids)
    return tuple([tuple([next(tokens) for _ in range(size)]) for size in sizes])


def _read_event(
    record: Any, ids: tuple[int, ...], start: int, size: int
) -> tuple[Event, int]:
    if record is None or record["is"] != "Submit":
        # None was not an event when it arrived, and is not now
        event: Event = load(record)
        return event, start
    fields = dict(record["request"])
    end, keys = start + fields.pop("prompt"), fields.pop("keys")
    bare: Request = load(fields | {"prompt": []})
    prompt = ids[start:end]
    prompt_keys = block_keys(bare.root, prompt, size)[:keys] if keys else ()
    return Submit(evolve(bare, prompt=prompt, keys=prompt_keys)), end
