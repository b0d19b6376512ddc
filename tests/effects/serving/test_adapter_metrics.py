"""Requests by adapter: names as labels, of which there are few."""

from pathlib import Path
from typing import Any

import pytest

from minfer.effects.live.adapters.registry import AdapterEntry, AdapterRegistry
from minfer.effects.live.adapters.served_adapters import ServedAdapters
from minfer.effects.serving.observability import adapter_metrics
from minfer.effects.serving.observability.adapter_metrics import AdapterCounts
from minfer.effects.serving.observability.vllm_metrics import AdapterLabels, vllm_metrics
from minfer.effects.text.output_processor import OutputProcessor
from minfer.records.request import Request


def job(adapter: str) -> OutputProcessor:
    request = Request(id="a", prompt=(1,), max_tokens=1, adapter=adapter)
    return OutputProcessor(request, print)


@pytest.fixture
def adapters(tmp_path: Path) -> ServedAdapters:
    names = AdapterRegistry(tmp_path)
    for digest in ("0a", "0b", "0c"):
        names.add(
            AdapterEntry(
                name=f"n{digest}", digest=digest, folder="", origin="", rank=1, size=1
            )
        )
    spec: Any = None
    return ServedAdapters(names, spec, 16)


def test_requests_are_counted_by_name(
    adapters: ServedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_metrics, "MAX_LABELS", 2)
    counts = AdapterCounts(adapters)
    for digest, tokens in (("0a", 1), ("", 9), ("0b", 2), ("0c", 4), ("0a", 8)):
        counts.note_end(job(digest), tokens)
    adapters.registry.remove("n0a")
    counts.note_end(job("0a"), 16)  # by the name that it had
    assert counts.counts() == {
        "adapter_requests n0a": 3.0,
        "adapter_requests n0b": 1.0,
        "adapter_requests other adapters": 1.0,
        "adapter_generation_tokens n0a": 25.0,
        "adapter_generation_tokens n0b": 2.0,
        "adapter_generation_tokens other adapters": 4.0,
    }
    assert counts.names(["0b", "0a"]) == "n0b,0a"  # a digest that has no name now
    assert AdapterCounts(None).counts() == {}
    assert AdapterCounts(None).names(["0a"]) == ""


def test_gateways_read_them_under_vllms_name() -> None:
    labels = AdapterLabels(max_lora=8, running="a,b", waiting="c")
    (family,) = vllm_metrics([], labels)
    (sample,) = family.samples
    assert sample.name == "vllm:lora_requests_info"
    assert sample.labels == {
        "max_lora": "8",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "c",
    }
