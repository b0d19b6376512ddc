"""Plans that differ in a replay, rebuilt from facts, and described in words.

A plan's facts are relative to the plan before it; the first of a turn follows the last in
flight. From that one on each plan is rebuilt under the names of samples, then and now,
and compared row by row.
"""

from collections.abc import Iterator
from typing import Any, Final

from attrs import define, field

from minfer.journal.decisions import Facts
from minfer.journal.differences import Difference, join_texts, sample_name
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
    "saved state": None,
    "adapter slot": None,
}


@define
class PlanBatch:
    """A plan under names: the figures of each row, by sample."""

    rows: dict[str, dict[str, Any]] = field(factory=dict)
    rest: Facts = field(factory=dict)  # facts about the whole plan


def plans(before: EngineState, recorded: Facts, replayed: Facts) -> Iterator[Difference]:
    """The differences in the first plan that differs."""
    old, new = rebuild_plans(before, recorded), rebuild_plans(before, replayed)
    first = before.next_step
    for number, (old_batch, new_batch) in enumerate(zip(old, new, strict=False), first):
        differences = [*_members(f"step {number}", old_batch, new_batch)]
        differences += _figures(f"step {number}", old_batch, new_batch)
        differences += _whole(f"step {number}", old_batch, new_batch)
        if differences:
            yield from differences
            return
    if len(old) != len(new):
        words = f"then planned {_steps(first, old)}, now {_steps(first, new)}"
        yield Difference("planned", len(old), len(new), words)


def _steps(first: int, planned: list[PlanBatch]) -> str:
    return join_texts(
        (f"step {first + offset}" for offset in range(len(planned))), "no step"
    )


# --- rebuilding -------------------------------------------------------------------------


def rebuild_plans(before: EngineState, facts: Facts) -> list[PlanBatch]:
    """The plans of these facts, rebuilt from the one before them."""
    run = before.running
    names = dict(zip(run.run_ids, map(sample_name, run.ids), strict=True))
    rows = dict(zip(run.run_ids, run.rows, strict=True))
    run_ids = list(before.inflight[-1].run_ids) if before.inflight else []
    rebuilt = []
    # no facts: one plan, equal to the one before it
    for plan in facts.get("plans", [{}]):
        left = set(plan.get("left", ()))
        remaining = [run_id for run_id in run_ids if run_id not in left]
        run_ids = list(plan.get("run_ids", remaining))
        for index, run_id, row in plan.get("joined", ()):
            run_ids.insert(index, run_id)
            rows[run_id] = row
        for index, name, sample, *_ in plan.get("opens", ()):
            names[run_ids[index]] = sample_name((name, sample))
        members = [names.get(run_id, f"generation {run_id}") for run_id in run_ids]
        rebuilt.append(_batch(plan, members, [rows.get(run_id) for run_id in run_ids]))
    return rebuilt


def _batch(plan: Facts, names: list[str], rows: list[int | None]) -> PlanBatch:
    """A plan's facts by name; `names` and `rows` are in batch order."""
    batch = PlanBatch()
    for name, row in zip(names, rows, strict=True):
        batch.rows[name] = {"device row": row}
    for fact, figure in (
        ("drafts", "drafts"),
        ("num_scheduled_tokens", "input tokens"),
        ("max_sampled_tokens", "tokens at most"),
        ("fills", "first position"),
        ("slots", "adapter slot"),
    ):
        for index, value in plan.get(fact, ()):
            batch.rows[names[index]][figure] = value
    for index, _, _, *tables in plan.get("opens", ()):
        for group, table in enumerate(tables):
            batch.rows[names[index]][_of_group("blocks", group)] = table
    for index, pages, *inside in plan.get("saves", ()):
        batch.rows[names[index]]["saved state"] = pages
        batch.rows[names[index]]["saved inside at"] = inside
    owner = dict(zip(rows, names, strict=True))
    for row, first_entry, blocks, *group in plan.get("grows", ()):
        name = owner.get(row, f"device row {row}")
        figure = _of_group("new blocks", *group)
        grown = {"from entry": first_entry, "blocks": blocks}
        batch.rows.setdefault(name, {})[figure] = grown
    batch.rest = {"copies": plan.get("copies", [])}
    return batch


def _of_group(figure: str, group: int = 0) -> str:
    """A figure's name, of any group of layers but the first."""
    return f"{figure} of layer group {group}" if group else figure


# --- comparing --------------------------------------------------------------------------


def _members(step: str, old: PlanBatch, new: PlanBatch) -> Iterator[Difference]:
    """Rows that are in a plan on one side only; else, differences of their order."""
    left = [name for name in old.rows if name not in new.rows]
    joined = [name for name in new.rows if name not in old.rows]
    if left or joined:
        words = f"{step}: then with {join_texts(left, 'no others')}, now with "
        words += join_texts(joined, "none instead" if left else "none")
        yield Difference(f"{step}: rows", left, joined, words)
    elif [*old.rows] != [*new.rows]:
        words = f"{step}: then in the order {join_texts(old.rows)}"
        words += f", now {join_texts(new.rows)}"
        yield Difference(f"{step}: order", [*old.rows], [*new.rows], words)


def _figures(step: str, old: PlanBatch, new: PlanBatch) -> Iterator[Difference]:
    """Differences of the rows that are in it on both sides, column by column."""
    common = [name for name in old.rows if name in new.rows]
    figures = (name for side in (old, new) for row in side.rows.values() for name in row)
    for figure in dict.fromkeys((*_COLUMNS, *figures)):
        default = _COLUMNS.get(figure)
        old_values = {name: old.rows[name].get(figure, default) for name in common}
        new_values = {name: new.rows[name].get(figure, default) for name in common}
        changed = [name for name in common if old_values[name] != new_values[name]]
        if changed:
            old_values = {name: old_values[name] for name in changed}
            new_values = {name: new_values[name] for name in changed}
            words = f"{step}: {figure}: then {_figures_text(old_values)}"
            words += f", now {_figures_text(new_values)}"
            yield Difference(f"{step}: {figure}", old_values, new_values, words)


def _whole(step: str, old: PlanBatch, new: PlanBatch) -> Iterator[Difference]:
    """Differences of the whole plan."""
    for fact, old_value in old.rest.items():
        new_value = new.rest[fact]
        if old_value != new_value:
            words = f"{step}: {fact}: then {_copies_text(old_value)}"
            words += f", now {_copies_text(new_value)}"
            yield Difference(f"{step}: {fact}", old_value, new_value, words)


def _figures_text(figures: dict[str, Any]) -> str:
    return join_texts(
        f"{_value_text(value)} for {name}" for name, value in figures.items()
    )


def _copies_text(value: Any) -> str:
    """The copies of a plan."""
    return join_texts((f"block {a} to {b} ({n} positions)" for a, b, n in value), "none")


def _value_text(value: Any) -> str:
    """A figure of a row; blocks as ranges."""
    if isinstance(value, dict):
        return f"{_value_text(value['blocks'])} from entry {value['from entry']}"
    if isinstance(value, list):
        runs = [
            f"{run[0]}-{run[0] + run[1] - 1}" if run[1] > 1 else str(run[0])
            for run in value
        ]
        return " ".join(runs) or "none"
    return "none" if value is None else str(value)
