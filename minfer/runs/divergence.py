"""What a replay decided otherwise, in words: who, what then, and what now.

Theory. Facts (`minfer.runs.decisions`) speak in places, generations and device rows, and
a plan's only say how it differs from the plan before. Both sides of a divergence took the
same turn in the same state, so the state tells which generation is whose sequence, and
from the plan before them both can be put together again, row by row, under request ids.
What differs then is told in the order in which it was decided: who was let in, held,
preempted; who ended; and of the plans the first that differs, since later ones follow
from it.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, get_args

from attrs import define, field, frozen

from minfer.messages import Reason
from minfer.runs.decisions import Facts, columns_of
from minfer.sequence import SampleId
from minfer.state import EngineState

_REASONS: Final[dict[str, Any]] = {kind.__name__: kind for kind in get_args(Reason)}
_ORDER: Final = ("reasons", "finished", "wake", "plans")  # in which facts are compared
_MOST_NAMED: Final = 8  # of many, in a sentence
_SHORT: Final = 300  # characters of a fact in a message
_DIGEST_ONLY: Final = "positions or rows of a plan (known by digest)"

LEGEND: Final = {
    "finished": "[request, sample, reason, output tokens, cached tokens of its prompt]",
    "wake": "seconds",
    "plans": "one entry for each step planned, as far as it differs from the one before",
    "gens": "generations, in batch order",
    "left": "generations",
    "joined": "[place in the batch, generation, device row]",
    "counts": "[place in the batch, input tokens], where not 1",
    "most": "[place in the batch, tokens it may yield], where not 1",
    "fills": "[place in the batch, position of the first of its inputs from history]",
    "opens": "[place in the batch, request, sample, table as [first block, how many]]",
    "grows": "[device row, entry of its table, new blocks as [first block, how many]]",
    "copies": "[block, to block, positions]",
    "repeat": "forwards",
    "drafts": "[place in the batch, tokens to verify]",
    "moves": "[tier, block, to tier, to block]",
    "apart": "places in the batch of rows that are sampled apart",
}


@frozen
class Difference:
    """One decision that was another: what it is about, then, now, and all that as a
    sentence.
    """

    what: str
    then: Any  # JSON's own types; samples as [request, sample]
    now: Any
    words: str


@frozen
class Divergence:
    """The first turn whose decisions are not the recorded ones."""

    turn: int
    step: int  # the first step planned in that turn, or that would have been
    time: float  # seconds
    field: str  # the first fact that differs, and its innermost part
    expected: Any  # what was recorded; None if only its digest was
    found: Any
    differences: tuple[Difference, ...] = ()
    legend: str = ""  # what the columns of `expected` and `found` are

    def __str__(self) -> str:
        what = f"turn {self.turn} (step {self.step}, {self.time:.6f} s) decides otherwise"
        if self.differences:
            return f"{what}: {'; '.join(one.words for one in self.differences)}"
        return (
            f"{what}: {self.field} was {_short(self.expected)}, is {_short(self.found)}"
        )


def diverged(
    number: int, before: EngineState, time: float, expected: Facts, found: Facts
) -> Divergence:
    """How turn `number`, taken in `before`, differs: by its recorded facts and those
    found now.
    """
    found = json.loads(json.dumps(found))
    name = next((name for name in _ORDER if expected.get(name) != found.get(name)), None)
    if name is None:
        what = f"{_DIGEST_ONLY}, or turns are missing or out of order"
        return Divergence(number, before.next_step, time, what, None, None)
    path, was, now = _innermost(name, expected.get(name), found.get(name))
    try:
        differences = _differences(before, expected, found)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # facts that no engine has written
        differences = ()
    legend = _legend(path, was, now)
    return Divergence(number, before.next_step, time, path, was, now, differences, legend)


def _innermost(path: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    """The innermost place in which two JSON values differ first."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                return _innermost(f"{path}.{key}", was.get(key), now.get(key))
    if (
        isinstance(was, list)
        and isinstance(now, list)
        and was
        and now
        and path != "reasons"
    ):
        for at, (one, other) in enumerate(zip(was, now, strict=False)):
            if one != other and isinstance(one, dict):
                return _innermost(f"{path}[{at}]", one, other)
    return path, was, now


def _legend(path: str, was: Any, now: Any) -> str:
    """What the columns of a fact are."""
    if path == "reasons":
        told = json.dumps([was, now])
        kinds = [kind for kind in _REASONS if f'["{kind}"' in told]
        return "; ".join(
            f"[{', '.join((kind, *columns_of(_REASONS[kind])))}]" for kind in kinds
        )
    return LEGEND.get(path.rpartition(".")[2].partition("[")[0], "")


def _short(value: Any) -> str:
    text = "nothing out of the ordinary" if value is None else json.dumps(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def _differences(before: EngineState, then: Facts, now: Facts) -> tuple[Difference, ...]:
    return (
        *_reasons(then, now),
        *_ends(then, now),
        *_wakes(then, now),
        *_plans(before, then, now),
    )


# --- reasons and ends -------------------------------------------------------------------


def _named(sample: SampleId | list[Any]) -> str:
    """A sample for people; its number if it is not the first."""
    return repr(sample[0]) + (f" sample {sample[1]}" if sample[1] else "")


def _listed(parts: Iterable[str], nobody: str = "nobody") -> str:
    every = list(parts)
    more = len(every) - _MOST_NAMED
    return (", ".join(every[:_MOST_NAMED]) or nobody) + (
        f" and {more} more" if more > 0 else ""
    )


def _held(one: dict[str, Any]) -> str:
    blocks = (
        f" ({one['needs']} needed, {one['available']} available)" if one["needs"] else ""
    )
    return f"{_named((one['id'], one['sample']))} for {one['cause']}{blocks}"


def _preempted(one: dict[str, Any]) -> str:
    who, by = [one["id"], one["sample"]], one["by"]
    return f"{_named(who)} for {'itself' if by == who else _named(by)}"


def _missed(one: dict[str, Any]) -> str:
    who = _named((one["id"], one["sample"]))
    return f"{who} from block {one['block']} of {one['blocks']} on"


def _who(one: dict[str, Any]) -> str:
    return _named((one["id"], one["sample"]))


def _fields(one: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in one.items())


# A kind of reason -> what was done, and to whom.
_VERBS: Final[dict[str, tuple[str, Callable[[dict[str, Any]], str]]]] = {
    "Admitted": ("admitted", _who),
    "Preempted": ("preempted", _preempted),
    "Held": ("held", _held),
    "Missed": ("missed the prefix of", _missed),
    "Voided": ("voided", _fields),
    "Ignored": ("ignored", _fields),
    "Overruled": ("overruled the policy in", _fields),
}


def _reasons(then: Facts, now: Facts) -> Iterable[Difference]:
    """Reasons kind by kind: for whom, and if that is the same, with what figures."""
    was, is_ = _by_kind(then), _by_kind(now)
    if was.get("Admitted") != is_.get("Admitted"):  # from which what they missed follows
        for side in (was, is_):
            side.pop("Missed", None)
    for kind in [
        kind for kind in (*_VERBS, *was, *is_) if was.get(kind) != is_.get(kind)
    ]:
        verb, told = _VERBS.get(kind, (kind, _fields))
        old, new = was.pop(kind, []), is_.pop(kind, [])
        if [told(one) for one in old] != [told(one) for one in new]:
            words = (
                f"then {verb} {_listed(map(told, old))}, now {_listed(map(told, new))}"
            )
            yield Difference(verb, old, new, words)
            continue
        for one, other in zip(old, new, strict=True):
            parts = [name for name in one if one[name] != other[name]]
            if parts:
                figures = [
                    ", ".join(f"{part} {side[part]}" for part in parts)
                    for side in (one, other)
                ]
                words = (
                    f"{verb} {told(one)}: then with {figures[0]}, now with {figures[1]}"
                )
                yield Difference(f"{verb} {told(one)}", one, other, words)


def _by_kind(told: Facts) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, *parts in told.get("reasons", ()):
        names = columns_of(_REASONS[kind])
        found.setdefault(kind, []).append(dict(zip(names, parts, strict=True)))
    return found


def _ends(then: Facts, now: Facts) -> Iterable[Difference]:
    old, new = then.get("finished", []), now.get("finished", [])
    if old != new:

        def told(ends: list[Any], others: list[Any]) -> str:
            parts = (
                f"{_named(end)} ({end[2]}, {end[3]} tokens)"
                for end in ends
                if end not in others
            )
            return _listed(parts)

        words = f"then ended {told(old, new)}, now {told(new, old)}"
        yield Difference("ended", old, new, words)


def _wakes(then: Facts, now: Facts) -> Iterable[Difference]:
    old, new = then.get("wake"), now.get("wake")
    if old != new:
        told = ["not at all" if time is None else f"at {time} s" for time in (old, new)]
        words = f"then asked to be woken {told[0]}, now {told[1]}"
        yield Difference("asked to be woken", old, new, words)


# --- plans ------------------------------------------------------------------------------

_COLUMNS: Final = (  # of a row, in the order in which they are told
    "input tokens",
    "tokens at most",
    "first position",
    "device row",
    "blocks",
    "new blocks",
)


@define
class _Batch:
    """A plan under names: for each row, by sample, what is said about it."""

    rows: dict[str, dict[str, Any]] = field(factory=dict)
    rest: Facts = field(factory=dict)  # what is said about the whole


def _plans(before: EngineState, then: Facts, now: Facts) -> Iterable[Difference]:
    """The first plan that differs."""
    old, new = _batches(before, then), _batches(before, now)
    first = before.next_step
    for number, (one, other) in enumerate(zip(old, new, strict=False), first):
        found = list(_rows(f"step {number}", one, other))
        yield from found
        if found:
            return
    if len(old) != len(new):
        told = [
            _listed((f"step {first + at}" for at in range(len(p))), "no step")
            for p in (old, new)
        ]
        words = f"then planned {told[0]}, now {told[1]}"
        yield Difference("planned", len(old), len(new), words)


def _batches(before: EngineState, told: Facts) -> list[_Batch]:
    """The plans that facts are about, put together from the one before them."""
    run = before.running
    names = {gen: _named(name) for gen, name in zip(run.gens, run.ids, strict=True)}
    rows = dict(zip(run.gens, run.rows, strict=True))
    gens = list(before.inflight[-1].gens) if before.inflight else []
    batches = []
    for plan in told.get("plans", [{}]):  # nothing said: one plan, like the one before it
        gone = set(plan.get("left", ()))
        gens = list(plan.get("gens", [gen for gen in gens if gen not in gone]))
        for at, gen, row in plan.get("joined", ()):
            gens.insert(at, gen)
            rows[gen] = row
        for at, name, sample, _ in plan.get("opens", ()):
            names[gens[at]] = _named((name, sample))
        batches.append(
            _batch(
                plan,
                [names.get(gen, f"generation {gen}") for gen in gens],
                [rows.get(gen) for gen in gens],
            )
        )
    return batches


def _batch(plan: Facts, names: list[str], rows: list[int | None]) -> _Batch:
    """A plan's facts by name; `names` and `rows` are in batch order."""
    batch = _Batch(
        {name: {"device row": row} for name, row in zip(names, rows, strict=True)}
    )
    for column, what in (
        ("counts", "input tokens"),
        ("most", "tokens at most"),
        ("fills", "first position"),
    ):
        for at, value in plan.get(column, ()):
            batch.rows[names[at]][what] = value
    for at, _, _, table in plan.get("opens", ()):
        batch.rows[names[at]]["blocks"] = table
    owner = dict(zip(rows, names, strict=True))
    for row, at, blocks in plan.get("grows", ()):
        name = owner.get(row, f"device row {row}")
        batch.rows.setdefault(name, {})["new blocks"] = {
            "from entry": at,
            "blocks": blocks,
        }
    batch.rest = {"forwards": plan.get("repeat", 1), "copies": plan.get("copies", [])}
    return batch


def _rows(step: str, old: _Batch, new: _Batch) -> Iterable[Difference]:
    """What differs between two batches: who is in them, then each row's figures by
    column.
    """
    gone = [name for name in old.rows if name not in new.rows]
    come = [name for name in new.rows if name not in old.rows]
    if gone or come:
        words = f"{step}: then with {_listed(gone, 'nobody else')}, now with "
        words += _listed(come, "nobody instead" if gone else "nobody")
        yield Difference(f"{step}: rows", gone, come, words)
    elif [*old.rows] != [*new.rows]:
        words = f"{step}: then in the order {_listed(old.rows)}, now {_listed(new.rows)}"
        yield Difference(f"{step}: order", [*old.rows], [*new.rows], words)
    both = [name for name in old.rows if name in new.rows]
    for what in _COLUMNS:
        default = 1 if what in ("input tokens", "tokens at most") else None
        pairs = {
            name: (old.rows[name].get(what, default), new.rows[name].get(what, default))
            for name in both
        }
        odd = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if odd:
            sides = [{name: pair[side] for name, pair in odd.items()} for side in (0, 1)]
            told = [
                _listed(f"{_value(v)} for {name}" for name, v in side.items())
                for side in sides
            ]
            words = f"{step}: {what}: then {told[0]}, now {told[1]}"
            yield Difference(f"{step}: {what}", sides[0], sides[1], words)
    for what, was in old.rest.items():
        if was != new.rest[what]:
            told = [_rest(side.rest[what]) for side in (old, new)]
            words = f"{step}: {what}: then {told[0]}, now {told[1]}"
            yield Difference(f"{step}: {what}", was, new.rest[what], words)


def _rest(value: Any) -> str:
    """The forwards or the copies of a plan."""
    if isinstance(value, list):
        return _listed((f"block {a} to {b} ({n} positions)" for a, b, n in value), "none")
    return str(value)


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
