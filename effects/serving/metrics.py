"""What an engine did and does, for Prometheus: vLLM's metrics under the prefix `minfer_`.

Names and meanings are vLLM's (minfer's own: `failed_steps`, `overruled_policy_answers`,
`request_wait_seconds`, `request_preemptions`); samples of a request count one by one.
Counters and histograms are folds over transitions, taken in the engine's thread after
each turn; gauges are read off its state when somebody asks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, compress
from typing import Any, Final

from attrs import define
from prometheus_client import CollectorRegistry, ProcessCollector, core
from prometheus_client.registry import Collector

from minfer.effects.live.worker import Worker
from minfer.effects.setup.options import Setup
from minfer.effects.text.assembly import Assembly
from minfer.messages import Admitted, Emit, Ended, Execute, Overruled, Preempted, Voided
from minfer.plan import Yields
from minfer.schedule import waits_for
from minfer.sequence import SampleId, SampleIds
from minfer.state import Transition

_COUNTERS: Final = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "failed_steps",
    "overruled_policy_answers",
)
_FIRST, _GAP = "time_to_first_token_seconds", "inter_token_latency_seconds"
_TIMES: Final = (
    _FIRST,
    _GAP,
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
_SIZES: Final = (
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_preemptions",
)
_BOUNDS: Final = {
    **dict.fromkeys(_TIMES, tuple(m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5))),
    **dict.fromkeys(_SIZES, tuple(m * 10.0**e for e in range(7) for m in (1, 2, 5))),
}
_ENDS: Final = {"stop": "stop", "length": "length", "cancelled": "abort"}  # else "error"


@define(eq=False)
class _Since:
    """What the next output of some samples ends, and since when; they share it while in
    step.
    """

    name: str
    time: float


class Metrics(Collector):
    """The metrics of one engine, in a `registry` of their own; `collect` runs in any
    thread.
    """

    def __init__(self, worker: Worker, setup: Setup, model: str) -> None:
        self.worker, self.setup, self.model = worker, setup, model
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self.sums = dict.fromkeys(_BOUNDS, 0.0)
        self.buckets = {name: [0] * (len(bounds) + 1) for name, bounds in _BOUNDS.items()}
        self.ends = dict.fromkeys((*_ENDS.values(), "error"), 0)
        self.last: dict[
            SampleId, _Since
        ] = {}  # the last output of a sample, or its arrival
        self.ids: SampleIds | None = None  # all these, and nobody else, share `since`
        self.since = _Since(_GAP, 0.0)
        self.moved = 0.0  # when the last step was planned
        self.waits: dict[str, float] = {}  # of `request_queue_time_seconds`, by cause
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        worker.observers.append(self.turn)
        worker.on_end.append(self.ended)

    def _see(self, name: str, value: float, times: int = 1) -> None:
        """Take a value into a histogram, so many times."""
        self.buckets[name][bisect_left(_BOUNDS[name], value)] += times
        self.sums[name] += value * times

    def turn(self, transition: Transition) -> None:
        """Fold a turn."""
        now, counts = transition.state.time, self.counts
        for news in (*transition.commands, *transition.reasons):
            match news:
                case Emit(ids, tokens):
                    counts["generation_tokens"] += sum(map(len, tokens))
                    self._emitted(ids, tokens, now)
                case Execute(plan):
                    self.moved = now
                    self._see("iteration_tokens_total", sum(plan.counts))
                case Admitted(name, sample) if news.prompt:  # for the first time
                    self.last[name, sample] = _Since(_FIRST, now - news.waited)
                    counts["prefix_cache_queries"] += news.prompt
                    counts["prefix_cache_hits"] += news.cached
                    counts["prompt_tokens"] += (
                        0 if sample else news.prompt
                    )  # once a request
                case Ended(name, sample):
                    self.last.pop((name, sample), None)
                case Preempted():
                    counts["num_preemptions"] += 1
                case Voided(plans=plans):
                    counts["failed_steps"] += plans
                case Overruled():
                    counts["overruled_policy_answers"] += 1

    def _emitted(self, ids: SampleIds, tokens: Yields, now: float) -> None:
        everyone = all(tokens)
        if everyone and ids is self.ids:  # as in the turn before
            self._see(_GAP, now - self.since.time, len(ids))
            self.since.time = now
            return
        new = list(compress(ids, tokens))
        for since, times in Counter(map(self.last.get, new)).items():
            if since is not None:
                self._see(since.name, now - since.time, times)
        self.ids, self.since = ids if everyone else None, _Since(_GAP, now)
        self.last.update(dict.fromkeys(new, self.since))

    def ended(self, job: Assembly) -> None:
        """Take a request that has ended into the histograms of requests."""
        lengths = [one.done.length for one in job.samples if one.done]
        for (
            one
        ) in job.samples:  # as its reader is told: a stop string may be in the last token
            why = "stop" if one.stop else one.done.reason if one.done else ""
            self.ends[_ENDS.get(why, "error")] += 1
        self._see("request_prompt_tokens", len(job.request.prompt))
        self._see("request_generation_tokens", sum(lengths))
        self._see("request_params_n", job.request.n)
        self._see("request_params_max_tokens", job.request.max_tokens)
        self._see("request_preemptions", job.preempted)
        if job.started is None or job.first is None or job.last is None:
            return
        self._see("e2e_request_latency_seconds", job.last - job.arrived)
        self._see("request_queue_time_seconds", job.started - job.arrived)
        for cause, seconds in job.queued.items():
            self.waits[cause] = self.waits.get(cause, 0.0) + seconds
        self._see("request_prefill_time_seconds", job.first - job.started)
        self._see("request_decode_time_seconds", job.last - job.first)
        self._see("request_inference_time_seconds", job.last - job.started)
        if (most := max(lengths, default=0)) > 1:
            each = (job.last - job.first) / (most - 1)
            self._see("request_time_per_output_token_seconds", each)

    def collect(self) -> Iterator[core.Metric]:
        """Everything, as it is now."""
        state, config = self.worker.driver.state, self.setup.config
        waiting = len(state.waiting)
        # The first in line waits for its cause, the others for their turn.
        why = {"turn": waiting - 1} | {waits_for(config, state): 1} if waiting else {}
        used = 1 - state.blocks.available / config.num_blocks
        gauge, counter = core.GaugeMetricFamily, core.CounterMetricFamily
        yield self._family(gauge, "num_requests_running", len(state.running))
        yield self._family(gauge, "num_requests_waiting", waiting)
        yield self._family(gauge, "num_requests_waiting_by_reason", why, "reason")
        yield self._family(gauge, "kv_cache_usage_perc", used)
        yield self._family(counter, "request_success", self.ends, "finished_reason")
        yield self._family(counter, "request_wait_seconds", dict(self.waits), "cause")
        for name, count in self.counts.items():
            yield self._family(counter, name, count)
        for name, bounds in _BOUNDS.items():
            found = zip(
                [*map(str, bounds), "+Inf"], accumulate(self.buckets[name]), strict=True
            )
            yield self._family(
                core.HistogramMetricFamily, name, (list(found), self.sums[name])
            )
        facts = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "enable_prefix_caching": str(self.setup.args.enable_prefix_caching),
            "model_name": self.model,
        }
        yield core.InfoMetricFamily("minfer_cache_config", "cache config", facts)

    def _family(self, kind: Any, name: str, value: Any, *by: str) -> Any:
        """A metric with its value, or with one for each value of the label `by`."""
        family = kind(
            f"minfer_{name}", name.replace("_", " "), labels=["model_name", *by]
        )
        for key, one in value.items() if by else [(None, value)]:
            parts = one if isinstance(one, tuple) else (one,)
            family.add_metric([self.model, key] if by else [self.model], *parts)
        return family
