"""The benchmark of draft heads runs where there is no GPU, and goes on where it was."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.draft_heads_gpu import ALWAYS, MODELS, OPTIONS, measure
from bench.speculation_cases import PLAIN


@pytest.mark.long
def test_a_tiny_shape_runs_on_the_cpu(tmp_path: Path) -> None:
    defaults = {name[2:]: option.get("default") for name, option in OPTIONS.items()}
    given: dict[str, Any] = {"rows": [2], "pairs": 1, "device": "cpu", "tiny": True}
    given |= {"ways": [ALWAYS], "folder": tmp_path, "name": "heads"}
    for pairs in (1, 2):
        measure(argparse.Namespace(**{**defaults, **given, "pairs": pairs}))
        results = json.loads((tmp_path / "heads.json").read_text())["results"]
        assert len(results["figures"]) == len(MODELS)
        for cases in results["rates"].values():
            assert {name: len(rates) for name, rates in cases["2 rows"].items()} == {
                PLAIN: pairs,
                ALWAYS: pairs,
            }
