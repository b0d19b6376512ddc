"""The decisions of a turn as data: facts to name a difference by, and a digest to find
it.

Facts are how a turn's plans differ from the plan before them, the samples that ended, and
the reasons; a steady decode has none. Facts and the columns of plans go into a digest
that is chained from turn to turn. Token ids are not decisions: neither facts nor digests
have any.
"""

import json
from array import array
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import compress, groupby, repeat
from operator import ne
from typing import Any, Final

from minfer.blocks.prefix import flattened
from minfer.journal.wire_names import Field, fields_of, name_of
from minfer.records.adapters import NO_SLOT
from minfer.records.messages import (
    Emit,
    Ended,
    Execute,
    FetchBlocks,
    LoadAdapter,
    Move,
    StoreBlocks,
    WakeAt,
)
from minfer.records.plan import Plan, SaveState
from minfer.records.sequence import less
from minfer.records.state import EngineState, Transition

Facts = dict[str, Any]
# Fields of reasons, by their names in journals, that quote errors, which decide nothing,
# or that have other values in redacted journals.
_UNCOMPARED_FIELDS: Final = {
    "Discarded": ("error",),
    "Ignored": ("detail",),
    "PolicyOverride": ("error", "line"),
    "LostBlocks": ("error",),
    # Digests of adapters have other names in redacted journals.
    "AdapterLoading": ("adapter", "evicted"),
    "SlotBlocked": ("adapter",),
    "AdapterLost": ("adapter", "error"),
}


_encode: Final = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def compact(value: Any) -> bytes:
    """JSON without spaces, keys sorted; nothing for an empty value."""
    return _encode(value).encode() if value else b""


def facts(before: EngineState, transition: Transition) -> Facts:
    """The decisions of a turn that differ from a steady decode, as JSON types.

    `plans` has one entry for each plan, relative to the one before it: sequences that
    `left` and `joined` [place, run id, row], `num_scheduled_tokens` and
    `max_sampled_tokens` that are not 1, `fills`, `opens`, `slots`, `grows`, `copies`,
    `drafts`, `deferred`, `saves`. `moves`, `loads` (slots of adapters), `finished`,
    `wake` and `reasons` are the rest.
    """
    changes: Facts = {}
    plans: list[Facts] = []
    last = before.inflight[-1] if before.inflight else None
    for command in transition.commands:
        match command:
            case Execute(plan):
                plans.append(_plan_facts(last, plan))
                last = plan
            case Emit(finished=finished) if finished:
                ends = [[f.id, f.sample, f.reason, f.length, f.cached] for f in finished]
                changes.setdefault("finished", []).extend(ends)
            case Move(number, kind, sources, targets):
                moved = [number, kind, _ranges(sources), _ranges(targets)]
                changes.setdefault("moves", []).append(moved)
            case StoreBlocks(number, keys, pages) | FetchBlocks(number, keys, pages):
                moved = [number, command.kind, len(keys), _ranges(flattened(pages))]
                changes.setdefault("moves", []).append(moved)
            case LoadAdapter(slot=slot):
                changes.setdefault("loads", []).append(slot)
            case WakeAt(time):
                changes["wake"] = time
    if plans != [{}]:
        changes["plans"] = plans
    reasons = [_reason(r) for r in transition.reasons if not isinstance(r, Ended)]
    if reasons:
        changes["reasons"] = reasons
    return changes


def _reason(reason: Any) -> list[Any]:
    kind: Any = type(reason)
    values = (getattr(reason, field.name) for field in _columns(kind))
    changes = (list(value) if isinstance(value, tuple) else value for value in values)
    return [name_of(kind), *changes]


@cache
def _columns(kind: Any) -> tuple[Field, ...]:
    """The fields of a reason that are facts."""
    left_out = _UNCOMPARED_FIELDS.get(name_of(kind), ())
    return tuple(field for field in fields_of(kind) if field.wire_name not in left_out)


def columns_of(kind: Any) -> tuple[str, ...]:
    """The names, in journals, of the fields of a reason that are facts."""
    return tuple(field.wire_name for field in _columns(kind))


def _plan_facts(last: Plan | None, plan: Plan) -> Facts:
    changes: Facts = {}
    last_run_ids = last.run_ids if last else ()
    if plan.run_ids != last_run_ids:
        changes = _membership(last_run_ids, plan)
    for name, column in (
        ("num_scheduled_tokens", plan.num_scheduled_tokens),
        ("max_sampled_tokens", plan.max_sampled_tokens),
    ):
        if column.count(1) != len(column):
            changes[name] = [[index, column[index]] for index in _indices_not_one(column)]
    if plan.fills:
        changes["fills"] = [[fill.index, plan.starts[fill.index]] for fill in plan.fills]
    if plan.opens:
        changes["opens"] = [
            [opened.index, *opened.name, *map(_ranges, opened.tables)]
            for opened in plan.opens
        ]
    slots = [[row.index, row.adapter_slot] for row in plan.opens]
    if slots := [entry for entry in slots if entry[1] != NO_SLOT]:
        changes["slots"] = slots
    if plan.grows:
        changes["grows"] = [
            [grow.row, grow.at, _ranges(grow.blocks), *_not_zero(grow.group)]
            for grow in plan.grows
        ]
    if plan.copies:
        changes["copies"] = [
            [copy.source, copy.target, copy.count] for copy in plan.copies
        ]
    if plan.drafts:
        changes["drafts"] = [
            [draft.index, plan.num_scheduled_tokens[draft.index] - 1]
            for draft in plan.drafts
        ]
    if plan.deferred:
        changes["deferred"] = list(plan.deferred)
    if plan.saves:
        changes["saves"] = [_save_facts(save) for save in plan.saves]
    return changes


def _save_facts(save: SaveState) -> list[Any]:
    return [save.index, _ranges(save.pages), *_not_zero(save.inside)]


def _not_zero(number: int) -> list[int]:
    return [number] if number else []


def _membership(last_run_ids: tuple[int, ...], plan: Plan) -> Facts:
    """The run ids that left and joined; all of them, if the others are not in their
    old order.
    """
    old = set(last_run_ids)
    changed = old.symmetric_difference(plan.run_ids)
    left = sorted(map(last_run_ids.index, changed & old))
    joined = sorted(map(plan.run_ids.index, changed - old))
    if less(last_run_ids, left) != less(plan.run_ids, joined):
        return {"run_ids": list(plan.run_ids)}
    rows = [[index, plan.run_ids[index], plan.rows[index]] for index in joined]
    return {"left": [last_run_ids[index] for index in left], "joined": rows}


def _indices_not_one(column: tuple[int, ...]) -> Iterator[int]:
    return compress(range(len(column)), map(ne, column, repeat(1)))


def _ranges(numbers: tuple[int, ...]) -> list[list[int]]:
    """Numbers as [first, count] of consecutive ones: tables are mostly that."""
    if len(numbers) == 1:
        return [[numbers[0], 1]]
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ranges = ([number for _, number in run] for _, run in runs)
    return [[members[0], len(members)] for members in ranges]


def extend_digest(digest: bytes, transition: Transition, changes: bytes) -> bytes:
    """The running digest after one more turn, 8 bytes: over the plans' columns and the
    facts.

    `changes` are the facts as JSON, empty if there are none.
    """
    hashed = blake2b(digest, digest_size=8)
    for command in transition.commands:
        if isinstance(command, Execute):
            plan = command.plan
            hashed.update(
                array("q", plan.starts).tobytes() + plan.step.to_bytes(8, "little")
            )
            if changes:
                hashed.update(array("q", plan.rows).tobytes())
    hashed.update(changes)
    return hashed.digest()
