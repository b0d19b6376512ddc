"""Metrics of an engine for Prometheus: vLLM's, under the prefix `minfer_`.

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
from minfer.effects.live.served_model import ServedModel
from minfer.effects.live.totals import (
    ACCEPTED_AT,
    SECONDS,
    SIZES,
    HistogramBuilder,
    Totals,
)
from minfer.effects.serving.observability.metric_help import HELP, SETTINGS
from minfer.effects.serving.observability.replica_metrics import replica_metrics
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.timeline import Timeline

_TIMES: Final = (
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
_SIZES: Final = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_preemptions",
)
_ENDS: Final = {"stop": "stop", "length": "length", "cancelled": "abort"}  # else "error"


# Prefixes of the names of a front's counts; the label follows.
_ENDED: Final = "ended "
_WAITED: Final = "waited "
_ROUTED: Final = "routed "  # the replica follows, a space, and why


def _with_prefix(counts: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The counts with this prefix, by the rest of their names."""
    found = {name: count for name, count in counts.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): count for name, count in found.items()}


class Metrics(Collector):
    """The metrics of one engine, in a `registry` of their own; `collect` runs in any
    thread.
    """

    def __init__(self, llm: ServedModel, model: str) -> None:
        self.client = llm.client
        self.setup = llm.setup
        self.model = model
        self.buckets = {name: HistogramBuilder(SECONDS) for name in _TIMES}
        self.buckets |= {name: HistogramBuilder(SIZES) for name in _SIZES}
        self.ends = dict.fromkeys((*_ENDS.values(), "error"), 0)
        # Requests that this front sent to one of several engines: by the name of that, a
        # space, and why.
        self.routed: Mapping[str, int] = {}
        self.waits: dict[str, float] = {}  # of `request_queue_time_seconds`, by cause
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        llm.front.on_end.append(self.note_end)

    def _observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self.buckets[name].add(value)

    def note_end(self, job: OutputProcessor) -> None:
        """Add a request that has ended to the histograms of requests."""
        lengths = [one.ending.length for one in job.samples if one.ending]
        for one in job.samples:
            # As in its output: a stop string may be in the last token.
            why = "stop" if one.stop_string else one.ending.reason if one.ending else ""
            self.ends[_ENDS.get(why, "error")] += 1
        self._observe("request_prompt_tokens", len(job.request.prompt))
        self._observe("request_generation_tokens", sum(lengths))
        self._observe("request_params_n", job.request.n)
        self._observe("request_params_max_tokens", job.request.max_tokens)
        self._observe("request_preemptions", job.times.preempted)
        self._observe_times(job.times, max(lengths, default=0))

    def _observe_times(self, times: Timeline, longest: int) -> None:
        """Add the times of a request whose longest sample has so many tokens."""
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
            each = (times.last - times.first) / (longest - 1)
            self._observe("request_time_per_output_token_seconds", each)

    def front_totals(self) -> Totals:
        """The counts of requests that came through this front."""
        ends = {f"{_ENDED}{why}": float(count) for why, count in self.ends.items()}
        waits = {f"{_WAITED}{cause}": s for cause, s in self.waits.items()}
        sent = dict(self.routed)  # others may count meanwhile
        routed = {f"{_ROUTED}{where}": float(count) for where, count in sent.items()}
        filled = {name: one.histogram() for name, one in self.buckets.items()}
        return Totals(ends | waits | routed, filled)

    def collect(self) -> Iterator[core.Metric]:
        """All metrics, at present."""
        now = self.client.snapshot()
        # Of all fronts, if there are several; this one has reported its own by then.
        ours = now.fronts if now.fronts.histograms else self.front_totals()
        used = 1 - now.blocks_free / now.blocks
        gauge = core.GaugeMetricFamily
        counter = core.CounterMetricFamily
        yield self._family(gauge, "num_requests_running", now.running)
        yield self._family(gauge, "num_requests_waiting", now.waiting)
        yield self._family(
            gauge, "num_requests_waiting_by_reason", now.waiting_for, "reason"
        )
        yield self._family(gauge, "kv_cache_usage_perc", used)
        ends = _with_prefix(ours.counts, _ENDED)
        yield self._family(counter, "request_success", ends, "finished_reason")
        waits = _with_prefix(ours.counts, _WAITED)
        yield self._family(counter, "request_wait_seconds", waits, "cause")
        yield from self._engine_metrics(now.totals.counts)
        if now.replicas:
            routed = _with_prefix(ours.counts, _ROUTED)
            yield from replica_metrics(self.model, now.replicas, routed)
        for name, histogram in {**now.totals.histograms, **ours.histograms}.items():
            bounds = [*map(str, histogram.bounds), "+Inf"]
            found = list(zip(bounds, accumulate(histogram.counts), strict=True))
            yield self._family(core.HistogramMetricFamily, name, (found, histogram.total))
        if now.journal_writing is not None:
            yield self._family(gauge, "journal_writing", int(now.journal_writing))
            yield self._family(counter, "journal_errors", now.journal_errors)
        config = self.setup.config
        facts = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "enable_prefix_caching": str(self.setup.args.enable_prefix_caching),
            "model_name": self.model,
        }
        yield core.InfoMetricFamily("minfer_cache_config", SETTINGS, facts)

    def _engine_metrics(self, counts: Mapping[str, float]) -> Iterator[core.Metric]:
        """The metrics of the engine's counts, and those derived from them."""
        counter = core.CounterMetricFamily
        for name, count in counts.items():
            if not name.startswith((ACCEPTED_AT, REFUSED)):
                yield self._family(counter, name, count)
        if refused := _with_prefix(counts, REFUSED):
            yield self._family(counter, REFUSED.strip(), refused, "cause")
        places = _with_prefix(counts, ACCEPTED_AT)
        yield self._family(counter, ACCEPTED_AT.strip(), places, "position")
        drafts = counts.get("spec_decode_num_drafts", 0)
        accepted = counts.get("spec_decode_num_accepted_tokens", 0)
        length = 1 + accepted / drafts if drafts else 0.0
        yield self._family(
            core.GaugeMetricFamily, "spec_decode_mean_acceptance_length", length
        )

    def _family(self, kind: Any, name: str, value: Any, *by: str) -> Any:
        """A metric with its value, or with one for each value of the label `by`."""
        family = kind(f"minfer_{name}", HELP[name], labels=["model_name", *by])
        for key, one in value.items() if by else [(None, value)]:
            parts = one if isinstance(one, tuple) else (one,)
            family.add_metric([self.model, key] if by else [self.model], *parts)
        return family
