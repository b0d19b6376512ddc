"""Records become numbers: throughput, latencies, goodput and failures.

They have the names of `vllm bench serve`, and so has the JSON file; latencies are in
milliseconds. Only completed requests are in latencies and request throughput. In a run
that was interrupted, output throughput has the tokens of unfinished requests too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from minfer.effects.runs.load.load_client import Outcome
from minfer.effects.runs.load.request_record import RequestRecord

MS: Final = 1000.0
LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
BUSY: Final = 0.8  # of a core: above it, the client may be the bottleneck
SHORT: Final = 1.0  # seconds of a run, of which the clients' start is a large part
LATE: Final = 10.0  # milliseconds
Metrics = dict[str, Any]


def meets(record: RequestRecord, goals: Mapping[str, float]) -> bool:
    """Whether a request was completed within all goals."""
    if not record.completed:
        return False
    times = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((times[name] or 0.0) * MS <= most for name, most in goals.items())


def metrics_of(
    outcome: Outcome,
    goals: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99,),
) -> Metrics:
    """All numbers of a run."""
    records, seconds = outcome.records, outcome.seconds
    done = [one for one in records if one.completed]
    found: Metrics = {
        "duration": seconds,
        "completed": len(done),
        **_failures(records),
        **_totals(records, len(done), seconds),
        "max_concurrent_requests": _in_flight(records),
    }
    if goals:
        good = sum(meets(one, goals) for one in records)
        found["request_goodput"] = good / seconds if seconds > 0 else 0.0
    for name, values in latencies(done).items():
        found |= _spread(name, values, percentiles)
    late = [max(0.0, one.sent - one.due) for one in records]
    return {
        **found,
        "tokens_counted_by_events": any(one.counted for one in done),
        "client_cpu": list(outcome.cpu),
        "p99_sent_late_ms": float(np.quantile(late, 0.99)) * MS if late else None,
    }


def latencies(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """All values of each latency, in seconds."""
    return {
        "ttft": [one.ttft for one in done if one.ttft is not None],
        "tpot": [one.tpot for one in done if one.tpot is not None],
        "itl": [gap for one in done for gap in np.diff(np.asarray(one.events)).tolist()],
        "e2el": [one.e2el for one in done],
    }


def _spread(name: str, values: list[float], percentiles: Sequence[float]) -> Metrics:
    """Mean, median, standard deviation and percentiles; None for each if there are no
    values.
    """
    array = np.asarray(values) * MS
    found: Metrics = {
        f"mean_{name}_ms": float(array.mean()) if values else None,
        f"median_{name}_ms": float(np.median(array)) if values else None,
        f"std_{name}_ms": float(array.std()) if values else None,
    }
    for share in percentiles:
        value = float(np.percentile(array, share)) if values else None
        found[f"p{share:g}_{name}_ms"] = value
    return found


def _failures(records: Sequence[RequestRecord]) -> Metrics:
    """The number of failures by kind, with the first message of each."""
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    for one in records:
        if one.failure is not None and not one.interrupted:
            kinds[one.failure.kind] += 1
            first.setdefault(one.failure.kind, one.failure.message)
    return {
        "failed": kinds.total(),
        "interrupted": sum(one.interrupted for one in records),
        "failures": {
            kind: {"requests": count, "first": first[kind]}
            for kind, count in kinds.most_common()
        },
    }


def _totals(records: Sequence[RequestRecord], completed: int, seconds: float) -> Metrics:
    """Tokens, and rates over the whole run."""
    served = [one for one in records if one.completed or one.interrupted]
    prompt = sum(one.prompt_tokens for one in served)
    output = sum(one.output_tokens for one in served)
    by = seconds if seconds > 0 else float("inf")
    return {
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": completed / by,
        "output_throughput": output / by,
        "total_token_throughput": (prompt + output) / by,
    }


def _in_flight(records: Sequence[RequestRecord]) -> int:
    """The most requests in flight at once."""
    moments = [(one.ended, -1) for one in records] + [(one.sent, 1) for one in records]
    steps = [step for _, step in sorted(moments)]  # an end before a start at its time
    return int(np.cumsum(steps).max(initial=0))


def warnings(metrics: Metrics, *, paced: bool) -> list[str]:
    """Reasons to doubt the numbers; `paced`: requests were due at times, and no limit of
    concurrency could delay them.
    """
    found: list[str] = []
    busiest = max(metrics["client_cpu"], default=0.0)
    if busiest > BUSY and metrics["duration"] >= SHORT:
        found.append(
            f"the client used {busiest:.0%} of a core, so these numbers may be its own "
            "and not the server's; run several of this command at once"
        )
    late = metrics["p99_sent_late_ms"]
    if paced and late is not None and late > LATE:
        found.append(
            f"1% of requests were sent more than {late:.0f} ms late: the client did not "
            "keep the rate; run several of this command at once"
        )
    if metrics["tokens_counted_by_events"]:
        found.append(
            "the server sends no usage: output tokens are counted by events, and prompt "
            "tokens are not known"
        )
    return found
