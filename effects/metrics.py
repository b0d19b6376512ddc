"""What an engine did and does, for Prometheus: vLLM's metrics under the prefix `minfer_`.

Names and meanings are vLLM's (`failed_steps` is minfer's); as there, the samples of a request count
one by one where nothing else is said. Counters and histograms are folds over the engine's
transitions, taken in its thread after each turn; gauges are read off its state when somebody asks.
A steady decode costs the same however many sequences run: those of a turn ago share one gap.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, repeat
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, core
from prometheus_client.registry import Collector

from minfer.effects.assembly import Assembly
from minfer.effects.options import Setup
from minfer.effects.worker import Worker
from minfer.messages import Admitted, Emit, Ended, Execute, Preempted, Reason, Voided
from minfer.sequence import SampleId
from minfer.state import Transition

_COUNTERS: Final = ("prompt_tokens", "generation_tokens", "prefix_cache_queries",
                    "prefix_cache_hits", "num_preemptions", "failed_steps")  # fmt: skip
_TIMES: Final = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
)  # fmt: skip
_SIZES: Final = ("iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens",
                 "request_params_n", "request_params_max_tokens")  # fmt: skip
_BOUNDS: Final = {
    **dict.fromkeys(_TIMES, tuple(m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5))),
    **dict.fromkeys(_SIZES, tuple(m * 10.0**e for e in range(7) for m in (1, 2, 5))),
}
_ENDS: Final = {"stop": "stop", "length": "length", "cancelled": "abort"}  # else "error"


class Metrics(Collector):
    """The metrics of one engine, in a registry of their own: `registry`.

    `turn` and `ended` are called in the engine's thread, `collect` in any.
    """

    def __init__(self, worker: Worker, setup: Setup, model: str) -> None:
        self.worker, self.setup, self.model = worker, setup, model
        self.counts: Counter[str] = Counter()
        self.sums = dict.fromkeys(_BOUNDS, 0.0)
        self.buckets = {name: [0] * (len(bounds) + 1) for name, bounds in _BOUNDS.items()}
        self.ends = dict.fromkeys((*_ENDS.values(), "error"), 0)
        self.arrived: dict[SampleId, float] = {}  # of those that have been admitted
        self.last: dict[SampleId, float] = {}  # when they had their last output, but for `ids`
        self.ids: tuple[SampleId, ...] = ()  # those that all had their last output at `then`
        self.then = self.moved = 0.0  # `moved`: when the last step was planned
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
        now = transition.state.time
        for command in transition.commands:
            if isinstance(command, Emit):
                self._emitted(command, now)
            elif isinstance(command, Execute):
                self.moved = now
                self._see("iteration_tokens_total", sum(command.plan.counts))
        for reason in transition.reasons:
            self._learn(reason, now)

    def _emitted(self, emit: Emit, now: float) -> None:
        ids, tokens, everyone = emit.ids, emit.tokens, all(emit.tokens)
        self.counts["generation_tokens"] += sum(map(len, tokens))
        if everyone and ids is self.ids:
            self._see("inter_token_latency_seconds", now - self.then, len(ids))
            self.then = now
            return
        self._settle()
        for name, new in zip(ids, tokens, strict=True):
            if new and name in self.last:
                self._see("inter_token_latency_seconds", now - self.last[name])
            elif new and name in self.arrived:
                self._see("time_to_first_token_seconds", now - self.arrived[name])
            if new:
                self.last[name] = now
        if everyone:
            self.ids, self.then = ids, now

    def _settle(self) -> None:
        """Note for each by itself what was kept for all together."""
        self.last.update(zip(self.ids, repeat(self.then)))
        self.ids = ()

    def _learn(self, reason: Reason, now: float) -> None:
        match reason:
            case Admitted(name, sample) if (name, sample) not in self.arrived:
                self.arrived[name, sample] = now - reason.waited
                self.counts["prefix_cache_queries"] += reason.prompt
                self.counts["prefix_cache_hits"] += reason.hit
                self.counts["prompt_tokens"] += 0 if sample else reason.prompt  # once a request
            case Ended(name, sample, why):
                self._settle()
                self.arrived.pop((name, sample), None)
                self.last.pop((name, sample), None)
                self.ends[_ENDS.get(why, "error")] += 1
            case Preempted():
                self.counts["num_preemptions"] += 1
            case Voided():
                self.counts["failed_steps"] += reason.plans

    def ended(self, job: Assembly) -> None:
        """Take a request that has ended into the histograms of requests."""
        lengths = [one.done.length for one in job.samples if one.done]
        self._see("request_prompt_tokens", len(job.request.prompt))
        self._see("request_generation_tokens", sum(lengths))
        self._see("request_params_n", job.request.n)
        self._see("request_params_max_tokens", job.request.max_tokens)
        if job.started is None or job.first is None or job.last is None:
            return
        self._see("e2e_request_latency_seconds", job.last - job.arrived)
        self._see("request_queue_time_seconds", job.started - job.arrived)
        self._see("request_prefill_time_seconds", job.first - job.started)
        self._see("request_decode_time_seconds", job.last - job.first)
        self._see("request_inference_time_seconds", job.last - job.started)
        if (most := max(lengths)) > 1:
            each = (job.last - job.first) / (most - 1)
            self._see("request_time_per_output_token_seconds", each)

    def collect(self) -> Iterator[core.Metric]:
        """Everything, as it is now."""
        state, config = self.worker.driver.state, self.setup.config
        waiting = len(state.waiting)
        # The first in line waits for its cause, the others for their turn.
        why = {"turn": waiting - 1} | {state.held[1]: 1} if waiting and state.held else {}
        used = 1 - state.blocks.available / config.num_blocks
        gauge, counter = core.GaugeMetricFamily, core.CounterMetricFamily
        yield self._family(gauge, "num_requests_running", len(state.running))
        yield self._family(gauge, "num_requests_waiting", waiting)
        yield self._family(gauge, "num_requests_waiting_by_reason", why, "reason")
        yield self._family(gauge, "kv_cache_usage_perc", used)
        yield self._family(counter, "request_success", self.ends, "finished_reason")
        for name in _COUNTERS:
            yield self._family(counter, name, self.counts[name])
        for name, bounds in _BOUNDS.items():
            found = zip([*map(str, bounds), "+Inf"], accumulate(self.buckets[name]), strict=True)
            yield self._family(core.HistogramMetricFamily, name, (list(found), self.sums[name]))
        facts = {"block_size": str(config.block_size), "num_gpu_blocks": str(config.num_blocks),
                 "enable_prefix_caching": str(self.setup.args.enable_prefix_caching),
                 "model_name": self.model}  # fmt: skip
        yield core.InfoMetricFamily("minfer_cache_config", "cache config", facts)

    def _family(self, kind: Any, name: str, value: Any, *by: str) -> Any:
        """A metric with its value, or with one for each value of the label `by`."""
        family = kind(f"minfer_{name}", name.replace("_", " "), labels=["model_name", *by])
        for key, one in value.items() if by else [(None, value)]:
            parts = one if isinstance(one, tuple) else (one,)
            family.add_metric([self.model, key] if by else [self.model], *parts)
        return family
