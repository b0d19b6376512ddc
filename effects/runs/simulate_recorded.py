"""A recorded run beside its simulation: by how much the simulation misses it, and
whether its clients were closed loops, whose arrivals would have moved.

Closed-loop clients send a request when an answer has come. Under another policy they
would have sent it at another time, but a simulation has the recorded arrivals. They are
recognized by what they do: nearly all arrivals after the first ones bring the number of
requests back to its maximum, soon after another request has ended.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final

from attrs import define, field

from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.recorded import latest
from minfer.effects.runs.report import Report
from minfer.effects.runs.simulate_options import Case
from minfer.records.config import SIZES
from minfer.records.messages import Emit, Submit
from minfer.records.state import Turn

Figures = dict[str, Any]
MAX_MISS: Final = 0.1  # of a figure; a warning names larger ones
CHECKED: Final = (
    ("tok/s", "tokens_per_second", None),
    ("TTFT p50", "ttft", "p50"),
    ("TTFT p99", "ttft", "p99"),
    ("TPOT p50", "tpot", "p50"),
    ("TPOT p99", "tpot", "p99"),
)
_MIN_ARRIVALS: Final = 10  # after the first ones, to recognize closed-loop clients
_CLOSED_SHARE: Final = 0.8  # of arrivals that follow an end
_NEAR_MAXIMUM: Final = 0.9  # of the requests at once
_SOON: Final = 0.25  # of the time that a request takes: from an end to an arrival
CLOSED_LOOP: Final = (
    "the clients of this run look like closed loops (as one answer ended, the next "
    "request came): under other settings the arrivals would have moved. Simulated are "
    "those that were recorded: compare latencies, not tok/s"
)


@define
class ClosedLoop:
    """Recognizes closed-loop clients in the turns of a run."""

    # Of each arrival: requests in the engine, and seconds since the last end of one.
    arrivals: list[tuple[int, float]] = field(factory=list)
    durations: list[float] = field(factory=list)  # of requests that have ended, seconds
    began: dict[str, float] = field(factory=dict)  # arrival of each live request, by id
    last_end: float | None = None  # of a request, seconds

    def fold(self, turn: Turn) -> None:
        """Fold a turn."""
        after = turn.transition.state
        ends = [c.finished for c in turn.transition.commands if isinstance(c, Emit)]
        for event in turn.events:
            if isinstance(event, Submit):
                self.began[event.request.id] = after.time
                since = after.time - self.last_end if self.last_end is not None else 0.0
                self.arrivals.append((len(after.requests), since))
        for finished in chain.from_iterable(ends):
            if finished.id not in after.requests and finished.id in self.began:
                self.durations.append(after.time - self.began.pop(finished.id))
                self.last_end = after.time

    @property
    def is_closed(self) -> bool:
        """Whether the clients look like closed loops."""
        most = max([live for live, _ in self.arrivals], default=0)
        later = self.arrivals[most:]
        if len(later) < max(_MIN_ARRIVALS, most) or not self.durations:
            return False
        soon = _SOON * median(self.durations)
        follow = [live >= _NEAR_MAXIMUM * most and gap <= soon for live, gap in later]
        return sum(follow) >= _CLOSED_SHARE * len(later)


def recorded_run(
    options: argparse.Namespace, trace: ArrivalTrace
) -> tuple[Figures, bool] | None:
    """The figures of the recorded run itself, as a row of the table, and whether its
    clients look like closed loops; None for other traces, and if only some requests are
    simulated.
    """
    if trace.config is None or options.requests is not None:
        return None
    config = trace.config
    report, loop = Report(config, options.slo_ttft, options.slo_tpot), ClosedLoop()
    for turn in _turns(options):
        report.fold(turn)
        loop.fold(turn)
    sizes = {size: getattr(config, size) for size in SIZES}
    settings = {"policy": "recorded", **sizes, "speed": 1.0, "drafts": None}
    return {**settings, **report.figures(), "simulated_in": None}, loop.is_closed


def _turns(options: argparse.Namespace) -> Iterable[Turn]:
    return latest(Path(options.trace)).open().turns()


def is_baseline(case: Case, trace: ArrivalTrace) -> bool:
    """Whether a case has the settings of the recorded run."""
    return case.config == trace.config and case.speed == 1.0


def missed(recorded: Figures, simulated: Figures) -> dict[str, float]:
    """The relative error of each simulated figure, by title, where it is more than
    `MAX_MISS`.
    """
    found = {}
    for title, name, key in CHECKED:
        true, model = (
            row[name][key] if key else row[name] for row in (recorded, simulated)
        )
        if true and model is not None and abs(model / true - 1) > MAX_MISS:
            found[title] = model / true - 1
    return found


def miss_lines(recorded: Figures, baseline: Figures | None) -> Iterator[str]:
    """Warnings about the simulated row with the recorded settings."""
    if baseline is None:
        yield (
            "no simulated row has the recorded settings, so it is not known how far the "
            "simulator misses this run: without options it simulates just that"
        )
        return
    errors = missed(recorded, baseline)
    if errors:
        parts = ", ".join(f"{title} {error:+.0%}" for title, error in errors.items())
        yield (
            "warning: with the recorded settings the simulator misses the recorded run "
            f"by more than {MAX_MISS:.0%} ({parts}): differences of that size say nothing"
        )
