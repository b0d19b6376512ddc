"""Names of records and fields in journals, which stay when Python names change.

A journal has the names of the classes and fields of its records, in snapshots, events and
facts, and these names are part of its digests. By default they are the names in Python.
When a class or a field is renamed, its old name goes into `CLASSES` or `FIELDS`; when a
field is removed, it goes into `REMOVED`. `tests/core/journal/test_wire_names.py` lists
all names, so that none changes unnoticed. Keys of facts that belong to no record
("plans", "counts") are literals in `minfer.journal.decisions`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import attrs
from attrs import frozen


@frozen
class Field:
    """A field of a record."""

    name: str  # in Python
    wire_name: str
    default: Any
    init: bool


@frozen
class Removed:
    """A field that records in older journals may have."""

    # Whether a journal with this value, in JSON, is read; then the fields that replace
    # it.
    accepts: Callable[[Any], bool] = lambda _: True
    what: str = ""  # what a journal with another value has, for the error
    last_reader: str = ""  # the version, or commit, that can still read that
    replacement: Callable[[Any], dict[str, Any]] = lambda _: {}


# Classes whose name in journals is not their name in Python, by the name in journals.
CLASSES: Final[dict[str, type]] = {}
# Per record, by its name in journals: field in journals -> field in Python.
FIELDS: Final[dict[str, dict[str, str]]] = {}
# Per record and field, both by their names in journals.
REMOVED: Final[dict[str, dict[str, Removed]]] = {}


class RemovedError(ValueError):
    """A journal has a feature that minfer does not support any more."""

    def __init__(self, removed: Removed) -> None:
        super().__init__(
            f"{removed.what}: {removed.last_reader} is the last that reads it"
        )


@cache
def name_of(cls: type) -> str:
    """The name of a record's class in journals."""
    names = (name for name, record_class in CLASSES.items() if record_class is cls)
    return next(names, cls.__name__)


@cache
def fields_of(cls: Any) -> tuple[Field, ...]:
    """The fields of a record's class, in their order."""
    wire_names = {new: old for old, new in FIELDS.get(name_of(cls), {}).items()}
    return tuple(
        Field(
            field.name, wire_names.get(field.name, field.name), field.default, field.init
        )
        for field in attrs.fields(cls)
    )


def without_removed(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record, as a journal has them, without removed ones, and with their
    replacements.

    Raises RemovedError for a value that is not accepted any more.
    """
    removed = REMOVED.get(name)
    if removed is None:
        return fields
    remaining = {field: value for field, value in fields.items() if field not in removed}
    for field in removed.keys() & fields.keys():
        if not removed[field].accepts(fields[field]):
            raise RemovedError(removed[field])
        remaining |= removed[field].replacement(fields[field])
    return remaining


def python_names(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record by their names in Python."""
    names = FIELDS.get(name)
    if names is None:
        return fields
    return {names.get(field, field): value for field, value in fields.items()}
