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

from minfer.records.acceptance import Acceptance
from minfer.records.drafting import SampleAcceptance
from minfer.records.messages import Discarded, PolicyOverride, QueueBlocked
from minfer.records.plan import NewRow, PrefillTokens, SampleDeferred
from minfer.records.state import BlockedHead, LiveRequest
from minfer.records.waiting import WaitingQueue

# can read all that `REMOVED` refuses
LAST_READER: Final = "minfer 0.1.0 (commit 4be0b7e)"


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
    instead: Callable[[Any], dict[str, Any]] = lambda _: {}


def _only(value: Any, otherwise: str) -> Removed:
    """A field that is only read with this value, in JSON."""
    return Removed(lambda found: bool(found == value), otherwise)


def _freed_run(thresholds: Any) -> dict[str, Any]:
    """The only one of eight thresholds on which decisions depend."""
    return {key: thresholds[key] for key in ("freed_run",) if key in thresholds}


def _groups(window: int) -> dict[str, Any]:
    """The one group of layers of an engine that took all blocks of a prompt at once."""
    group = {"is": "CacheGroup", "window": window}
    return {"groups": [group], "reserve_windows": True} if window else {}


def _nodes(nodes: dict[str, Any]) -> dict[str, Any]:
    """Published blocks, each a bundle of one page."""
    pairs = [[key, [[block], *more]] for key, (block, *more) in nodes["map"]]
    return {"pages": {"map": pairs}}


def _queue(field: str) -> Callable[[Any], dict[str, Any]]:
    """Blocks that wait to be stored, which were a tuple."""

    def queued(keys: Any) -> dict[str, Any]:
        runs = {"map": [[0, keys]] if keys else []}
        return {field: {"is": "Queue", "runs": runs, "size": len(keys)}}

    return queued


# Classes whose name in journals is not their name in Python, by the name in journals.
CLASSES: Final[dict[str, type]] = {
    "Fill": PrefillTokens,
    "Open": NewRow,
    "Held": QueueBlocked,
    "Hold": BlockedHead,
    "Learnt": SampleAcceptance,
    "Line": WaitingQueue,
    "Live": LiveRequest,
    "Overruled": PolicyOverride,
    "Record": Acceptance,
    "SampleApart": SampleDeferred,
    "Voided": Discarded,
}
# Per record, by its name in journals: field in journals -> field in Python.
FIELDS: Final[dict[str, dict[str, str]]] = {
    "Chain": {"low_by_group": "low", "sealed_by_group": "sealed"},
    "EngineState": {
        "held": "blocked",
        "lockstep": "needs_host_mask",
        "overruled": "overrides",
        "shut": "deferred_clients",
    },
    "Fence": {"held": "published"},
    "Open": {"last": "last_index"},
    "Plan": {
        "apart": "deferred",
        "gens": "run_ids",
        "counts": "num_scheduled_tokens",
        "most": "max_sampled_tokens",
    },
    "PrefixIndex": {"pages": "nodes"},
    "Request": {"lockstep": "needs_host_mask"},
    "Running": {
        "base": "num_known_at_admission",
        "gens": "run_ids",
        "last": "last_index",
        "mark": "grow_at",
        "ripe": "publish_at",
        "sched": "scheduled",
        "tables_by_group": "tables",
    },
}
# Per record and field, both by their names in journals.
REMOVED: Final[dict[str, dict[str, Removed]]] = {
    "Chain": {
        "low": Removed(instead=lambda low: {"low_by_group": [low]}),
        "sealed": Removed(instead=lambda sealed: {"sealed_by_group": [sealed]}),
    },
    "EngineConfig": {
        "max_repeat": _only(1, "max_repeat above 1"),
        "thresholds": Removed(instead=_freed_run),
        "window": Removed(instead=_groups),
    },
    "EngineState": {"searches": _only({"map": []}, "beam search")},
    "Executed": {
        "candidates": _only([], "beam search"),
        "scores": _only([], "scores of tokens"),
    },
    "Line": {"full": Removed()},
    "Plan": {
        "moves": _only([], "blocks moved by plans"),
        "repeat": _only(1, "max_repeat above 1"),
    },
    "PrefixIndex": {"nodes": Removed(instead=_nodes)},
    "Request": {"beams": _only(None, "beam search")},
    "RowSampling": {
        "candidates": _only(0, "beam search"),
        "scores": _only(False, "scores of tokens"),
    },
    "Running": {
        "tables": Removed(
            instead=lambda tables: {"tables_by_group": [[table] for table in tables]}
        )
    },
    "Tiers": {
        "unsaved": Removed(instead=_queue("keyed_queue")),
        "unstored": Removed(instead=_queue("host_queue")),
    },
}


class RemovedError(ValueError):
    """A journal has a feature that minfer does not support any more: `what`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: {LAST_READER} is the last that reads it")


@cache
def name_of(cls: type) -> str:
    """The name of a record's class in journals."""
    return next((name for name, one in CLASSES.items() if one is cls), cls.__name__)


@cache
def fields_of(cls: Any) -> tuple[Field, ...]:
    """The fields of a record's class, in their order."""
    wire_names = {new: old for old, new in FIELDS.get(name_of(cls), {}).items()}
    return tuple(
        Field(one.name, wire_names.get(one.name, one.name), one.default, one.init)
        for one in attrs.fields(cls)
    )


def without_removed(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record, as a journal has them, without removed ones, and with their
    replacements.

    Raises RemovedError for a value that is not accepted any more.
    """
    gone = REMOVED.get(name)
    if gone is None:
        return fields
    kept = {field: value for field, value in fields.items() if field not in gone}
    for field in gone.keys() & fields.keys():
        if not gone[field].accepts(fields[field]):
            raise RemovedError(gone[field].what)
        kept |= gone[field].instead(fields[field])
    return kept


def python_names(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record by their names in Python."""
    names = FIELDS.get(name)
    if names is None:
        return fields
    return {names.get(field, field): value for field, value in fields.items()}
