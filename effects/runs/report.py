"""The figures of a run: latencies, goodput, prefix hits and use, folded over its turns.

The turns may be those of a simulation, a journal or a live engine. Only counts are kept,
and two times for each sample that runs, so a run may be arbitrarily long.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import compress
from operator import add, sub
from typing import Any, Final

from attrs import Factory, define, field

from minfer.analysis.drafts import sample_drafts, tally_of
from minfer.journal.overrides import OverrideCounts
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Emit,
    Ended,
    Execute,
    Finished,
    Preempted,
    Submit,
)
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn
from minfer.simulation.simulate import Arrival
from minfer.simulation.steady import SteadyTurns
from minfer.speculate.tally import NO_DRAFTS, DraftTally

GROUPED: Final = ("client", "priority", "deadline")  # fields of requests
MAX_GROUPS: Final = 16  # values of a field with figures of their own
OTHERS: Final = "(others)"  # the group of all values after them
SPREADS: Final = ("ttft", "tpot", "itl", "e2e")
_MIN_SECONDS: Final = 1e-9  # seconds: the ends of a spread
_MAX_SECONDS: Final = 1e300
_UNSERVED: Final = ("cancelled", "rejected", "error")  # reasons of ends


def _bucket(seconds: float) -> int:
    bounded = min(seconds, _MAX_SECONDS) if seconds > _MIN_SECONDS else _MIN_SECONDS
    return round(1000 * math.log(bounded))


class DurationHistogram(Counter[int]):
    """Durations in buckets a thousandth wide: their percentiles in constant memory."""

    def add(self, seconds: float, times: int = 1) -> None:
        """Add a duration `times` times."""
        self[_bucket(seconds)] += times

    def add_all(self, durations: list[float], times: int) -> None:
        """Add each of the durations `times` times."""
        ordered, start = sorted(durations), 0
        while start < len(ordered):
            bucket = _bucket(ordered[start])
            end = bisect_right(ordered, bucket, lo=start, key=_bucket)
            self[bucket] += times * (end - start)
            start = end

    def quantile(self, share: float) -> float | None:
        """The duration that this share of them does not exceed; None if there
        are none.
        """
        left = share * self.total()
        for key in sorted(self):
            left -= self[key]
            if left <= 0:
                return math.exp(key / 1000)
        return None


@define
class Group:
    """The figures of the requests with one value of a field."""

    ttft: DurationHistogram = field(factory=DurationHistogram)
    tpot: DurationHistogram = field(factory=DurationHistogram)
    ended: int = 0  # samples, but the cancelled
    good: int = 0
    in_time: int = 0  # with a first token by their deadline

    def add(self, other: "Group") -> None:
        """Add the figures of the same group elsewhere."""
        self.ttft.update(other.ttft)
        self.tpot.update(other.tpot)
        self.ended += other.ended
        self.good += other.good
        self.in_time += other.in_time

    def figures(self, field_name: str) -> dict[str, Any]:
        """The figures for people and JSON."""
        ended = self.ended or None
        spreads = {"ttft": self.ttft, "tpot": self.tpot}
        figures: dict[str, Any] = {
            "samples": self.ended,
            **{name: _percentiles(spread) for name, spread in spreads.items()},
            "good": ended and self.good / ended,
        }
        if field_name == "deadline":
            figures["in_time"] = ended and self.in_time / ended
        return figures


@define
class Report:
    """Folds turns. A sample is good if its first token came within `ttft` seconds of its
    arrival, and the others within `tpot` seconds each on average.

    A sample's arrival is the turn in which its request came, or the real arrival, if
    that went through `note_arrivals`. Samples of which a journal shows only the end count
    as ended, but in no latency.

    The events of a request in one turn may come in any order: some of its samples end
    with a step, others are cancelled, and its id is used again. So no fact here depends
    on another: a sample's times begin with its first admission, which has the length of
    its wait, and are dropped with its end; unknown values go into no figure.
    """

    config: EngineConfig
    ttft: float = math.inf
    tpot: float = math.inf
    spreads: dict[str, DurationHistogram] = Factory(
        lambda: {name: DurationHistogram() for name in SPREADS}
    )
    ended: Counter[str] = field(factory=Counter)
    sums: dict[str, float] = Factory(lambda: defaultdict(int))
    peaks: Counter[str] = field(factory=Counter)
    drafts: DraftTally = NO_DRAFTS
    overrides: OverrideCounts = field(factory=OverrideCounts)  # of the policy
    # by field and value of requests
    groups: dict[str, dict[Any, Group]] = Factory(lambda: {name: {} for name in GROUPED})
    # A digest of all admissions, preemptions and ends with their turns and times, in
    # whatever order within a turn: equal if two runs decided alike.
    decisions: bytes = b""
    begin: float = math.nan
    end: float = math.nan
    state: EngineState | None = None  # the last
    # arrivals of requests before they enter, and of those that have not ended
    noted: dict[str, deque[float]] = field(factory=dict)
    real: dict[str, float] = field(factory=dict)
    arrived: dict[SampleId, float] = field(factory=dict)  # of samples that were admitted
    live: dict[str, Request] = field(factory=dict)  # requests that have not ended
    first: dict[SampleId, float] = field(factory=dict)  # when its first token came
    last: dict[SampleId, float] = field(factory=dict)  # its last so far

    def note_arrivals(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """Pass arrivals on, and note their times."""
        for time, event in arrivals:
            if isinstance(event, Request):
                self.note_arrival(event.id, time)
            yield time, event

    def note_arrival(self, name: str, time: float) -> None:
        """Note the arrival of a request before it enters the engine."""
        self.noted.setdefault(name, deque()).append(time)

    def fold_turns(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Pass turns on, and fold them."""
        for turn in turns:
            self.fold(turn)
            yield turn

    def fold_spans(self, spans: Iterable[Turn | SteadyTurns]) -> None:
        """Fold turns, of which some stand for many of a steady decode."""
        for span in spans:
            if isinstance(span, SteadyTurns):
                self.fold_steady(span)
            else:
                self.fold(span)

    def fold_steady(self, span: SteadyTurns) -> None:
        """Fold turns of a steady decode: the figures are those of each turn folded."""
        before, after = span.before, span.after
        if self.state is None:
            self._begin(before, span.times[0])
        self.state, self.end = after, after.time
        names = before.running.ids
        rows, num_turns = len(names), len(span.times)
        self._tokens(names, span.times[0])
        gaps = [*map(sub, span.times, (before.time, *span.times))]
        self.spreads["itl"].add_all(gaps[1:], rows)
        self.last.update(dict.fromkeys(names, after.time))
        sums = self.sums
        # One after the other, as turns are: the sums are equal to the last bit.
        sums["busy"] = reduce(add, gaps, sums["busy"])
        sums["running"] = reduce(add, [gap * rows for gap in gaps], sums["running"])
        sums["turns"] += num_turns
        sums["steps"] += num_turns
        sums["output"] += num_turns * rows
        self._peaks(after, span.min_available)

    def fold(self, turn: Turn) -> None:
        """Fold a turn. Raises PolicyOverrideError, if `overrides` are strict."""
        before, after = turn.before, turn.transition.state
        if self.state is None:
            self._begin(before, after.time)
        self.state = after
        self.end = after.time
        self._use(before, after)
        if results := sample_drafts(before, turn.events, turn.transition):
            self.drafts = self.drafts.plus(tally_of(results))
        submitted = [e.request for e in turn.events if isinstance(e, Submit)]
        for request in submitted:
            self.live.setdefault(request.id, request)
        for command in turn.transition.commands:
            match command:
                case Execute():
                    self.sums["steps"] += 1
                case Emit():
                    self._emit(command, after)
        for request in submitted:
            self._enter(request.id, before, after)
        self.overrides.fold(turn)
        # Samples are admitted after all events of the turn.
        if turn.transition.reasons:
            self._decide(turn)

    def _decide(self, turn: Turn) -> None:
        """Fold the reasons of a turn, and add its decisions to the digest."""
        for reason in turn.transition.reasons:
            match reason:
                case Admitted():
                    self._admit(reason, turn.transition.state.time)
                case Preempted():
                    self.sums["preemptions"] += 1
        decisions = [
            (type(reason).__name__, reason.id, reason.sample)
            for reason in turn.transition.reasons
            if isinstance(reason, Admitted | Preempted | Ended)
        ]
        if decisions:
            text = repr((turn.number, turn.transition.state.time, sorted(decisions)))
            self.decisions = blake2b(self.decisions + text.encode()).digest()

    def _groups_of(self, request_id: str) -> Iterator[tuple[Request, Group]]:
        """The groups of a request, and itself."""
        request = self.live.get(request_id)
        if request is None:
            return
        for name, groups in self.groups.items():
            value = getattr(request, name)
            if value not in groups and len(groups) >= MAX_GROUPS:
                value = OTHERS
            yield request, groups.setdefault(value, Group())

    def _use(self, before: EngineState, after: EngineState) -> None:
        """Add the use until this turn, and note the use after it."""
        span = after.time - before.time
        self.sums["turns"] += 1
        self.sums["busy"] += span * bool(before.inflight)
        self.sums["running"] += span * len(before.running)
        self._peaks(after, after.blocks.available)

    def _peaks(self, state: EngineState, available: int) -> None:
        """Note the use in a state, in which so many pages could be allocated."""
        peaks = self.peaks
        peaks["running"] = max(peaks["running"], len(state.running))
        peaks["waiting"] = max(peaks["waiting"], len(state.waiting))
        used = self.config.num_blocks - available
        peaks["blocks"] = max(peaks["blocks"], used)

    def _begin(self, state: EngineState, now: float) -> None:
        """Note the samples that are there already; those that ran may have had tokens."""
        self.begin = now
        self.last |= dict.fromkeys(state.running.ids, now)
        self.last |= {seq.id: now for seq in state.waiting if seq.preempted}

    def _enter(self, name: str, before: EngineState, after: EngineState) -> None:
        """Note the real arrival of a request if it was accepted, when it enters the
        engine.
        """
        times = self.noted.get(name)
        if not times:
            return
        time = times.popleft()
        if not times:
            del self.noted[name]
        old, new = before.requests.get(name), after.requests.get(name)
        if new is not None and (old is None or old.place != new.place):
            self.real[name] = time

    def _admit(self, admitted: Admitted, now: float) -> None:
        self.sums["prompt"] += admitted.prompt
        self.sums["hit"] += admitted.cached
        if admitted.prompt:  # for the first time
            self.arrived[admitted.id, admitted.sample] = self.real.get(
                admitted.id, now - admitted.waited
            )

    def _emit(self, emit: Emit, after: EngineState) -> None:
        new = [*compress(emit.ids, emit.tokens)]  # samples with tokens
        self._tokens(new, after.time)
        self.sums["output"] += sum(map(len, emit.tokens))
        for finished in emit.finished:
            self._end(finished)
            if finished.id not in after.requests:
                self.real.pop(finished.id, None)
                self.live.pop(finished.id, None)

    def _tokens(self, names: Sequence[SampleId], now: float) -> None:
        """Note the time of the next token of samples."""
        last = self.last
        for since, times in Counter(map(last.get, names)).items():
            if since is not None:
                self.spreads["itl"].add(now - since, times)
        for name in [name for name in names if name not in last]:
            if name in self.arrived:
                self.first[name] = now
                waited = now - self.arrived[name]
                self.spreads["ttft"].add(waited)
                for _, group in self._groups_of(name[0]):
                    group.ttft.add(waited)
        last.update(dict.fromkeys(names, now))

    def _end(self, finished: Finished) -> None:
        name = finished.id, finished.sample
        self.ended[finished.reason] += 1
        arrived = self.arrived.pop(name, None)
        first = self.first.pop(name, None)
        last = self.last.pop(name, None)
        groups = [*self._groups_of(finished.id)]
        for _, group in groups:
            group.ended += finished.reason != "cancelled"
        if (
            arrived is None
            or first is None
            or last is None
            or finished.reason in _UNSERVED
        ):
            return
        tpot = (last - first) / max(1, finished.length - 1)
        good = first - arrived <= self.ttft and tpot <= self.tpot
        if finished.length > 1:
            self.spreads["tpot"].add(tpot)
        self.spreads["e2e"].add(last - arrived)
        self.sums["good"] += good
        for request, group in groups:
            group.good += good
            group.in_time += first - arrived <= request.deadline
            if finished.length > 1:
                group.tpot.add(tpot)

    @property
    def unfinished(self) -> int:
        """The number of samples in the engine in the last turn."""
        live = self.state.requests.values() if self.state else ()
        return sum(request.samples - request.ended for request in live)

    def figures(self) -> dict[str, Any]:
        """The figures so far, for people and JSON; times in seconds, shares up to 1."""
        return combined_figures([self])


def combined_figures(reports: list[Report]) -> dict[str, Any]:
    """The figures of replicas together, as `Report.figures`; with one policy."""
    total = _merged(reports)
    sums, ended, peaks = total.sums, total.ended, total.peaks
    seconds = total.end - total.begin if sums["turns"] else 0.0
    unfinished = sum(report.unfinished for report in reports)
    requested = ended.total() - ended["cancelled"] + unfinished

    def over(name: str, divisor: float) -> float | None:
        return sums[name] / divisor if divisor > 0 else None

    return {
        "samples": ended.total(),
        "ended": ended,
        "unfinished": unfinished,
        "seconds": seconds,
        "output_tokens": sums["output"],
        "tokens_per_second": over("output", seconds),
        **{name: _percentiles(spread) for name, spread in total.spreads.items()},
        "good": over("good", requested),
        "goodput": over("good", seconds),
        "prompt_tokens": sums["prompt"],
        "cached_tokens": sums["hit"],
        "hit_share": over("hit", sums["prompt"]),
        "drafted": draft_figures(total.drafts),
        "preemptions": sums["preemptions"],
        "overrides": total.overrides.figures(),
        "busy": over("busy", seconds * len(reports)),
        "running": over("running", seconds * len(reports)),
        "most_running": peaks["running"],
        "most_waiting": peaks["waiting"],
        "most_blocks": peaks["blocks"] / total.config.num_blocks,
        "turns": sums["turns"],
        "steps": sums["steps"],
        "groups": _group_figures(reports),
        "decisions": blake2b(
            b"".join(report.decisions for report in reports), digest_size=16
        ).hexdigest(),
    }


def _merged(reports: list[Report]) -> Report:
    """The counts of reports together; without what is still running."""
    total = Report(reports[0].config, overrides=reports[0].overrides)
    for report in reports:
        for name, value in report.sums.items():
            total.sums[name] += value
        for name, spread in report.spreads.items():
            total.spreads[name].update(spread)
        total.ended.update(report.ended)
        total.peaks |= report.peaks
        total.drafts = total.drafts.plus(report.drafts)
    ran = [report for report in reports if report.sums["turns"]]
    total.begin = min([report.begin for report in ran], default=math.nan)
    total.end = max([report.end for report in ran], default=math.nan)
    return total


def _percentiles(spread: DurationHistogram) -> dict[str, float | None]:
    return {f"p{q}": spread.quantile(q / 100) for q in (50, 90, 99)}


def _group_figures(reports: list[Report]) -> dict[str, Any]:
    """The figures by field and value of requests, of fields with several values."""
    found = dict[str, Any]()
    for name in GROUPED:
        groups = dict[Any, Group]()
        for report in reports:
            for value, group in report.groups[name].items():
                groups.setdefault(value, Group()).add(group)
        if len(groups) > 1:
            ordered = sorted(groups, key=lambda value: (isinstance(value, str), value))
            found[name] = {f"{v}": groups[v].figures(name) for v in ordered}
    return found


def draft_figures(tally: DraftTally) -> dict[str, Any]:
    """Counts of drafts, for people and JSON; no rates if there were none."""
    has_drafts = bool(tally.rows)
    return {
        "rows": tally.rows,
        "proposed": sum(tally.proposed),
        "accepted": sum(tally.accepted),
        "rate": tally.rate if has_drafts else None,
        "by_place": [*tally.by_place],
        "length": tally.mean_length if has_drafts else None,
    }
