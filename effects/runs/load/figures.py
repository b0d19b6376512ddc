"""Records become figures: throughput, latencies, goodput, failures, and whether the
clients kept up.

Names are those of the field's tools, and JSON has them as they are; latencies are in
milliseconds. Only requests that were answered to their end are in latencies and
throughput, and in an interrupted run also the tokens of those that were under way.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
from attrs import frozen

from minfer.effects.runs.load import statistics
from minfer.effects.runs.load.processes import Outcome
from minfer.effects.runs.load.record import INTERRUPTED, LoadError, Record
from minfer.effects.runs.load.statistics import Span, Spread, spread

MS: Final = 1000.0
GOALS: Final = ("ttft", "tpot", "e2el")
BUSY: Final = 0.8  # of a core: above it, a client may be what is slow
SHORT: Final = 1.0  # seconds of a run, of which the clients' beginning is a large part
LATE: Final = 10.0  # milliseconds
Figures = dict[str, Any]


def read_goals(texts: Iterable[str]) -> dict[str, float]:
    """Goals as in `ttft:200 tpot:50`, in milliseconds. Raises LoadError."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = 0.0
        if name not in GOALS or not goals[name] > 0:
            raise LoadError(
                f"--goodput {text!r} is no goal; it is as in ttft:200 tpot:50 e2el:5000, "
                "in milliseconds"
            )
    return goals


def is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request was answered, and as quickly as is wanted."""
    if not record.good:
        return False
    times = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((times[name] or 0.0) * MS <= most for name, most in goals.items())


def figures_of(outcome: Outcome, goals: Mapping[str, float]) -> Figures:
    """All figures of a run, as JSON has them."""
    records, seconds = outcome.records, outcome.seconds
    done = [one for one in records if one.good]
    flight = statistics.in_flight(records)
    steady = flight.steady()
    figures = {
        "duration": seconds,
        "stopped": outcome.stopped,
        "requests": len(records),
        "completed": len(done),
        **_failures(records),
        **_totals(records, done, seconds),
        "steady": _steady(records, steady) if steady else None,
        "max_concurrent_requests": flight.most,
        "mean_concurrent_requests": flight.mean,
        **_latencies(done),
        **_clients(outcome),
    }
    if goals:
        good = sum(is_good(one, goals) for one in records)
        figures["goodput"] = {
            "goals_ms": dict(goals),
            "requests": good,
            "share": good / max(1, _meant(records)),
            "request_goodput": good / seconds if seconds > 0 else 0.0,
        }
    return figures


def _meant(records: Sequence[Record]) -> int:
    """How many there were that we did not give up ourselves."""
    return sum(not _given_up(one) for one in records)


def _given_up(record: Record) -> bool:
    return record.failure is not None and record.failure.kind == INTERRUPTED


def _failures(records: Sequence[Record]) -> Figures:
    """How many failed, by kind, with the first message of each."""
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    for one in records:
        if one.failure is not None and not _given_up(one):
            kinds[one.failure.kind] += 1
            first.setdefault(one.failure.kind, one.failure.message)
    told = {
        kind: {"requests": count, "first": first[kind]}
        for kind, count in kinds.most_common()
    }
    given_up = len(records) - _meant(records)
    return {"failed": kinds.total(), "interrupted": given_up, "failures": told}


def _totals(records: Sequence[Record], done: Sequence[Record], seconds: float) -> Figures:
    """Tokens, and rates over the whole run."""
    served = [one for one in records if one.good or _given_up(one)]
    prompt = sum(one.prompt_tokens for one in served)
    output = sum(one.output_tokens for one in served)
    by = seconds if seconds > 0 else float("inf")
    return {
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "tokens_counted_by_events": any(one.counted for one in done),
        "request_throughput": len(done) / by,
        "output_throughput": output / by,
        "total_token_throughput": (prompt + output) / by,
    }


def _steady(records: Sequence[Record], span: Span) -> Figures:
    """Rates of the part without ramps."""
    served = [one for one in records if one.good or _given_up(one)]
    ends = sum(one.good and span.has(one.ended) for one in served)
    tokens = sum(statistics.tokens_in(one, span) for one in served)
    return {
        "begin": span.begin,
        "end": span.end,
        "request_throughput": ends / span.seconds,
        "output_throughput": tokens / span.seconds,
    }


def _latencies(done: Sequence[Record]) -> Figures:
    """All latencies, in milliseconds; null for what nobody measured."""
    found = statistics.gaps(done)
    return {
        "ttft_ms": _ms(spread(_known(one.ttft for one in done))),
        "tpot_ms": _ms(spread(_known(one.tpot for one in done))),
        "itl_ms": _ms(spread(found.each, found.tokens)),
        "event_gap_ms": _ms(spread(found.seconds)),
        "e2el_ms": _ms(spread([one.e2el for one in done])),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ms(found: Spread | None) -> Figures | None:
    """A spread in milliseconds."""
    if found is None:
        return None
    told = attrs.asdict(found)
    count = told.pop("count")
    return {**{name: value * MS for name, value in told.items()}, "count": count}


def _clients(outcome: Outcome) -> Figures:
    """How the clients fared."""
    late = spread([max(0.0, one.sent - one.due) for one in outcome.records])
    return {
        "client_cpu": list(outcome.cpu),
        "clients_lost": outcome.lost,
        "sent_late_ms": _ms(late),
    }


def warnings(figures: Figures, *, open_loop: bool, lanes: int | None) -> list[str]:
    """What casts doubt on the figures."""
    found: list[str] = []
    busiest = max(figures["client_cpu"], default=0.0)
    if busiest > BUSY and figures["duration"] >= SHORT:
        found.append(
            f"a client process used {busiest:.0%} of a core, so these figures may be the "
            "clients' and not the server's; use more --processes, or another machine"
        )
    late = figures["sent_late_ms"]
    if open_loop and lanes is None and late and late["p99"] > LATE:
        found.append(
            f"1% of requests were sent more than {late['p99']:.0f} ms late: the clients "
            "did not keep the pace; use more --processes"
        )
    if figures["clients_lost"]:
        found.append(f"{figures['clients_lost']} client processes died")
    if figures["tokens_counted_by_events"]:
        found.append(
            "the server tells no usage: output tokens are counted by events, and prompt "
            "tokens are not known"
        )
    return found


@frozen
class Repeats:
    """The middle, lowest and highest of a figure over runs."""

    median: float
    low: float
    high: float


def over_runs(runs: Sequence[Figures], path: str) -> Repeats | None:
    """A figure over several runs, by its path, as in `ttft_ms.median`; None if one run
    lacks it.
    """
    values: list[float] = []
    for figures in runs:
        value: Any = figures
        for name in path.split("."):
            value = None if value is None else value.get(name)
        if value is None:
            return None
        values.append(float(value))
    found = spread(values)
    return Repeats(found.median, min(values), max(values)) if found else None
