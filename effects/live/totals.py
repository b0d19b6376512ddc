"""An engine's counts and histograms so far: folds over its transitions.

Each sample of a request counts. A fold costs some microseconds a turn: while the same
samples get tokens in every turn, all of them share one record of their last output.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import compress
from operator import add
from typing import Final

from attrs import define, frozen

from minfer.analysis.drafts import StepDrafts
from minfer.records.messages import (
    AdapterLoading,
    AdapterLost,
    Admitted,
    Command,
    Discarded,
    Emit,
    Execute,
    Loading,
    LostBlocks,
    PolicyOverride,
    Preempted,
    Reason,
    Recomputing,
)
from minfer.records.plan import Yields
from minfer.records.sequence import SampleId, SampleIds
from minfer.records.state import Transition
from minfer.records.tiers import TransferKind

COUNTERS: Final = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "kv_host_loaded_blocks",
    "kv_host_recomputed_blocks",
    "kv_host_lost_blocks",
    "kv_keyed_loaded_blocks",
    "kv_keyed_recomputed_blocks",
    "kv_keyed_lost_blocks",
    "adapter_loads",
    "failed_adapter_loads",
    "failed_steps",
    "overruled_policy_answers",
    "spec_decode_num_drafts",  # steps of a sample in which it had drafts
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
# Accepted drafts by place in a row, from 0: a count's name is this, and the place.
ACCEPTED_PER_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos "
TTFT: Final = "time_to_first_token_seconds"
ITL: Final = "inter_token_latency_seconds"
STEP_TOKENS: Final = "iteration_tokens_total"  # tokens of a step's plan
# Upper bounds, from 1 ms to 5,000 s and from 1 to 5,000,000 tokens.
SECONDS_BOUNDS: Final = tuple(m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5))
TOKENS_BOUNDS: Final = tuple(m * 10.0**e for e in range(7) for m in (1, 2, 5))


@frozen
class Histogram:
    """The number of values, by size."""

    bounds: tuple[float, ...]  # upper ones, ascending
    counts: tuple[int, ...]  # up to each bound, from the one before; then above all
    total: float  # the sum of the values

    def plus(self, other: "Histogram") -> "Histogram":
        """Returns the values of both, which have the same bounds."""
        counts = tuple(map(add, self.counts, other.counts))
        return Histogram(self.bounds, counts, self.total + other.total)


@frozen
class Totals:
    """All counts at a moment, by name."""

    counts: Mapping[str, float]
    histograms: Mapping[str, Histogram]


NO_TOTALS: Final = Totals({}, {})


def sum_totals(all_totals: Iterable[Totals]) -> Totals:
    """Returns the sum of several totals."""
    counts = Counter[str]()
    histograms: dict[str, Histogram] = {}
    for totals in all_totals:
        counts.update(totals.counts)
        for name, histogram in totals.histograms.items():
            before = histograms.get(name)
            histograms[name] = histogram if before is None else before.plus(histogram)
    return Totals(counts, histograms)


class HistogramBuilder:
    """A histogram that is being filled."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def histogram(self) -> Histogram:
        """Returns the histogram of all values so far."""
        return Histogram(self.bounds, tuple(self.counts), self.total)


@define(eq=False)
class _LastOutput:
    """The histogram that the next output of some samples goes to, and the time of their
    last one; samples share it while they get tokens in the same turns.
    """

    name: str  # of a histogram
    time: float


class TotalsCounter:
    """The totals of one engine, kept turn by turn."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.buckets = {
            TTFT: HistogramBuilder(SECONDS_BOUNDS),
            ITL: HistogramBuilder(SECONDS_BOUNDS),
        }
        self.buckets[STEP_TOKENS] = HistogramBuilder(TOKENS_BOUNDS)
        self.last_step_time = 0.0  # when the last step was planned
        self.failing = 0  # steps that failed since the last good one
        self.last: dict[SampleId, _LastOutput] = {}  # its last output, or its arrival
        self.ids: SampleIds | None = None  # exactly these samples share `last_output`
        self.last_output = _LastOutput(ITL, 0.0)

    def totals(self) -> Totals:
        """Returns the totals so far."""
        filled = {name: builder.histogram() for name, builder in self.buckets.items()}
        return Totals(dict(self.counts), filled)

    def count_turn(self, transition: Transition) -> None:
        """Fold a turn."""
        now = transition.state.time
        self._count_commands(transition.commands, now)
        self._count_reasons(transition.reasons, now)

    def count_drafts(self, steps: Iterable[StepDrafts]) -> None:
        """Count a turn's drafts."""
        counts = self.counts
        for step in steps:
            rows_by_counts = Counter(zip(step.proposed, step.accepted, strict=True))
            for (proposed, accepted), rows in rows_by_counts.items():
                counts["spec_decode_num_drafts"] += rows
                counts["spec_decode_num_draft_tokens"] += rows * proposed
                counts["spec_decode_num_accepted_tokens"] += rows * accepted
                for position in range(proposed):
                    name = f"{ACCEPTED_PER_POSITION}{position}"
                    accepted_here = rows if position < accepted else 0
                    counts[name] = counts.get(name, 0) + accepted_here

    def _count_commands(self, commands: Iterable[Command], now: float) -> None:
        for command in commands:
            match command:
                case Emit(ids, tokens, finished):
                    self.counts["generation_tokens"] += sum(map(len, tokens))
                    if ids:
                        self.failing = 0
                    self._count_output_times(ids, tokens, now)
                    for end in finished:
                        self.last.pop((end.id, end.sample), None)
                case Execute(plan):
                    self.last_step_time = now
                    self.buckets[STEP_TOKENS].add(sum(plan.num_scheduled_tokens))
                case _:
                    pass

    def _count_reasons(self, reasons: Iterable[Reason], now: float) -> None:
        counts = self.counts
        for reason in reasons:
            match reason:
                case Admitted(name, sample) if reason.prompt:  # for the first time
                    self.last[name, sample] = _LastOutput(TTFT, now - reason.waited)
                    counts["prefix_cache_queries"] += reason.prompt
                    counts["prefix_cache_hits"] += reason.cached
                    if not sample:  # once a request
                        counts["prompt_tokens"] += reason.prompt
                case Preempted():
                    counts["num_preemptions"] += 1
                case Loading():
                    counts[_tier_counter(reason, "loaded")] += reason.blocks - reason.hit
                case Recomputing():
                    counts[_tier_counter(reason, "recomputed")] += (
                        reason.blocks - reason.hit
                    )
                case AdapterLoading():
                    counts["adapter_loads"] += 1
                case AdapterLost():
                    counts["failed_adapter_loads"] += 1
                case LostBlocks(blocks):
                    counts[_tier_counter(reason, "lost")] += blocks
                case Discarded(plans=plans):
                    counts["failed_steps"] += plans
                    self.failing += plans
                case PolicyOverride():
                    counts["overruled_policy_answers"] += 1
                case _:
                    pass

    def _count_output_times(self, ids: SampleIds, tokens: Yields, now: float) -> None:
        """Count the times since the samples' last outputs, or since they arrived."""
        all_rows = all(tokens)
        if all_rows and ids is self.ids:  # as in the turn before
            self.buckets[ITL].add(now - self.last_output.time, len(ids))
            self.last_output.time = now
            return
        with_tokens = list(compress(ids, tokens))
        for previous, times in Counter(map(self.last.get, with_tokens)).items():
            if previous is not None:
                self.buckets[previous.name].add(now - previous.time, times)
        self.ids = ids if all_rows else None
        self.last_output = _LastOutput(ITL, now)
        self.last.update(dict.fromkeys(with_tokens, self.last_output))


def _tier_counter(reason: Loading | Recomputing | LostBlocks, outcome: str) -> str:
    """Returns the name of a count of a tier's blocks."""
    match reason.kind:
        case TransferKind.STORE_TO_HOST | TransferKind.LOAD_FROM_HOST:
            return f"kv_host_{outcome}_blocks"
        case TransferKind.STORE_TO_EXTERNAL | TransferKind.FETCH_FROM_EXTERNAL:
            return f"kv_keyed_{outcome}_blocks"
