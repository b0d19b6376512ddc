"""Reasons, ends and wake-ups that differ in a replay, in words."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, get_args

from attrs import frozen

from minfer.journal.decisions import Facts, columns_of
from minfer.journal.wire_names import name_of
from minfer.records.messages import Reason
from minfer.records.sequence import SampleId

REASONS: Final[dict[str, Any]] = {name_of(kind): kind for kind in get_args(Reason)}
_MOST_NAMED: Final = 8  # of many, in a sentence
_Reasons = dict[str, Any]  # a reason's fields by their names in journals


@frozen
class Difference:
    """One decision that differs: its subject, then, now, and a sentence about it."""

    what: str
    then: Any  # JSON's own types; samples as [request, sample]
    now: Any
    words: str


def named(sample: SampleId | list[Any]) -> str:
    """The name of a sample for people; with its number if it is not the first."""
    number = f" sample {sample[1]}" if sample[1] else ""
    return repr(sample[0]) + number


def listed(parts: Iterable[str], none: str = "none") -> str:
    """A list for people: the first entries, and how many more."""
    every = list(parts)
    text = ", ".join(every[:_MOST_NAMED]) or none
    more = len(every) - _MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text


# --- subjects of each kind of reason ----------------------------------------------------


def _blocked(one: _Reasons) -> str:
    text = f"{_who(one)} for {one['cause']}"
    if not one["needs"]:
        return text
    return f"{text} ({one['needs']} needed, {one['available']} available)"


def _preempted(one: _Reasons) -> str:
    who, by = [one["id"], one["sample"]], one["by"]
    return f"{named(who)} for {'itself' if by == who else named(by)}"


def _missed(one: _Reasons) -> str:
    return f"{_who(one)} from block {one['block']} of {one['blocks']} on"


def _window_missed(one: _Reasons) -> str:
    return f"{_who(one)}: block {one['block']} in group {one['group']}"


def _who(one: _Reasons) -> str:
    return named((one["id"], one["sample"]))


def _fields(one: _Reasons) -> str:
    return " ".join(f"{name} {value}" for name, value in one.items())


@frozen
class _Phrases:
    """The words for a kind of reason: what was done, to which sample."""

    verb: str
    whom: Callable[[_Reasons], str]


_WORDS: Final = {
    "Admitted": _Phrases("admitted", _who),
    "Preempted": _Phrases("preempted", _preempted),
    "QueueBlocked": _Phrases("blocked", _blocked),
    "Missed": _Phrases("missed the prefix of", _missed),
    "WindowMissed": _Phrases("missed blocks of a window of", _window_missed),
    "Discarded": _Phrases("discarded", _fields),
    "Ignored": _Phrases("ignored", _fields),
    "PolicyOverride": _Phrases("overruled the policy in", _fields),
}


def reasons(then: Facts, now: Facts) -> Iterator[Difference]:
    """Differences of reasons, kind by kind: of the samples, and if those agree, of the
    figures.
    """
    was, is_ = _by_kind(then), _by_kind(now)
    if was.get("Admitted") != is_.get("Admitted"):  # misses follow from it
        for missed in ("Missed", "WindowMissed"):
            was.pop(missed, None)
            is_.pop(missed, None)
    for kind in dict.fromkeys((*_WORDS, *was, *is_)):
        old, new = was.get(kind, []), is_.get(kind, [])
        if old == new:
            continue
        words = _WORDS.get(kind, _Phrases(kind, _fields))
        whom, others = [*map(words.whom, old)], [*map(words.whom, new)]
        if whom == others:
            yield from _figures(words, old, new)
        else:
            facts = f"then {words.verb} {listed(whom)}, now {listed(others)}"
            yield Difference(words.verb, old, new, facts)


def _figures(
    words: _Phrases, old: list[_Reasons], new: list[_Reasons]
) -> Iterator[Difference]:
    """Differences of figures for the same sample."""
    for one, other in zip(old, new, strict=True):
        odd = [name for name in one if one[name] != other[name]]
        if odd:
            was = ", ".join(f"{name} {one[name]}" for name in odd)
            now = ", ".join(f"{name} {other[name]}" for name in odd)
            what = f"{words.verb} {words.whom(one)}"
            facts = f"{what}: then with {was}, now with {now}"
            yield Difference(what, one, other, facts)


def _by_kind(facts: Facts) -> dict[str, list[_Reasons]]:
    found: dict[str, list[_Reasons]] = {}
    for kind, *parts in facts.get("reasons", ()):
        names = columns_of(REASONS[kind])
        found.setdefault(kind, []).append(dict(zip(names, parts, strict=True)))
    return found


# --- ends and wake-ups ------------------------------------------------------------------


def ends(then: Facts, now: Facts) -> Iterator[Difference]:
    """Ends that are on one side only."""
    old, new = then.get("finished", []), now.get("finished", [])
    if old != new:
        words = f"then ended {_ended(old, new)}, now {_ended(new, old)}"
        yield Difference("ended", old, new, words)


def _ended(some: list[Any], others: list[Any]) -> str:
    """Those of `some` that are not among `others`."""
    odd = (end for end in some if end not in others)
    return listed(f"{named(end)} ({end[2]}, {end[3]} tokens)" for end in odd)


def wakes(then: Facts, now: Facts) -> Iterator[Difference]:
    """Differences of the times at which the engine requested a wake-up."""
    old, new = then.get("wake"), now.get("wake")
    if old != new:
        words = f"then asked to be woken {_when(old)}, now {_when(new)}"
        yield Difference("asked to be woken", old, new, words)


def moves(then: Facts, now: Facts) -> Iterator[Difference]:
    """Differences of the transfers that began."""
    old, new = then.get("moves", []), now.get("moves", [])
    if old != new:
        words = f"then began {_transfers(old)}, now {_transfers(new)}"
        yield Difference("began transfers", old, new, words)


def _transfers(some: list[Any]) -> str:
    kinds = {True: "load", False: "store", "stored": "save", "fetched": "fetch"}
    return listed([f"{kinds[loads]} {number}" for number, loads, *_ in some], "none")


def _when(time: float | None) -> str:
    return "not at all" if time is None else f"at {time} s"
