"""The first minute is measured at a toy size on the CPU, and a stopped run goes on."""

import json
import logging
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from triton import knobs

from bench import first_minute


@pytest.mark.long
def test_all_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TOKENS_OUT", 3), ("REQUESTS_PER_CLIENT", 2), ("TOKENS_IN", 9)):
        monkeypatch.setattr(first_minute, name, value)
    monkeypatch.setattr(first_minute, "REST_SECONDS", 0.0)
    monkeypatch.setattr(knobs.compilation, "listener", None)
    log = logging.getLogger("minfer.executor")
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(log, "level", log.level)
    jobs = list[dict[str, Any]]()

    def child(job: dict[str, Any], _: Path) -> dict[str, Any]:
        """A part, in this process."""
        jobs.append(job)
        if len(jobs) == 2:
            raise RuntimeError("the machine is gone")
        return first_minute.part({**job, "began": time.time()})

    monkeypatch.setattr(first_minute, "child", child)
    options: dict[str, Any] = {"shapes": ["tiny"], "clients": [2], "rows": 2}
    args = Namespace(**options, device="cpu", again=False, folder=tmp_path, name="found")
    with pytest.raises(SystemExit, match="broken: tiny 2 full"):
        first_minute.measure(args)
    parts = json.loads((tmp_path / "found.json").read_text("utf-8"))["results"]["parts"]
    assert [*parts] == ["tiny 2 empty", "tiny 0 empty", "tiny 0 full"]
    assert [*parts["tiny 2 empty"]["loads"]] == ["first", "second", "rested"]
    served = parts["tiny 2 empty"]["verdict"]
    assert served["first tok/s"] > 0
    assert served["first of second"] > 0
    rows = parts["tiny 0 full"]["verdict"]
    assert rows["least first of second"] == min(rows["1 rows"], rows["2 rows"]) > 0
    first_minute.measure(args)
    assert [job["clients"] for job in jobs] == [2, 2, 0, 0, 2, 2]
