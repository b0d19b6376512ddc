"""Journals that are wrong behind right checksums, made by rule from right ones."""

import json
import zlib
from contextlib import suppress
from hashlib import blake2b
from random import Random
from typing import Any, Final

from minfer.journal.decisions import compact
from minfer.journal.format import FRAME, MAGIC, TURN
from tests.core.journal.made import record

DEEP: Final = 100_000  # lists in each other, where a value is replaced by text
_DEEP_TEXT: Final = "deep" * 8
WRONG: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    [],
    [[]],
    [1, "x"],
    {},
    {"x": 1},
    {"hex": "zz"},
    {"hex": 7},
    {"set": [{}]},
    {"set": [[], {"map": []}]},
    {"map": [1]},
    {"map": [[[], []], [{}, 1]]},
    {"float": "x"},
    {"float": "1e999"},
    {"ints": "!", "wide": 1},
    {"ints": "AAA=", "wide": 8},
    {"ints": "", "wide": []},
    {"is": 1},
    {"is": "Nothing"},
    {"is": "Tick", "time": []},
    {"is": "Moved", "number": {"map": []}},
    {"is": "Executed", "step": 0},
    {"is": "Submit", "request": {}},
    {"is": "Queue", "size": 10**9},
    {"is": "FirstCome"},
    {"is": "Request", "id": "r"},
    {"is": "PrefixIndex"},
    _DEEP_TEXT,
)


def payloads_of(data: bytes) -> list[bytes]:
    """The payloads of a whole journal."""
    at, found = len(MAGIC), list[bytes]()
    while at < len(data):
        size, _ = FRAME.unpack_from(data, at)
        found.append(data[at + FRAME.size : at + FRAME.size + size])
        at += FRAME.size + size
    return found


def crafted(data: bytes, seed: int) -> bytes:
    """A journal with one payload changed, and its checksum made anew."""
    rng, every = Random(seed), payloads_of(data)
    at = rng.choice((0, rng.randrange(len(every))))
    every[at] = _changed_payload(every[at], rng)
    if rng.random() < 0.1:
        every.insert(rng.randrange(len(every) + 1), rng.choice(every))
    return MAGIC + b"".join(record(one or b"\0") for one in every)


def _changed_payload(payload: bytes, rng: Random) -> bytes:
    if rng.random() < 0.15:
        return _with_other_bytes(payload, rng)
    if payload[:1] == b"H":
        parsed = json.loads(zlib.decompress(payload[1:]))
        if rng.random() < 0.5:
            parsed.pop("state_digest", None)  # else most other states are refused by it
        return b"H" + zlib.compress(_changed_text(parsed, rng))
    if payload[:1] != b"T":
        return payload[: rng.randrange(len(payload))] + rng.randbytes(rng.choice((0, 16)))
    kind, flags, time, digest, width, count = TURN.unpack_from(payload)
    end = TURN.size + width * count
    if rng.random() < 0.3:
        flags = rng.choice((flags, flags ^ 1, flags ^ 2, 255))
        time = rng.choice((time, float("nan"), float("inf"), -time))
        width, count = rng.choice((width, 0, 9)), rng.choice((count, 0, 3, 2**32 - 1))
        begin = TURN.pack(kind, flags, time, digest, width, count)
        return begin + payload[TURN.size :]
    parsed = json.loads(payload[end:]) if payload[end:] else {"events": [], "facts": {}}
    return payload[:end] + _changed_text(parsed, rng)


def _with_other_bytes(payload: bytes, rng: Random) -> bytes:
    other = bytearray(payload)
    for _ in range(rng.choice((1, 3))):
        other[rng.randrange(len(other))] = rng.randrange(256)
    return bytes(other[: rng.choice((len(other), rng.randrange(1, len(other) + 1)))])


def _changed_text(parsed: Any, rng: Random) -> bytes:
    changed = _changed(parsed, rng) if rng.random() < 0.9 else rng.choice(WRONG)
    text = json.dumps(changed)
    return text.replace(json.dumps(_DEEP_TEXT), "[" * DEEP + "]" * DEEP).encode()


def _changed(value: Any, rng: Random) -> Any:
    """A value with another one somewhere in it, or a part less, or one twice."""
    parts = [*value] if isinstance(value, dict) else [*range(len(_listed(value)))]
    if not parts or rng.random() < 0.2:
        return rng.choice(WRONG)
    at, copy = rng.choice(parts), value.copy()
    if rng.random() < 0.15:
        del copy[at]
    elif isinstance(copy, list) and rng.random() < 0.1:
        copy.insert(at, copy[at])
    else:
        copy[at] = _changed(copy[at], rng)
    return copy


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def crafted_lines(data: bytes, seed: int) -> bytes:
    """A journal of a router with a line changed, and all digests made anew."""
    rng, (head, *lines) = Random(seed), data.splitlines()
    if rng.random() < 0.2:
        return b"\n".join([_changed_text(json.loads(head), rng), *lines, b""])
    at, digest = rng.randrange(len(lines)), bytes(8)
    for number, line in enumerate(lines):
        text = _changed_text(json.loads(line), rng) if number == at else line
        with suppress(ValueError, RecursionError):
            record = json.loads(text)
            if isinstance(record, dict) and "digest" in record:
                digest = _chained(digest, record)
                text = compact({**record, "digest": digest.hex()})
        lines[number] = text
    return b"\n".join([head, *lines, b""])


def _chained(digest: bytes, record: dict[str, Any]) -> bytes:
    """The digest after a line, as the format has it."""
    decided = {name: record[name] for name in ("reasons", "decision") if name in record}
    taken = {name: record[name] for name in record if name not in (*decided, "digest")}
    return blake2b(digest + compact([taken, decided]), digest_size=8).digest()
