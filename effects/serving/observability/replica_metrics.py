"""Metrics of each of several engines; `metrics` has those of all together."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import core

from minfer.effects.live.client import ReplicaState
from minfer.effects.serving.observability.metric_help import REPLICA_HELP


def replica_metrics(
    model: str, replicas: Sequence[ReplicaState], routed: Mapping[str, float]
) -> Iterator[core.Metric]:
    """The metrics at present. `routed` counts requests, by the name of a replica, a
    space, and why.
    """
    gauges: dict[str, list[float]] = {
        "replica_up": [int(not replica.unready) for replica in replicas],
        "replica_requests_running": [replica.running for replica in replicas],
        "replica_requests_waiting": [replica.waiting for replica in replicas],
        "replica_kv_cache_usage_perc": [replica.usage for replica in replicas],
    }
    labels = ["model_name", "replica"]
    for name, values in gauges.items():
        gauge = core.GaugeMetricFamily(
            f"minfer_{name}", REPLICA_HELP[name], labels=labels
        )
        for replica, value in zip(replicas, values, strict=True):
            gauge.add_metric([model, replica.name], value)
        yield gauge
    info = core.GaugeMetricFamily(
        "minfer_replica_info",
        REPLICA_HELP["replica_info"],
        labels=[*labels, "machine", "role"],
    )
    for replica in replicas:
        info.add_metric([model, replica.name, replica.machine, replica.role], 1)
    yield info
    counter = core.CounterMetricFamily(
        "minfer_routed", REPLICA_HELP["routed"], labels=[*labels, "why"]
    )
    for target, count in routed.items():
        counter.add_metric([model, *target.split(" ", 1)], count)
    yield counter
