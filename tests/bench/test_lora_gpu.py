"""Adapters are measured at toy sizes on the CPU, and a stopped run goes on."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import lora_gpu

PARTS = ["decode", "end_to_end", "cold", "kernels"]


def options(folder: Path, **changes: Any) -> Namespace:
    values = {
        "shape": "tiny",
        "device": "cpu",
        "parts": PARTS,
        "batches": [1, 3],
        "ranks": [4],
        "slots": 2,
        "prompt": 12,
        "output": 4,
        "repeats": 1,
        "layers": 1,
        "bandwidth": 1e12,
        "sweep": False,
        "seed": 0,
        "folder": folder,
        "name": "lora_gpu",
    }
    return Namespace(**values | changes)


@pytest.mark.long
def test_all_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_gpu, "MATRICES", {"out": (64, (48,))})
    results = lora_gpu.measure(options(tmp_path))
    served = results["tiny, end_to_end"]
    assert [*served] == [
        "1 rows, rank 4, none",
        "1 rows, rank 4, one",
        "3 rows, rank 4, none",
        "3 rows, rank 4, one",
        "3 rows, rank 4, different",
    ]
    assert served["3 rows, rank 4, different"]["speed of none"] > 0
    floors = [cell["floor of a step, ms"] for cell in served.values()]
    assert floors[0] == floors[2] < floors[1] == floors[3] < floors[4]
    assert results["tiny, cold"]["rank 4"]["bytes"] > 0
    stored = json.loads((tmp_path / "lora_gpu.json").read_text())["results"]
    assert stored.keys() == results.keys()
    # What is there is not measured again.
    monkeypatch.setattr(lora_gpu, "end_to_end", None)
    again = lora_gpu.measure(options(tmp_path, parts=["end_to_end"]))
    assert again["tiny, end_to_end"] == served
