"""An engine's metrics as `LLM.get_metrics` returns them: vLLM's kinds and names."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from attrs import field, frozen

from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import ACCEPTED_PER_POSITION

_PREFIX: Final = "vllm:"


@frozen(kw_only=True)
class Metric:
    """A metric: its name, and labels."""

    name: str
    labels: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class Counter(Metric):
    """A count since the start."""

    value: int


@frozen(kw_only=True)
class Gauge(Metric):
    """A value at the moment."""

    value: float


@frozen(kw_only=True)
class Vector(Metric):
    """Counts by position."""

    values: list[int]


@frozen(kw_only=True)
class Histogram(Metric):
    """Values by size: for each upper bound, how many are at most that large."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Yields the metrics of an engine at a moment."""
    used = 1 - snapshot.blocks_free / snapshot.blocks if snapshot.blocks else 0.0
    for name, gauge in (
        ("num_requests_running", snapshot.running),
        ("num_requests_waiting", snapshot.waiting),
        ("kv_cache_usage_perc", used),
    ):
        yield Gauge(name=_PREFIX + name, value=float(gauge))
    accepted: list[int] = []
    for name, count in snapshot.totals.counts.items():
        if name.startswith(ACCEPTED_PER_POSITION):  # they come by rising position
            accepted.append(int(count))
        elif " " not in name:  # others are counts by a label
            yield Counter(name=_PREFIX + name, value=int(count))
    yield Vector(name=_PREFIX + ACCEPTED_PER_POSITION.strip(), values=accepted)
    for name, histogram in snapshot.totals.histograms.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        counts = list(accumulate(histogram.counts))
        yield Histogram(
            name=_PREFIX + name,
            count=counts[-1],
            sum=histogram.total,
            buckets=dict(zip(bounds, counts, strict=True)),
        )
