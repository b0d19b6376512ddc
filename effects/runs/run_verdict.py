"""The verdict on whole runs, above the list of `minfer explain`: what cost most, why, and
what to do.

Waits of all requests are added by cause. A request counts as overtaken if most of those
that were admitted while it waited had arrived later (`explain_verdict.is_overtaken`).
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from minfer.effects.runs.explain_list import ListedRequest
from minfer.effects.runs.explain_misses import (
    MIN_LOST_SHARE,
    SAME_BEGINNING,
    whole_blocks,
)
from minfer.effects.runs.explain_verdict import MIN_SHARE
from minfer.effects.runs.explain_words import ORDER, cause_of, config_words
from minfer.records.config import EngineConfig
from minfer.values.texts import counted


@frozen
class Finding:
    """What cost requests time."""

    seconds: float
    because: str
    remedy: str


def run_verdict(config: EngineConfig, listed: Sequence[ListedRequest]) -> Iterator[str]:
    """The verdict on the requests of runs of one configuration, line by line."""
    overtaken = [request for request in listed if request.is_overtaken]
    others = [request for request in listed if not request.is_overtaken]
    findings = [
        *_overtaken(config, overtaken),
        *_waits(config, others, "the other " if overtaken else ""),
        *_near_misses(config, listed),
        *_misses_in_blocks(config, listed),
    ]
    findings.sort(key=lambda finding: -finding.seconds)
    if not findings and listed:
        yield "Verdict: nothing held requests up"
    for i, finding in enumerate(findings):
        yield f"{'Also' if i else 'Verdict'}: {finding.because}"
        if finding.remedy:
            yield f"  remedy: {finding.remedy}"


def _overtaken(
    config: EngineConfig, requests: Sequence[ListedRequest]
) -> Iterator[Finding]:
    """Requests that others overtook."""
    if not requests:
        return
    words = config_words(config, "its" if len(requests) == 1 else "their")
    worst = max(requests, key=lambda request: request.waited)
    sums = {
        "later": sum(request.later for request in requests),
        "admitted": sum(request.admitted for request in requests),
    }
    cause = cause_of(ORDER)
    because = cause.because.format(**words, **sums)
    levels = sorted({request.priority for request in requests})
    priorities = f" of priority {levels[0]}" if len(levels) == 1 else ""
    yield Finding(
        sum(request.waited for request in requests),
        f"{counted(len(requests), 'request')}{priorities} waited up to "
        f"{1000 * worst.waited:,.1f} ms ({worst.id!r}): {because}",
        cause.remedy.format(**words),
    )


def _waits(
    config: EngineConfig, requests: Sequence[ListedRequest], other: str
) -> Iterator[Finding]:
    """What requests waited for, where that was a good part of their time; `other`: in
    words, if others are reported apart.
    """
    words = config_words(config)
    who = f"{other}{counted(len(requests), 'request')}" if other else "requests"
    whose = "its" if other and len(requests) == 1 else "their"
    total = sum(request.lasted for request in requests)
    seconds: dict[str, float] = {}
    for request in requests:
        for cause, spent in request.waits.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
    preempted = sum(request.preempted for request in requests)
    for name, spent in seconds.items():
        if spent and spent >= MIN_SHARE * total:
            meant = cause_of(name)
            times = f"; {counted(preempted, 'preemption')}" if name == "blocks" else ""
            yield Finding(
                spent,
                f"{who} waited {spent / total:.0%} of {whose} time: "
                f"{meant.because.format(cause=name, **words)}{times}",
                meant.remedy.format(**words),
            )


def _near_misses(
    config: EngineConfig, listed: Sequence[ListedRequest]
) -> Iterator[Finding]:
    """Prompts that are another's but for one token, and what that cost."""
    missed = [request for request in listed if request.near]
    if missed:
        lost = {
            request.id: whole_blocks(request.near_end, config.block_size) - request.hit
            for request in missed
        }
        worst = max(missed, key=lambda request: lost[request.id])
        differ = "prompt differs" if len(missed) == 1 else "prompts differ"
        yield Finding(
            _seconds_of_prefill(missed, lost),
            f"{len(missed):,} {differ} from another in one token, as {worst.id!r} from "
            f"{worst.near!r} in token {worst.near_at:,} (counted from 0): up to "
            f"{sum(lost.values()):,} tokens were computed instead of cached",
            SAME_BEGINNING,
        )


def _misses_in_blocks(
    config: EngineConfig, listed: Sequence[ListedRequest]
) -> Iterator[Finding]:
    """Prompts that share most of a block with another, which is therefore no hit."""
    size, lost = config.block_size, dict[str, int]()
    for request in listed:
        shared = min(request.shared, request.prompt - 1) - request.hit
        computed = request.prompt - request.hit
        is_close = size / 2 <= shared < size and shared >= MIN_LOST_SHARE * computed
        is_there = request.hit + size <= request.prompt  # the block that was missed
        if is_close and is_there and not request.near:
            lost[request.id] = shared
    if missed := [request for request in listed if request.id in lost]:
        worst = max(missed, key=lambda request: lost[request.id])
        missing = size - lost[worst.id]
        tokens = "one token" if missing == 1 else f"{missing:,} tokens"
        miss = "prompt misses" if len(missed) == 1 else "prompts miss"
        yield Finding(
            _seconds_of_prefill(missed, lost),
            f"{len(missed):,} {miss} a block of {size} tokens by less than half of it, "
            f"as {worst.id!r} by {tokens}: it shares {worst.shared:,} tokens with "
            f"{worst.shared_with!r}, of which {worst.hit:,} were cached; "
            f"{sum(lost.values()):,} shared tokens were computed again",
            f"use smaller blocks (--block-size below {size}), or make the beginning that "
            "prompts share longer",
        )


def _seconds_of_prefill(
    missed: Sequence[ListedRequest], lost: Mapping[str, int]
) -> float:
    """About how long it took to compute the `lost` tokens of requests."""
    return sum(
        max(0.0, (request.first or 0.0) - request.waited)
        * min(1.0, lost[request.id] / max(1, request.prompt - request.hit))
        for request in missed
    )
