"""Every fold over runs in which everything meets in one turn: none may raise, all must
agree.

`python -m tests.effects.storms --turns 100000` runs it for long; a failure prints the
seed that repeats it.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from minfer.analysis.explain import explain
from minfer.effects.live.totals import TotalsCounter
from minfer.effects.runs.page.columns import Run
from minfer.effects.runs.report import Report
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Discarded,
    Emit,
    Execute,
    PolicyOverride,
    Preempted,
    Submit,
)
from minfer.records.sequence import SampleId
from minfer.records.state import Turn
from tests.core.recorded import mixed_ends, recorded, storm

Weather = Counter[str]  # what there was, and how often
TURNS = 100  # of one storm
WEATHER = {
    "turns",
    "ends that differ",
    "several samples",
    "resumed",
    "came again while served",
    "cancels",
    "preempted",
    "failed steps",
    "overruled",
    "let in",
}


def tally_of(turns: Iterable[Turn]) -> TotalsCounter:
    """What an engine that took these turns counted."""
    tally = TotalsCounter()
    for turn in turns:
        tally.count_turn(turn.transition)
    return tally


def hits_by_plans(turns: Iterable[Turn]) -> tuple[int, int]:
    """Cached tokens and tokens of prompts, from plans alone: where each sample's first
    one begins.

    What is copied from a sibling was not in the cache.
    """
    ran, hit, prompt = set[SampleId](), 0, 0
    for command in (command for turn in turns for command in turn.transition.commands):
        if isinstance(command, Emit):
            ran -= {(end.id, end.sample) for end in command.finished if not refused(end)}
        elif isinstance(command, Execute):
            plan = command.plan
            copied = {copy.target: copy.count for copy in plan.copies}
            for row in plan.opens:
                if row.name not in ran:
                    ran.add(row.name)
                    begin = plan.starts[row.index] - sum(
                        copied.get(b, 0) for b in row.tables[0]
                    )
                    hit += min(begin, row.prompt)
                    prompt += row.prompt
    return hit, prompt


def refused(end: Any) -> bool:
    """Whether an end is that of a request which never came in."""
    return bool(end.reason == "rejected")


def weather(turns: Iterable[Turn]) -> Weather:
    """How much of what makes folds stumble there was."""
    counts = Weather()
    for turn in turns:
        for event in turn.events:
            if isinstance(event, Submit):
                counts["several samples"] += event.request.n > 1
                counts["resumed"] += bool(event.request.output)
                counts["came again while served"] += (
                    event.request.id in turn.before.requests
                )
            counts["cancels"] += isinstance(event, Cancel)
        for reason in turn.transition.reasons:
            counts["preempted"] += isinstance(reason, Preempted)
            counts["failed steps"] += isinstance(reason, Discarded)
            counts["overruled"] += isinstance(reason, PolicyOverride)
            counts["let in"] += isinstance(reason, Admitted)
    return counts


def fold(
    seed: int, run: Callable[[int, int], tuple[EngineConfig, list[Turn]]] = storm
) -> Weather:
    """Fold a run through everything that folds; returns what there was in it."""
    config, log = run(seed, TURNS)
    report, page = Report(config), Run()
    for turn in log:
        report.fold(turn)
        page.add_turn(turn)
    figures, counts = report.figures(), tally_of(log).counts
    cached, prompt = hits_by_plans(log)
    assert (figures["cached_tokens"], figures["prompt_tokens"]) == (cached, prompt)
    assert (counts["prefix_cache_hits"], counts["prefix_cache_queries"]) == (
        cached,
        prompt,
    )
    assert (page.cached, page.prompt) == (cached, prompt)
    assert sum(map(len, page.serving.values())) == report.unfinished
    names = dict.fromkeys(
        e.request.id for turn in log for e in turn.events if isinstance(e, Submit)
    )
    for name in names:
        explain(config, log, name)
    return weather(log) + Counter(
        {"turns": len(log), "ends that differ": mixed_ends(log)}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument(
        "--worlds", action="store_true", help="the swarm's worlds, not storms"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first storm")
    options = parser.parse_args()
    counts, seed, begin = Weather(), options.seed, time.perf_counter()
    while counts["turns"] < options.turns:
        try:
            counts += fold(seed, recorded if options.worlds else storm)
        except Exception:
            print(f"seed {seed}", file=sys.stderr)
            raise
        seed += 1
    took = time.perf_counter() - begin
    print(f"{seed - options.seed} runs in {took:.0f} s, no exception, all counts equal:")
    print(", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
