"""The table and the file of a run."""

import json
from pathlib import Path

import pytest

from minfer.effects.runs.load.load_report import result_path, save, table
from minfer.effects.runs.load.request_record import LoadError
from tests.effects.runs.load.stub import load_on
from tests.effects.runs.load.test_load_metrics import FAILED, STOPPED, metrics
from tests.effects.runs.load.test_load_options import options


def test_the_table_has_vllms_rows() -> None:
    lines = table(metrics(*FAILED, STOPPED, ttft=500)).splitlines()
    for title, value in (
        ("Successful requests:", "8"),
        ("Failed requests:", "3"),
        ("Interrupted requests:", "1"),
        ("Request throughput (req/s):", "0.80"),
        ("Request goodput (req/s):", "0.80"),
        ("Mean TTFT (ms):", "499.00"),
        ("P99 TPOT (ms):", "250.00"),
        ("Median E2EL (ms):", "1499.00"),
    ):
        assert f"{title:<40} {value}" in lines
    assert lines[-2:] == [
        "2 failed (HTTP 503), first: full",
        "1 failed (timed out), first: late",
    ]


def test_the_file_has_settings_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    goals = ("--goodput", "ttft:1", "e2el:inf", "--metric-percentiles", "50,99")
    prompts = ("--dataset-name", "custom", "--dataset-path", "prompts.jsonl")
    given = options(*goals, *prompts, "--result-filename", str(path))
    save(path, given, load_on("http://x", 3, key="secret"), metrics())
    text = path.read_text("utf-8")
    found = json.loads(text)
    assert (found["model_id"], found["num_prompts"]) == ("one", 3)
    assert (found["request_rate"], found["burstiness"]) == ("inf", 1.0)
    assert (found["backend"], found["url"]) == ("openai", "http://x/v1/completions")
    assert found["goodput"] == {"ttft": 1.0, "e2el": "inf"}
    assert found["metric_percentiles"] == [50.0, 99.0]
    assert found["dataset_path"] == "prompts.jsonl"
    assert found["mean_ttft_ms"] == pytest.approx(499)
    assert "secret" not in text


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert result_path(options(), "m") is None
    named = result_path(options("--save-result", "--request-rate", "2"), "a/m")
    assert named is not None
    assert named.name.startswith("openai-2qps-m-")
    given = result_path(options("--result-filename", "x.json"), "m")
    assert given == Path("x.json")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(LoadError, match="name another place"):
        result_path(options("--result-filename", "no/x.json"), "m")
