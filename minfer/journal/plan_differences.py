"""Plans that differ in a replay, rebuilt from facts, and described in words.

A plan's facts are relative to the plan before it; the first of a turn follows the last in
flight. From that one on each plan is rebuilt under the names of samples, then and now,
and compared row by row.
"""

from collections.abc import Iterator
from typing import Any, Final

from attrs import define, field

from minfer.journal.decisions import Facts
from minfer.journal.differences import Difference, listed, named
from minfer.records.state import EngineState

# The figures of a row, in the order of the description, and their values if there are no
# facts.
_COLUMNS: Final[dict[str, int | None]] = {
    "drafts": 0,
    "input tokens": 1,
    "tokens at most": 1,
    "first position": None,
    "device row": None,
    "blocks": None,
    "new blocks": None,
}


@define
class PlanBatch:
    """A plan under names: the figures of each row, by sample."""

    rows: dict[str, dict[str, Any]] = field(factory=dict)
    rest: Facts = field(factory=dict)  # facts about the whole plan


def plans(before: EngineState, then: Facts, now: Facts) -> Iterator[Difference]:
    """The differences in the first plan that differs."""
    old, new = batches(before, then), batches(before, now)
    first = before.next_step
    for number, (one, other) in enumerate(zip(old, new, strict=False), first):
        found = [*_members(f"step {number}", one, other)]
        found += _figures(f"step {number}", one, other)
        found += _whole(f"step {number}", one, other)
        if found:
            yield from found
            return
    if len(old) != len(new):
        words = f"then planned {_steps(first, old)}, now {_steps(first, new)}"
        yield Difference("planned", len(old), len(new), words)


def _steps(first: int, planned: list[PlanBatch]) -> str:
    return listed((f"step {first + at}" for at in range(len(planned))), "no step")


# --- rebuilding -------------------------------------------------------------------------


def batches(before: EngineState, facts: Facts) -> list[PlanBatch]:
    """The plans of these facts, rebuilt from the one before them."""
    run = before.running
    names = {gen: named(name) for gen, name in zip(run.run_ids, run.ids, strict=True)}
    rows = dict(zip(run.run_ids, run.rows, strict=True))
    gens = list(before.inflight[-1].run_ids) if before.inflight else []
    made = []
    # no facts: one plan, equal to the one before it
    for plan in facts.get("plans", [{}]):
        gone = set(plan.get("left", ()))
        gens = list(plan.get("run_ids", [gen for gen in gens if gen not in gone]))
        for at, gen, row in plan.get("joined", ()):
            gens.insert(at, gen)
            rows[gen] = row
        for at, name, sample, *_ in plan.get("opens", ()):
            names[gens[at]] = named((name, sample))
        members = [names.get(gen, f"generation {gen}") for gen in gens]
        made.append(_batch(plan, members, [rows.get(gen) for gen in gens]))
    return made


def _batch(plan: Facts, names: list[str], rows: list[int | None]) -> PlanBatch:
    """A plan's facts by name; `names` and `rows` are in batch order."""
    batch = PlanBatch()
    for name, row in zip(names, rows, strict=True):
        batch.rows[name] = {"device row": row}
    for fact, what in (
        ("drafts", "drafts"),
        ("num_scheduled_tokens", "input tokens"),
        ("max_sampled_tokens", "tokens at most"),
        ("fills", "first position"),
    ):
        for at, value in plan.get(fact, ()):
            batch.rows[names[at]][what] = value
    for at, _, _, *tables in plan.get("opens", ()):
        for group, table in enumerate(tables):
            batch.rows[names[at]][_of_group("blocks", group)] = table
    owner = dict(zip(rows, names, strict=True))
    for row, at, blocks, *group in plan.get("grows", ()):
        name = owner.get(row, f"device row {row}")
        what = _of_group("new blocks", *group)
        grown = {"from entry": at, "blocks": blocks}
        batch.rows.setdefault(name, {})[what] = grown
    batch.rest = {"copies": plan.get("copies", [])}
    return batch


def _of_group(what: str, group: int = 0) -> str:
    """A figure's name, of any group of layers but the first."""
    return f"{what} of layer group {group}" if group else what


# --- comparing --------------------------------------------------------------------------


def _members(step: str, old: PlanBatch, new: PlanBatch) -> Iterator[Difference]:
    """Rows that are in a plan on one side only; else, differences of their order."""
    gone = [name for name in old.rows if name not in new.rows]
    come = [name for name in new.rows if name not in old.rows]
    if gone or come:
        words = f"{step}: then with {listed(gone, 'no others')}, now with "
        words += listed(come, "none instead" if gone else "none")
        yield Difference(f"{step}: rows", gone, come, words)
    elif [*old.rows] != [*new.rows]:
        words = f"{step}: then in the order {listed(old.rows)}, now {listed(new.rows)}"
        yield Difference(f"{step}: order", [*old.rows], [*new.rows], words)


def _figures(step: str, old: PlanBatch, new: PlanBatch) -> Iterator[Difference]:
    """Differences of the rows that are in it on both sides, column by column."""
    both = [name for name in old.rows if name in new.rows]
    figures = (name for side in (old, new) for row in side.rows.values() for name in row)
    for what in dict.fromkeys((*_COLUMNS, *figures)):
        default = _COLUMNS.get(what)
        was = {name: old.rows[name].get(what, default) for name in both}
        now = {name: new.rows[name].get(what, default) for name in both}
        odd = [name for name in both if was[name] != now[name]]
        if odd:
            was = {name: was[name] for name in odd}
            now = {name: now[name] for name in odd}
            words = f"{step}: {what}: then {_column(was)}, now {_column(now)}"
            yield Difference(f"{step}: {what}", was, now, words)


def _whole(step: str, old: PlanBatch, new: PlanBatch) -> Iterator[Difference]:
    """Differences of the whole plan."""
    for what, was in old.rest.items():
        now = new.rest[what]
        if was != now:
            words = f"{step}: {what}: then {_rest(was)}, now {_rest(now)}"
            yield Difference(f"{step}: {what}", was, now, words)


def _column(figures: dict[str, Any]) -> str:
    return listed(f"{_value(value)} for {name}" for name, value in figures.items())


def _rest(value: Any) -> str:
    """The copies of a plan."""
    return listed((f"block {a} to {b} ({n} positions)" for a, b, n in value), "none")


def _value(value: Any) -> str:
    """A figure of a row; blocks as ranges."""
    if isinstance(value, dict):
        return f"{_value(value['blocks'])} from entry {value['from entry']}"
    if isinstance(value, list):
        runs = [
            f"{one[0]}-{one[0] + one[1] - 1}" if one[1] > 1 else str(one[0])
            for one in value
        ]
        return " ".join(runs) or "none"
    return "none" if value is None else str(value)
