"""Values as JSON and back: the encoding of journals and snapshots.

JSON has no tuples, sets, bytes or records, so these have a tag:

    tuple       [1, 2.5, "x"]; of 16 integers and more {"ints": "base64", "wide":
                bytes each}
    bytes       {"hex": "00ff"}
    frozenset   {"set": [..]}, sorted
    Map         {"map": [[key, value], ..]}, sorted by key
    infinity    {"float": "inf"}
    record      {"is": "Request", "id": "7", ..}: fields that have their default are left
                out

Classes and fields have the names of `minfer.journal.wire_names`. A record is built by its
class's name from a fixed table: a file can make values, never run code. Unknown fields
are refused; former fields are treated as that module defines; new fields that are missing
take their default.
"""

import binascii
import math
from array import array
from collections.abc import Container, Mapping
from typing import Any, Final

import attrs

from minfer.blocks import ownership, pool, prefix
from minfer.journal.wire_names import fields_of, name_of, python_names, without_removed
from minfer.policies import builtin, fair_queue, fair_seats
from minfer.records import (
    acceptance,
    adapters,
    config,
    drafting,
    messages,
    plan,
    policy,
    request,
    sequence,
    speculation,
    state,
    state_keeping,
    step_times,
    tiers,
    waiting,
)
from minfer.sampling import beam, structured
from minfer.values import log, queue
from minfer.values.checks import MAX_INT64, MIN_INT64
from minfer.values.pmap import Map

_MIN_PACKED_INTS: Final = 16  # consecutive integers that are worth packing
_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "q"}
_MODULES: Final = (
    acceptance,
    adapters,
    beam,
    builtin,
    config,
    drafting,
    fair_queue,
    fair_seats,
    log,
    messages,
    ownership,
    plan,
    policy,
    pool,
    prefix,
    queue,
    request,
    sequence,
    speculation,
    state,
    state_keeping,
    step_times,
    structured,
    tiers,
    waiting,
)


class CodecError(ValueError):
    """A value cannot be encoded or decoded."""


def _records() -> dict[str, type]:
    values = (value for module in _MODULES for value in vars(module).values())
    classes = (value for value in values if isinstance(value, type))
    return {name_of(c): c for c in classes if attrs.has(c)}


RECORDS: Final = _records()  # programs add their own policies


def dump(value: Any, without: Container[str] = ()) -> Any:
    """`value` as JSON types; of a record, all fields but `without`, which are names in
    journals.

    Raises CodecError for values that records cannot have.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case bytes():
            return {"hex": value.hex()}
        case tuple():
            if len(value) >= _MIN_PACKED_INTS:
                return _pack_ints(value)
            return [dump(item) for item in value]
        case frozenset():
            return {"set": [dump(item) for item in sorted(value)]}
        case Map():
            return {"map": [[dump(key), dump(value[key])] for key in sorted(value)]}
    cls = type(value)
    if not attrs.has(cls):
        raise CodecError(
            f"a {cls.__name__} cannot be written to a journal: {value!r:.80}"
        )
    record = {"is": name_of(cls)}
    for field in fields_of(cls):
        if not field.init or field.wire_name in without:
            continue
        field_value, default = getattr(value, field.name), field.default
        if field_value is not default and not _is_equal(field_value, default):
            record[field.wire_name] = dump(field_value)
    return record


def load(value: Any, classes: Mapping[str, type] = RECORDS) -> Any:
    """The value that `dump` encoded; `classes` are the records that may be built.

    Raises CodecError for anything else, RemovedError for features that minfer no longer
    has.
    """
    match value:
        case None | bool() | int() | str() | float():
            return value
        case list():
            return tuple([load(item, classes) for item in value])
        case {"is": str(name), **fields}:
            present = {str(key): item for key, item in fields.items()}
            present = without_removed(name, present)
            built = {key: load(item, classes) for key, item in present.items()}
            return _build_record(name, built, classes)
        case {"hex": str(text)}:
            return bytes.fromhex(text)
        case {"set": list(items)}:
            return frozenset(load(item, classes) for item in items)
        case {"map": list(pairs)}:
            return Map((load(key, classes), load(item, classes)) for key, item in pairs)
        case {"ints": str(text), "wide": wide} if wide in _CODES:
            return tuple(array(_CODES[wide], binascii.a2b_base64(text)))
        case {"float": str(text)}:
            return float(text)
    raise CodecError(f"nothing is written like {value!r:.80}")


def _is_equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _pack_ints(value: tuple[Any, ...]) -> Any:
    """A long tuple of integers as packed numbers; any other as a list."""
    if set(map(type, value)) != {int}:
        return [dump(item) for item in value]
    low, high = min(value), max(value)
    widths = (width for width in (1, 2, 4) if low >= 0 and high < 1 << 8 * width)
    width = next(widths, 8)
    if width == 8 and not MIN_INT64 <= low <= high <= MAX_INT64:
        return list(value)
    packed = array(_CODES[width], value).tobytes()
    return {"ints": binascii.b2a_base64(packed, newline=False).decode(), "wide": width}


def _build_record(name: str, fields: dict[str, Any], classes: Mapping[str, type]) -> Any:
    cls = classes.get(name)
    if cls is None:
        advice = (
            "if it is of a policy of your own, name its module: minfer --policies MODULE"
        )
        raise CodecError(f"there is no record {name!r} here; {advice}")
    try:
        return cls(**python_names(name, fields))
    except (TypeError, ValueError) as error:
        raise CodecError(f"{name}: {error}") from None
