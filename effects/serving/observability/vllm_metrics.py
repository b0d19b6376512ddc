"""The metrics under the names of vLLM 0.33, for dashboards and gateways that read these.

Kubernetes' gateway API inference extension, for one, reads `vllm:num_requests_waiting`,
`vllm:num_requests_running`, `vllm:kv_cache_usage_perc`, `vllm:cache_config_info` and
`vllm:lora_requests_info`. Meanings are the same; what vLLM does not have keeps its own
name alone.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from attrs import frozen
from prometheus_client import core

_OWN_PREFIX: Final = "minfer_"
_PREFIX: Final = "vllm:"
_ENGINE: Final = "0"  # a server's engines are counted together
# Metrics of the same name and meaning, without the prefix.
SAME_NAMES: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "request_success",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "cache_config",
)
NAMES: Final = {name: name for name in SAME_NAMES} | {
    "request_preemptions": "request_num_preemptions"
}
_BY_REASON: Final = "num_requests_waiting_by_reason"
_CAPACITY: Final = "capacity"  # vLLM's two reasons
_DEFERRED: Final = "deferred"
# KV or adapters that come from elsewhere; others: capacity.
_DEFERRED_CAUSES: Final = ("loading", "adapter")


@frozen(kw_only=True)
class AdapterLabels:
    """The labels of the metric of adapters."""

    max_lora: int = 0  # adapters on the device at once
    running: str = ""  # names, with commas between them
    waiting: str = ""

    def labels(self) -> dict[str, str]:
        """Under vLLM's names."""
        return {
            "max_lora": str(self.max_lora),
            "running_lora_adapters": self.running,
            "waiting_lora_adapters": self.waiting,
        }


def vllm_metrics(
    families: Iterable[core.Metric], adapter_labels: AdapterLabels
) -> Iterator[core.Metric]:
    """The metrics of these that vLLM has, under its names, and that of adapters."""
    for family in families:
        name = family.name.removeprefix(_OWN_PREFIX)
        if name in NAMES:
            yield _renamed(family, name, NAMES[name])
        elif name == _BY_REASON:
            yield _by_reason(family)
    labels = adapter_labels.labels()
    adapters = core.GaugeMetricFamily(
        f"{_PREFIX}lora_requests_info",
        "LoRA adapters of requests that run, and of those that wait while none of theirs "
        "runs, as labels. The value is the time.",
        labels=[*labels],
    )
    adapters.add_metric([*labels.values()], time.time())
    yield adapters


def _renamed(family: core.Metric, name: str, vllm_name: str) -> core.Metric:
    """The metric under another name, with vLLM's label of the engine."""
    renamed = core.Metric(f"{_PREFIX}{vllm_name}", family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(f"{_OWN_PREFIX}{name}")
        labels = {**sample.labels, "engine": _ENGINE}
        renamed.add_sample(f"{_PREFIX}{vllm_name}{suffix}", labels, sample.value)
    return renamed


def _by_reason(family: core.Metric) -> core.Metric:
    """What waits by vLLM's reasons, which are two."""
    by_reason = core.Metric(f"{_PREFIX}{_BY_REASON}", family.documentation, family.type)
    counts, model = Counter[str](), ""
    for sample in family.samples:
        is_deferred = sample.labels["reason"] in _DEFERRED_CAUSES
        counts[_DEFERRED if is_deferred else _CAPACITY] += int(sample.value)
        model = sample.labels["model_name"]
    for reason in (_CAPACITY, _DEFERRED):
        labels = {"model_name": model, "engine": _ENGINE, "reason": reason}
        by_reason.add_sample(f"{_PREFIX}{_BY_REASON}", labels, counts[reason])
    return by_reason
