"""Reports of runs, beside a fold that keeps everything."""

import json
import math
from collections import Counter
from itertools import islice, pairwise
from random import Random

import pytest
from attrs import evolve

from minfer.effects.runs.report import DurationHistogram, Report
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Emit,
    Executed,
    Failed,
    Preempted,
    Submit,
)
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from tests.circles import seeds
from tests.core.simulation.clocked import Run, config, request
from tests.core.simulation.test_simulate import (
    EVEN,
    config_of,
    random_arrivals,
    requested,
)
from tests.core.world import tiny_config
from tests.effects import storms

UNEVEN = CostModel(
    name="x", decode=((1, 0.5), (3, 0.75)), mixed=1.0, token=0.01, sequence=0.1, host=0.01
)


def nearest(values: list[float], share: float) -> float:
    """The nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Naive:
    """All outputs of all samples, looked at when everything is over."""

    def __init__(self, turns: list[Turn], real: dict[str, float]) -> None:
        self.came, self.prompts = dict(real), dict[str, int]()
        self.outputs = dict[SampleId, list[float]]()
        self.lengths = dict[SampleId, tuple[str, int]]()
        self.hits = dict[SampleId, int]()  # tokens of the prompt, at the first admission
        for turn in turns:
            now = turn.transition.state.time
            for event in turn.events:
                if isinstance(event, Submit):
                    self.came.setdefault(event.request.id, now)
                    self.prompts[event.request.id] = len(event.request.prompt)
            for admission in (
                r for r in turn.transition.reasons if isinstance(r, Admitted)
            ):
                hit = min(admission.hit, self.prompts[admission.id])
                self.hits.setdefault((admission.id, admission.sample), hit)
            for emit in (c for c in turn.transition.commands if isinstance(c, Emit)):
                for name, tokens in zip(emit.ids, emit.tokens, strict=True):
                    if tokens:
                        self.outputs.setdefault(name, []).append(now)
                for finished in emit.finished:
                    self.lengths[finished.id, finished.sample] = (
                        finished.reason,
                        finished.length,
                    )
                    assert finished.cached == self.hits.get(
                        (finished.id, finished.sample), 0
                    )

    def spread(self, name: str) -> list[float]:
        values = []
        for sample, times in self.outputs.items():
            reason, length = self.lengths[sample]
            served = reason in ("stop", "length")
            if name == "ttft":
                values.append(times[0] - self.came[sample[0]])
            elif name == "itl":
                values += [after - before for before, after in pairwise(times)]
            elif name == "tpot" and served and length > 1:
                values.append((times[-1] - times[0]) / (length - 1))
            elif name == "e2e" and served:
                values.append(times[-1] - self.came[sample[0]])
        return values

    def good(self, ttft: float, tpot: float) -> int:
        count = 0
        for sample, times in self.outputs.items():
            reason, length = self.lengths[sample]
            pace = (times[-1] - times[0]) / max(1, length - 1)
            first = times[0] - self.came[sample[0]]
            count += reason in ("stop", "length") and first <= ttft and pace <= tpot
        return count


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_report_says_what_happened(seed: int, *, real: bool) -> None:
    rng = Random(seed)
    config = tiny_config(rng)
    arrivals, lengths = random_arrivals(rng)
    report = Report(config, ttft=3.0, tpot=1.2)
    passed = report.note_arrivals(arrivals) if real else arrivals
    turns = [
        *report.fold_turns(Simulation(config, Simulated(lengths), UNEVEN, passed).turns())
    ]
    times = {event.id: time for time, event in arrivals if isinstance(event, Request)}
    naive, figures = Naive(turns, times if real else {}), report.figures()
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = naive.spread(name)
        assert report.spreads[name].total() == len(values)
        for share in (0.5, 0.9, 0.99) if values else ():
            assert report.spreads[name].quantile(share) == pytest.approx(
                nearest(values, share), rel=6e-4
            )
    reasons = [reason for turn in turns for reason in turn.transition.reasons]
    seconds = turns[-1].transition.state.time - turns[0].transition.state.time
    assert figures["preemptions"] == sum(
        isinstance(reason, Preempted) for reason in reasons
    )
    assert figures["samples"] == len(naive.lengths)
    assert figures["unfinished"] == 0
    assert figures["seconds"] == seconds
    out = sum(length for reason, length in naive.lengths.values() if reason != "rejected")
    assert figures["output_tokens"] == out
    requested = sum(reason != "cancelled" for reason, _ in naive.lengths.values())
    if requested and seconds:
        assert figures["good"] == naive.good(3.0, 1.2) / requested
        assert figures["goodput"] == naive.good(3.0, 1.2) / seconds
        assert 0 <= figures["busy"] <= 1
    if prompt := sum(naive.prompts[name] for name, _ in naive.hits):
        assert figures["prompt_tokens"] == prompt
        assert figures["hit_share"] == sum(naive.hits.values()) / prompt


def test_use_is_weighed_by_time() -> None:
    """One of two rows for two seconds out of ten; the engine is idle for eight."""
    config = config_of(num_blocks=10)
    arrivals: list[Arrival] = [
        (0.0, requested("a", prompt=4, most=2)),
        (10.0, requested("b", most=1)),
    ]
    report = Report(config)
    for turn in Simulation(config, Simulated(), EVEN, arrivals).turns():
        report.fold(turn)
    figures = report.figures()
    assert figures["seconds"] == 11.0
    assert figures["busy"] == pytest.approx(3 / 11)
    assert figures["running"] == pytest.approx(3 / 11)
    assert figures["most_running"] == 1
    assert figures["most_blocks"] == pytest.approx(0.2)
    assert figures["tokens_per_second"] == pytest.approx(3 / 11)


def test_who_was_there_before_is_counted_and_has_no_first_token() -> None:
    config = config_of(max_num_seqs=1)
    arrivals: list[Arrival] = [(0.0, requested(name, most=4)) for name in "ab"]
    turns = [*Simulation(config, Simulated(), EVEN, arrivals).turns()]
    report = Report(config)
    for turn in turns[3:]:  # a has had tokens, b waits
        report.fold(turn)
    figures = report.figures()
    assert figures["samples"] == 2
    assert report.spreads["ttft"].total() == 1
    assert report.spreads["e2e"].total() == 1
    assert figures["ttft"]["p50"] == pytest.approx(5.0, rel=1e-3)


def test_who_was_preempted_before_has_had_its_first_token() -> None:
    config = config_of(num_blocks=8)  # of 4 tokens: not enough for both
    arrivals: list[Arrival] = [(0.0, requested(name, most=16)) for name in "ab"]
    turns = [*Simulation(config, Simulated(), EVEN, arrivals).turns()]
    preemption = next(
        i
        for i, turn in enumerate(turns)
        if any(isinstance(reason, Preempted) for reason in turn.transition.reasons)
    )
    report = Report(config)
    for turn in turns[preemption + 1 :]:
        report.fold(turn)
    assert report.figures()["samples"] == 2
    assert report.spreads["ttft"].total() == 0


@pytest.mark.parametrize("begin", [0, 3])
def test_tokens_are_those_of_the_window(begin: int) -> None:
    arrivals: list[Arrival] = [(0.0, requested(name, most=9)) for name in "abc"]
    turns = [*Simulation(config_of(), Simulated(), EVEN, arrivals).turns()][begin:-2]
    report = Report(config_of())
    for turn in turns:
        report.fold(turn)
    emits = [c for turn in turns for c in turn.transition.commands if isinstance(c, Emit)]
    tokens = sum(len(ids) for emit in emits for ids in emit.tokens)
    seconds = turns[-1].transition.state.time - turns[0].transition.state.time
    figures = report.figures()
    assert figures["output_tokens"] == tokens > 0
    assert figures["tokens_per_second"] == tokens / seconds


def test_who_is_never_served_is_not_good() -> None:
    """Of four requests one is served, one refused, one runs and one waits as the run
    breaks off.
    """
    config, report = config_of(max_num_seqs=1), Report(config_of())
    arrivals: list[Arrival] = [(0.0, requested(name)) for name in "abc"]
    arrivals.append((0.0, evolve(requested("d"), prompt=(1,) * 500)))
    for turn in islice(Simulation(config, Simulated(), EVEN, arrivals).turns(), 5):
        report.fold(turn)
    figures = report.figures()
    assert figures["ended"] == {"length": 1, "rejected": 1}
    assert figures["unfinished"] == 2
    assert figures["good"] == 1 / 4


def test_who_comes_again_while_it_runs_came_when_it_did() -> None:
    """Its arrival is noted before it is known that another one has its id: it
    is ignored.
    """
    config, report = config_of(), Report(config_of())
    arrivals: list[Arrival] = [
        (0.25, requested("x")),
        (0.75, requested("a", most=6)),
        (1.5, requested("a")),
    ]
    noted = report.note_arrivals(arrivals)
    for turn in Simulation(config, Simulated(), EVEN, noted).turns():
        report.fold(turn)
    figures = report.figures()
    assert figures["ended"] == {"length": 2}
    assert report.spreads["e2e"].quantile(1.0) == pytest.approx(8.25 - 0.75, rel=1e-3)


def test_an_error_after_tokens_is_no_answer() -> None:
    class Frail(Simulated):
        calls = 0

        def collect(self) -> Executed | Failed:
            self.calls += 1
            return (
                self.fail("boom", halfway=False) if self.calls > 3 else super().collect()
            )

    config = config_of()
    report = Report(config)
    for turn in Simulation(
        config, Frail(), EVEN, [(0.0, requested("a", most=9))]
    ).turns():
        report.fold(turn)
    figures = report.figures()
    assert figures["ended"] == {"error": 1}
    assert figures["output_tokens"] == 3
    assert figures["good"] == 0
    assert figures["e2e"]["p99"] is figures["tpot"]["p99"] is None


def test_nothing_at_all_has_no_figures() -> None:
    figures = Report(EngineConfig(num_blocks=1)).figures()
    assert figures["seconds"] == 0.0
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["ttft"] == {"p50": None, "p90": None, "p99": None}
    assert figures["samples"] == figures["turns"] == 0
    assert figures["good"] is None


def test_a_request_that_is_ignored_or_refused_does_not_touch_its_namesake() -> None:
    config = config_of()
    arrivals: list[Arrival] = [
        (0.0, requested("a", most=6)),
        (2.5, requested("a", most=6)),
        (2.5, evolve(requested("b"), prompt=(1,) * 500)),
        (2.6, Cancel("no")),
    ]
    report = Report(config)
    for turn in Simulation(config, Simulated(), EVEN, arrivals).turns():
        report.fold(turn)
    figures = report.figures()
    assert figures["ended"] == {"length": 1, "rejected": 1}
    assert figures["ttft"]["p50"] == pytest.approx(1.0, rel=1e-3)
    assert figures["tpot"]["p50"] == pytest.approx(1.0, rel=1e-3)
    assert figures["good"] == pytest.approx(1 / 2)


def test_a_sample_may_end_in_the_turn_in_which_its_request_is_cancelled() -> None:
    """The one of two samples that has all its tokens ends by its length, the other is
    cancelled.
    """
    run = Run(config(num_blocks=64))
    run.turn(Submit(request("a", 5, tokens=2, n=2)))
    while not any(num_tokens == 6 for num_tokens in run.state.running.known):
        run.turn()
    run.turn(Cancel("a"))
    report = Report(run.config)
    for turn in run.turns:
        report.fold(turn)
    assert report.ended == {"length": 1, "cancelled": 1}
    assert report.spreads["ttft"].total() == 2
    assert report.spreads["e2e"].total() == 1
    assert report.unfinished == 0
    assert report.arrived == report.first == report.last == {}


def test_an_id_that_ends_and_comes_again_in_one_turn_is_two_requests() -> None:
    run, report = Run(config()), Report(config())
    first, second = request("a", 5, tokens=9), request("a", 7, tokens=2)
    report.note_arrival("a", 0.5)
    run.turn(Submit(first))
    run.turn()
    report.note_arrival("a", 1.75)
    run.turn(Cancel("a"), Submit(second))
    run.drain()
    for turn in run.turns:
        report.fold(turn)
    figures = report.figures()
    assert figures["ended"] == {"cancelled": 1, "length": 1}
    assert figures["prompt_tokens"] == 12
    assert report.spreads["ttft"].quantile(1.0) == pytest.approx(4.0 - 1.75, rel=1e-3)
    assert report.spreads["e2e"].total() == 1
    assert report.noted == report.real == {}


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, 0.0, -1.0, 1e308])
def test_no_duration_is_too_odd_for_a_spread(seconds: float) -> None:
    spread = DurationHistogram()
    spread.add(seconds)
    assert spread.total() == 1
    assert math.isfinite(spread.quantile(1.0) or math.nan)


@pytest.mark.long
@seeds(20, 1000)
def test_no_fold_stumbles_over_what_meets_in_one_turn(seeds: range) -> None:
    """A hundred turns each."""
    counts = sum(map(storms.fold, seeds), Counter[str]())
    assert counts["turns"] == len(seeds) * storms.TURNS
    rare = {"overruled", "came again while served"}
    assert storms.WEATHER - set(counts) <= rare, (
        f"the storms have become too kind: {counts}"
    )


def test_percentiles_are_within_a_thousandth() -> None:
    rng, spread = Random(0), DurationHistogram()
    values = [rng.lognormvariate(-3, 2) for _ in range(5000)]
    for value in values:
        spread.add(value)
    spread.add(0.0, 50)
    for share in (0.1, 0.5, 0.9, 0.99, 1.0):
        assert spread.quantile(share) == pytest.approx(
            nearest([0.0] * 50 + values, share), rel=6e-4
        )
