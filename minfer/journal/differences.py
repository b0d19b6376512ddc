"""Reasons, ends and wake-ups that differ in a replay, in words."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, get_args

from attrs import frozen

from minfer.journal.decisions import Facts, columns_of
from minfer.journal.wire_names import name_of
from minfer.records.messages import Reason
from minfer.records.sequence import SampleId

REASONS: Final[dict[str, Any]] = {name_of(kind): kind for kind in get_args(Reason)}
_MAX_LISTED: Final = 8  # of many, in a sentence
_ReasonFields = dict[str, Any]  # a reason's fields by their names in journals


@frozen
class Difference:
    """One decision that differs: its subject, then, now, and a sentence about it."""

    what: str
    then: Any  # JSON's own types; samples as [request, sample]
    now: Any
    words: str


def sample_name(sample: SampleId | list[Any]) -> str:
    """The name of a sample for people; with its number if it is not the first."""
    number = f" sample {sample[1]}" if sample[1] else ""
    return repr(sample[0]) + number


def join_texts(texts: Iterable[str], none: str = "none") -> str:
    """A list for people: the first entries, and how many more."""
    entries = list(texts)
    text = ", ".join(entries[:_MAX_LISTED]) or none
    num_hidden = len(entries) - _MAX_LISTED
    return f"{text} and {num_hidden} more" if num_hidden > 0 else text


# --- subjects of each kind of reason ----------------------------------------------------


def _blocked(reason: _ReasonFields) -> str:
    text = f"{_sample(reason)} for {reason['cause']}"
    if not reason["needs"]:
        return text
    return f"{text} ({reason['needs']} needed, {reason['available']} available)"


def _preempted(reason: _ReasonFields) -> str:
    sample, winner = [reason["id"], reason["sample"]], reason["by"]
    name = "itself" if winner == sample else sample_name(winner)
    return f"{sample_name(sample)} for {name}"


def _missed(reason: _ReasonFields) -> str:
    return f"{_sample(reason)} from block {reason['block']} of {reason['blocks']} on"


def _window_missed(reason: _ReasonFields) -> str:
    return f"{_sample(reason)}: block {reason['block']} in group {reason['group']}"


def _state_missed(reason: _ReasonFields) -> str:
    return f"{_sample(reason)} from block {reason['block']} of {reason['cached']} on"


def _sample(reason: _ReasonFields) -> str:
    return sample_name((reason["id"], reason["sample"]))


def _fields(reason: _ReasonFields) -> str:
    return " ".join(f"{name} {value}" for name, value in reason.items())


@frozen
class _Phrases:
    """The words for a kind of reason: what was done, to which sample."""

    verb: str
    subject: Callable[[_ReasonFields], str]


_PHRASES: Final = {
    "Admitted": _Phrases("admitted", _sample),
    "Preempted": _Phrases("preempted", _preempted),
    "QueueBlocked": _Phrases("blocked", _blocked),
    "Missed": _Phrases("missed the prefix of", _missed),
    "WindowMissed": _Phrases("missed blocks of a window of", _window_missed),
    "StateMissed": _Phrases("missed a state of", _state_missed),
    "Discarded": _Phrases("discarded", _fields),
    "Ignored": _Phrases("ignored", _fields),
    "PolicyOverride": _Phrases("overrode the policy in", _fields),
}


def reasons(recorded: Facts, replayed: Facts) -> Iterator[Difference]:
    """Differences of reasons, kind by kind: of the samples, and if those agree, of the
    figures.
    """
    old_kinds, new_kinds = _by_kind(recorded), _by_kind(replayed)
    if old_kinds.get("Admitted") != new_kinds.get("Admitted"):  # misses follow from it
        for missed in ("Missed", "WindowMissed", "StateMissed"):
            old_kinds.pop(missed, None)
            new_kinds.pop(missed, None)
    for kind in dict.fromkeys((*_PHRASES, *old_kinds, *new_kinds)):
        old, new = old_kinds.get(kind, []), new_kinds.get(kind, [])
        if old == new:
            continue
        phrases = _PHRASES.get(kind, _Phrases(kind, _fields))
        old_subjects = [*map(phrases.subject, old)]
        new_subjects = [*map(phrases.subject, new)]
        if old_subjects == new_subjects:
            yield from _figures(phrases, old, new)
        else:
            facts = f"then {phrases.verb} {join_texts(old_subjects)}"
            facts += f", now {join_texts(new_subjects)}"
            yield Difference(phrases.verb, old, new, facts)


def _figures(
    phrases: _Phrases, old: list[_ReasonFields], new: list[_ReasonFields]
) -> Iterator[Difference]:
    """Differences of figures for the same sample."""
    for old_reason, new_reason in zip(old, new, strict=True):
        changed = [name for name in old_reason if old_reason[name] != new_reason[name]]
        if changed:
            old_figures = ", ".join(f"{name} {old_reason[name]}" for name in changed)
            new_figures = ", ".join(f"{name} {new_reason[name]}" for name in changed)
            subject = f"{phrases.verb} {phrases.subject(old_reason)}"
            facts = f"{subject}: then with {old_figures}, now with {new_figures}"
            yield Difference(subject, old_reason, new_reason, facts)


def _by_kind(facts: Facts) -> dict[str, list[_ReasonFields]]:
    by_kind: dict[str, list[_ReasonFields]] = {}
    for kind, *values in facts.get("reasons", ()):
        names = columns_of(REASONS[kind])
        by_kind.setdefault(kind, []).append(dict(zip(names, values, strict=True)))
    return by_kind


# --- ends and wake-ups ------------------------------------------------------------------


def ends(recorded: Facts, replayed: Facts) -> Iterator[Difference]:
    """Ends that are on one side only."""
    old, new = recorded.get("finished", []), replayed.get("finished", [])
    if old != new:
        words = f"then ended {_ended_text(old, new)}, now {_ended_text(new, old)}"
        yield Difference("ended", old, new, words)


def _ended_text(finished: list[Any], other_finished: list[Any]) -> str:
    """Those of `finished` that are not among `other_finished`."""
    only_here = (end for end in finished if end not in other_finished)
    return join_texts(
        f"{sample_name(end)} ({end[2]}, {end[3]} tokens)" for end in only_here
    )


def wakes(recorded: Facts, replayed: Facts) -> Iterator[Difference]:
    """Differences of the times at which the engine requested a wake-up."""
    old, new = recorded.get("wake"), replayed.get("wake")
    if old != new:
        words = f"then asked to be woken {_time_text(old)}, now {_time_text(new)}"
        yield Difference("asked to be woken", old, new, words)


def moves(recorded: Facts, replayed: Facts) -> Iterator[Difference]:
    """Differences of the transfers that began."""
    old, new = recorded.get("moves", []), replayed.get("moves", [])
    if old != new:
        words = f"then began {_transfers_text(old)}, now {_transfers_text(new)}"
        yield Difference("began transfers", old, new, words)


def loads(recorded: Facts, replayed: Facts) -> Iterator[Difference]:
    """Differences of the slots into which adapters are loaded."""
    old, new = recorded.get("loads", []), replayed.get("loads", [])
    if old != new:
        words = f"then loaded adapters into {_slots_text(old)}, now {_slots_text(new)}"
        yield Difference("loaded adapters", old, new, words)


def _slots_text(slots: list[int]) -> str:
    return join_texts([f"slot {slot}" for slot in slots], "none")


def _transfers_text(transfers: list[Any]) -> str:
    return join_texts([f"{kind} {number}" for number, kind, *_ in transfers], "none")


def _time_text(time: float | None) -> str:
    return "not at all" if time is None else f"at {time} s"
