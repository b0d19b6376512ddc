"""The verdict of `minfer explain`: what cost one request most, why, and what to do.

Its time is divided among causes. A wait counts for what the head of the queue waited for;
but if most of the requests admitted meanwhile came later, it counts for them (`ORDER`).
Waits and prefills after a preemption count for the preemption. The part of the first
prefill that the prefix cache could have saved counts for the prefix. A cause is named if
it took a tenth of the time or more.

The time of a prefix that missed is estimated, by its share of the prefill's tokens: a
step also takes time that does not depend on its tokens. It orders the causes, and is not
in the words.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from minfer.effects.runs.explain_misses import lost_tokens, miss_words
from minfer.effects.runs.explain_words import (
    ORDER,
    PREEMPTED,
    PREFIX,
    RECOMPUTED,
    cause_of,
    config_words,
)
from minfer.records.config import EngineConfig
from minfer.values.texts import counted

MIN_SHARE: Final = 0.1  # of the time of a request, for a cause to count
MIN_LATER: Final = 3  # admissions of later requests, for these to be the cause
_ORDINARY: Final = {
    "prefill": "prefill of its prompt",
    "decode": "decode",
    "queued": "waiting for the step before its own",
    "stalled": "running without a step: for a block, for the host, or for a suspect",
    "failed": "steps that failed",
    "before": "time before the journal begins",
}


def verdict(config: EngineConfig, explanation: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on the figures of a request: its causes, those that cost most first,
    with seconds, words and remedy; and the lines that say it.
    """
    samples = explanation["samples"]
    total = sum(sample["upto"] - sample["arrived"] for sample in samples)
    seconds, facts = _seconds_by_cause(explanation)
    words = {**config_words(config), **facts}
    causes = [
        {
            "cause": name,
            "seconds": spent,
            "estimated": name == PREFIX,
            "because": _because(name, words, explanation),
            "remedy": _remedy(name, words, explanation),
        }
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if name == PREFIX or (spent >= MIN_SHARE * total and name not in _ORDINARY)
    ]
    return {"causes": causes, "lines": [*_lines(causes, seconds, total)]}


def _lines(
    causes: list[dict[str, Any]], seconds: Mapping[str, float], total: float
) -> Iterator[str]:
    if not causes:
        longest = max(seconds, key=lambda name: seconds[name], default="")
        share = seconds[longest] / total if total else 0.0
        what = _ORDINARY.get(longest, longest)
        detail = f": {share:.0%} of its time was {what}" if total else ""
        yield f"Verdict: nothing held it up{detail}"
        return
    for i, cause in enumerate(causes):
        title = "Also: " if i else "Verdict: "
        ms = 1000 * cause["seconds"]
        is_shown = ms and not cause["estimated"]
        spent = f"{ms:,.1f} ms of {1000 * total:,.1f} ms: " if is_shown else ""
        yield f"{title}{spent}{cause['because']}"
        if cause["remedy"]:
            yield f"  remedy: {cause['remedy']}"


def _seconds_by_cause(
    explanation: Mapping[str, Any],
) -> tuple[dict[str, float], dict[str, Any]]:
    """The seconds of a request by cause, and what the words say of it."""
    samples = explanation["samples"]
    overtaking = [sample["overtaking"] for sample in samples]
    later, admitted, for_later = (
        sum(counts[key] for counts in overtaking)
        for key in ("later", "admitted", "preempted")
    )
    starved = is_overtaken(later, admitted, for_later)
    seconds: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)  # by what the head of the queue needed
    for part in (part for sample in samples for part in sample["parts"]):
        seconds[_cause_of_part(part, starved=starved)] += part["seconds"]
        if part["kind"] == "line":
            waits[part["cause"]] += part["seconds"]
    prefix = explanation["prefix"]
    if prefix and (lost := lost_tokens(prefix)):
        computed = max(1, prefix["known"] - prefix["hit"])
        saved = seconds["prefill"] * min(1.0, lost / computed)
        seconds["prefill"] -= saved
        seconds[PREFIX] += saved
    levels = [level for counts in overtaking for level in counts["priorities"] or ()]
    facts = {
        "later": later,
        "admitted": admitted,
        "times": counted(sum(sample["preempted"] for sample in samples), "time"),
        "priority": explanation["priority"],
        "priorities": (min(levels), max(levels)) if levels else None,
        "head": max(waits, key=lambda cause: waits[cause], default=""),
    }
    return dict(seconds), facts


def is_overtaken(later: int, admitted: int, preempted_for_later: int) -> bool:
    """Whether a request waited because of later ones: they are most of those that went
    first, or it was preempted for one of them.
    """
    return preempted_for_later > 0 or (later >= MIN_LATER and 2 * later > admitted)


def _cause_of_part(part: Mapping[str, Any], *, starved: bool) -> str:
    kind = part["kind"]
    if kind == "recompute":
        return RECOMPUTED if starved else PREEMPTED
    if kind != "line":
        return str(kind)
    if starved:
        return ORDER
    return PREEMPTED if part["preempted"] else str(part["cause"])


def _because(name: str, words: Mapping[str, Any], explanation: Mapping[str, Any]) -> str:
    if name == PREFIX:
        return miss_words(explanation["prefix"]).because
    text = cause_of(name).because.format(cause=name, **words)
    if name != ORDER:
        return text
    if words["priorities"] is None or not words["by_priority"]:
        return text
    low, high = words["priorities"]
    levels = f"{low}" if low == high else f"{low} to {high}"
    if low == high == words["priority"]:
        return text
    own = words["priority"]
    return f"{text}; their priority was {levels}, its own {own} (lower goes first)"


def _remedy(name: str, words: Mapping[str, Any], explanation: Mapping[str, Any]) -> str:
    if name == PREFIX:
        return miss_words(explanation["prefix"]).remedy
    remedy = cause_of(name).remedy.format(**words)
    if name == ORDER and (room := cause_of(words["head"]).remedy.format(**words)):
        return f"{remedy}; or {room}"  # nobody goes first where none must wait
    return remedy
