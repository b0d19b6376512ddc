"""What people and programs are told."""

import json
from pathlib import Path

from minfer.effects.runs.load.figures import figures_of
from minfer.effects.runs.load.processes import Outcome
from minfer.effects.runs.load.result import over_all, table, write
from tests.effects.runs.load.test_figures import ANSWERED, FAILED, GIVEN_UP, figures
from tests.effects.runs.load.test_options import options


def test_the_table_has_all_figures() -> None:
    text = table(figures(*FAILED, GIVEN_UP, ttft=600))
    for part in (
        "8 of 12 answered, 3 failed, 1 given up, in 10.00 s",
        "2 HTTP 503; the first: full",
        "0.80 requests/s, 4.1 output tokens/s",
        "goodput       0.80 requests/s, 72.7% of all, with ttft 600 ms",
        "2 processes; the busiest used 50% of a core",
    ):
        assert part in text
    (ttft,) = [line for line in text.splitlines() if line.startswith("TTFT")]
    assert ttft.split()[-5:] == ["499.00"] * 5


def test_the_table_of_nothing() -> None:
    text = table(figures_of(Outcome(FAILED, 1.0, (0.1,)), {}))
    assert "0 of 3 answered, 3 failed" in text
    assert "TTFT" not in text


def test_runs_are_summed_up() -> None:
    text = over_all([figures(), figures(*FAILED)])
    assert "over 2 runs" in text
    assert "requests      0.80/s (0.80 to 0.80)" in text
    assert "goodput" not in text


def test_the_file_has_settings_figures_and_no_key(tmp_path: Path) -> None:
    told = options("--api-key", "secret", "--json", "x.json", "--burstiness", "inf")
    path = tmp_path / "x.json"
    write(path, told, "m", [figures(*FAILED)], [[*ANSWERED, *FAILED]])
    text = path.read_text("utf-8")
    assert "secret" not in text
    found = json.loads(text, parse_constant=lambda name: 1 / 0 if name else None)
    assert found["model"] == "m"
    assert found["settings"]["burstiness"] == "inf"
    assert found["settings"]["base_url"] == "http://127.0.0.1:8000"
    (run,) = found["runs"]
    assert run["completed"] == 8
    assert run["records"][0]["events"] == [0.5, 1.0, 1.5]
    assert run["records"][8]["failure"] == {"kind": "HTTP 503", "message": "full"}
    write(path, told, "m", [figures()], [])
    assert "records" not in json.loads(path.read_text("utf-8"))["runs"][0]
