"""Metrics of a router for Prometheus, and its status as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, core
from prometheus_client.registry import Collector

from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.effects.proxy.backend_dispatcher import BackendDispatcher
from minfer.effects.proxy.health import HealthWatch, ServerHealth

_PREFIX: Final = "minfer_router_"


class RouterMetrics(Collector):
    """The figures of one router; `retries` are attempts after one that failed or was
    refused, by cause.
    """

    def __init__(
        self,
        policy: str,
        dispatcher: BackendDispatcher,
        watches: Sequence[HealthWatch],
        journal: RoutingJournalFile | None,
    ) -> None:
        self.retries: dict[str, int] = {}
        self.answers: dict[tuple[str, int], int] = {}  # by backend and status
        self.broken = 0  # answers that their backend did not end
        self._policy = policy
        self._dispatcher = dispatcher
        self._watches = watches
        self._journal = journal
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def note_retry(self, cause: str) -> None:
        """Note that another backend is tried."""
        self.retries[cause] = self.retries.get(cause, 0) + 1

    def note_answer(self, backend: str, status: int) -> None:
        """Note that an answer has begun."""
        key = backend, status
        self.answers[key] = self.answers.get(key, 0) + 1

    def status(self) -> Mapping[str, Any]:
        """The router and its backends, as JSON."""
        counts = self._dispatcher.counts
        return {
            "policy": self._policy,
            "backends": [self._backend(watch) for watch in self._watches],
            "waiting": self._dispatcher.waiting,
            "placed": counts.placed,
            "deferred": counts.deferred,
            "prompt_blocks": counts.blocks,
            "hit_blocks": counts.hit_blocks,
            "retries": self.retries,
            "broken": self.broken,
            "recording": self._journal is not None and self._journal.recording,
        }

    def _backend(self, watch: HealthWatch) -> Mapping[str, Any]:
        replica = self._dispatcher.state.replicas.get(watch.name)
        return {
            "url": watch.name,
            "health": watch.health.value,
            "requests": 0 if replica is None else replica.requests,
            "prefill_tokens": 0 if replica is None else replica.backlog,
            "assumed_blocks": self._dispatcher.assumed_blocks(watch.name),
        }

    def collect(self) -> Iterator[core.Metric]:
        """All metrics, at a scrape."""
        counts = self._dispatcher.counts
        for name, text, count in (
            ("placements", "Requests sent to a backend, again ones too", counts.placed),
            ("deferrals", "Requests that had to wait, for fair shares", counts.deferred),
            ("prompt_blocks", "Blocks of the prompts of placed requests", counts.blocks),
            ("hit_blocks", "Of these, expected in a cache", counts.hit_blocks),
            ("broken_answers", "Answers that a backend did not end", self.broken),
        ):
            yield core.CounterMetricFamily(_PREFIX + name, text, value=count)
        yield core.GaugeMetricFamily(
            f"{_PREFIX}waiting", "Requests deferred now", value=self._dispatcher.waiting
        )
        if self._journal is not None:
            yield core.GaugeMetricFamily(
                f"{_PREFIX}journal_writing",
                "Whether the journal is written",
                value=self._journal.recording,
            )
        retries = core.CounterMetricFamily(
            f"{_PREFIX}retries", "Attempts at another backend", labels=["cause"]
        )
        for cause, count in [*self.retries.items()]:
            retries.add_metric([cause], count)
        answers = core.CounterMetricFamily(
            f"{_PREFIX}answers", "Answers begun", labels=["backend", "status"]
        )
        for (backend, status), count in [*self.answers.items()]:
            answers.add_metric([backend, str(status)], count)
        yield from (retries, answers, *self._of_backends())

    def _of_backends(self) -> Iterator[core.Metric]:
        backends = [self._backend(watch) for watch in self._watches]
        for name, text in (
            ("requests", "Requests on a backend, by the router's accounts"),
            ("prefill_tokens", "Tokens whose prefill is to come, likewise"),
        ):
            family = core.GaugeMetricFamily(_PREFIX + name, text, labels=["backend"])
            for backend in backends:
                family.add_metric([backend["url"]], backend[name])
            yield family
        family = core.GaugeMetricFamily(
            f"{_PREFIX}backend_ready", "Whether it takes requests", labels=["backend"]
        )
        for backend in backends:
            family.add_metric(
                [backend["url"]], backend["health"] == ServerHealth.READY.value
            )
        yield family
