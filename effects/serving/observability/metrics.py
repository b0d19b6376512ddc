"""Metrics of an engine for Prometheus: vLLM's, under the prefix `minfer_`; by an option
under vLLM's own, too (`vllm_metrics`).

Names and meanings are vLLM's (minfer's own: `failed_steps`, `overruled_policy_answers`,
`request_wait_seconds`, `request_preemptions`, and of a journal, if there is one,
`journal_errors` and `journal_writing`); samples of a request count one by one.
The engine's counts are read from its snapshot at each scrape
(`minfer.effects.live.totals`); histograms of requests are filled here, as they end.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, core
from prometheus_client.registry import Collector

from minfer.effects.execution.tiers.block_folder import REFUSED
from minfer.effects.live.client import Snapshot
from minfer.effects.live.served_model import ServedModel
from minfer.effects.live.totals import (
    ACCEPTED_PER_POSITION,
    SECONDS_BOUNDS,
    TOKENS_BOUNDS,
    HistogramBuilder,
    Totals,
)
from minfer.effects.serving.observability.adapter_metrics import (
    REQUESTS_PREFIX,
    TOKENS_PREFIX,
    AdapterCounts,
)
from minfer.effects.serving.observability.metric_help import HELP, SETTINGS
from minfer.effects.serving.observability.replica_metrics import replica_metrics
from minfer.effects.serving.observability.vllm_metrics import (
    AdapterLabels,
    vllm_metrics,
)
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.timeline import Timeline

_TIME_HISTOGRAMS: Final = (
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
_SIZE_HISTOGRAMS: Final = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_preemptions",
)
# Of other ends: "error".
_FINISHED_REASONS: Final = {"stop": "stop", "length": "length", "cancelled": "abort"}


# Prefixes of the names of an API server's counts; the label follows.
_ENDED_PREFIX: Final = "ended "
_WAITED_PREFIX: Final = "waited "
_ROUTED_PREFIX: Final = "routed "  # the replica follows, a space, and why


def _with_prefix(counts: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The counts with this prefix, by the rest of their names."""
    matches = {name: count for name, count in counts.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): count for name, count in matches.items()}


class Metrics(Collector):
    """The metrics of one engine, in a `registry` of their own; `collect` runs in any
    thread.
    """

    def __init__(self, llm: ServedModel, model: str, *, vllm_names: bool = False) -> None:
        """`vllm_names` adds the metrics under vLLM's names."""
        self.client = llm.client
        self.setup = llm.setup
        self.model = model
        self.vllm_names = vllm_names
        self.buckets = {
            name: HistogramBuilder(SECONDS_BOUNDS) for name in _TIME_HISTOGRAMS
        }
        self.buckets |= {
            name: HistogramBuilder(TOKENS_BOUNDS) for name in _SIZE_HISTOGRAMS
        }
        self.ends = dict.fromkeys((*_FINISHED_REASONS.values(), "error"), 0)
        # Requests that this API server sent to one of several engines: by the name of
        # that, a space, and why.
        self.routed: Mapping[str, int] = {}
        self.adapters = AdapterCounts(llm.adapters)
        self.waits: dict[str, float] = {}  # of `request_queue_time_seconds`, by cause
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        llm.frontend.on_end.append(self.note_end)

    def _observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self.buckets[name].add(value)

    def note_end(self, job: OutputProcessor) -> None:
        """Add a request that has ended to the histograms of requests."""
        lengths = [sample.ending.length for sample in job.samples if sample.ending]
        for sample in job.samples:
            # As in its output: a stop string may be in the last token.
            reason = (
                "stop"
                if sample.stop_string
                else sample.ending.reason
                if sample.ending
                else ""
            )
            self.ends[_FINISHED_REASONS.get(reason, "error")] += 1
        self.adapters.note_end(job, sum(lengths))
        self._observe("request_prompt_tokens", len(job.request.prompt))
        self._observe("request_generation_tokens", sum(lengths))
        self._observe("request_params_n", job.request.n)
        self._observe("request_params_max_tokens", job.request.max_tokens)
        self._observe("request_preemptions", job.times.preempted)
        self._observe_times(job.times, max(lengths, default=0))

    def _observe_times(self, times: Timeline, longest: int) -> None:
        """Add the times of a request whose longest sample has `longest` tokens."""
        if times.started is None or times.first is None or times.last is None:
            return
        self._observe("e2e_request_latency_seconds", times.last - times.arrived)
        self._observe("request_queue_time_seconds", times.started - times.arrived)
        for cause, seconds in times.queued.items():
            self.waits[cause] = self.waits.get(cause, 0.0) + seconds
        self._observe("request_prefill_time_seconds", times.first - times.started)
        self._observe("request_decode_time_seconds", times.last - times.first)
        self._observe("request_inference_time_seconds", times.last - times.started)
        if longest > 1:
            per_token = (times.last - times.first) / (longest - 1)
            self._observe("request_time_per_output_token_seconds", per_token)

    def api_server_totals(self) -> Totals:
        """The counts of requests that came through this API server."""
        ends = {
            f"{_ENDED_PREFIX}{reason}": float(count)
            for reason, count in self.ends.items()
        }
        waits = {
            f"{_WAITED_PREFIX}{cause}": seconds for cause, seconds in self.waits.items()
        }
        sent = dict(self.routed)  # others may count meanwhile
        routed = {
            f"{_ROUTED_PREFIX}{target}": float(count) for target, count in sent.items()
        }
        filled = {name: bucket.histogram() for name, bucket in self.buckets.items()}
        return Totals(ends | waits | routed | self.adapters.counts(), filled)

    def collect(self) -> Iterator[core.Metric]:
        """All metrics, at present."""
        families = [*self._collect()]
        yield from families
        if self.vllm_names:
            yield from vllm_metrics(families, self._adapter_labels())

    def _adapter_labels(self) -> AdapterLabels:
        """The adapters that run and wait, by name."""
        snapshot = self.client.snapshot()
        return AdapterLabels(
            max_lora=self.setup.config.adapter_slots,
            running=self.adapters.names(snapshot.running_adapters),
            waiting=self.adapters.names(snapshot.waiting_adapters),
        )

    def _collect(self) -> Iterator[core.Metric]:
        """All metrics under minfer's names."""
        snapshot = self.client.snapshot()
        # Of all API servers, if there are several; this one has reported its own by then.
        totals = (
            snapshot.api_servers
            if snapshot.api_servers.histograms
            else self.api_server_totals()
        )
        used = 1 - snapshot.blocks_free / snapshot.blocks
        gauge = core.GaugeMetricFamily
        counter = core.CounterMetricFamily
        yield self._family(gauge, "num_requests_running", snapshot.running)
        yield self._family(gauge, "num_requests_waiting", snapshot.waiting)
        yield self._family(
            gauge, "num_requests_waiting_by_reason", snapshot.waiting_for, "reason"
        )
        yield self._family(gauge, "kv_cache_usage_perc", used)
        ends = _with_prefix(totals.counts, _ENDED_PREFIX)
        yield self._family(counter, "request_success", ends, "finished_reason")
        waits = _with_prefix(totals.counts, _WAITED_PREFIX)
        yield self._family(counter, "request_wait_seconds", waits, "cause")
        if self.setup.config.adapter_slots:
            yield from self._adapter_metrics(snapshot, totals.counts)
        yield from self._engine_metrics(snapshot.totals.counts)
        if snapshot.replicas:
            routed = _with_prefix(totals.counts, _ROUTED_PREFIX)
            yield from replica_metrics(self.model, snapshot.replicas, routed)
        for name, histogram in {
            **snapshot.totals.histograms,
            **totals.histograms,
        }.items():
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            yield self._family(
                core.HistogramMetricFamily, name, (buckets, histogram.total)
            )
        if snapshot.journal_writing is not None:
            yield self._family(gauge, "journal_writing", int(snapshot.journal_writing))
            yield self._family(counter, "journal_errors", snapshot.journal_errors)
        config = self.setup.config
        facts = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "enable_prefix_caching": str(self.setup.args.enable_prefix_caching),
            "model_name": self.model,
        }
        yield core.InfoMetricFamily("minfer_cache_config", SETTINGS, facts)

    def _adapter_metrics(
        self, snapshot: Snapshot, counts: Mapping[str, float]
    ) -> Iterator[core.Metric]:
        """The metrics of adapters, and of requests by adapter."""
        gauge, counter = core.GaugeMetricFamily, core.CounterMetricFamily
        running = len(snapshot.running_adapters)
        yield self._family(gauge, "num_adapters_running", running)
        waiting = len(snapshot.waiting_adapters)
        yield self._family(gauge, "num_adapters_waiting", waiting)
        for prefix in (REQUESTS_PREFIX, TOKENS_PREFIX):
            by_adapter = _with_prefix(counts, prefix)
            yield self._family(counter, prefix.strip(), by_adapter, "adapter")

    def _engine_metrics(self, counts: Mapping[str, float]) -> Iterator[core.Metric]:
        """The metrics of the engine's counts, and those derived from them."""
        counter = core.CounterMetricFamily
        for name, count in counts.items():
            if not name.startswith((ACCEPTED_PER_POSITION, REFUSED)):
                yield self._family(counter, name, count)
        if refused := _with_prefix(counts, REFUSED):
            yield self._family(counter, REFUSED.strip(), refused, "cause")
        places = _with_prefix(counts, ACCEPTED_PER_POSITION)
        yield self._family(counter, ACCEPTED_PER_POSITION.strip(), places, "position")
        drafts = counts.get("spec_decode_num_drafts", 0)
        accepted = counts.get("spec_decode_num_accepted_tokens", 0)
        length = 1 + accepted / drafts if drafts else 0.0
        yield self._family(
            core.GaugeMetricFamily, "spec_decode_mean_acceptance_length", length
        )

    def _family(self, kind: Any, name: str, value: Any, *label: str) -> Any:
        """A metric with its value, or with one for each value of the label `label`."""
        family = kind(f"minfer_{name}", HELP[name], labels=["model_name", *label])
        for key, labelled in value.items() if label else [(None, value)]:
            values = labelled if isinstance(labelled, tuple) else (labelled,)
            family.add_metric([self.model, key] if label else [self.model], *values)
        return family
