"""`minfer replay` in a test: a run to replay, and what is printed of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import write_journal
from tests.core.simulation.test_fork import recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    journal, _ = recorded(1)
    path = tmp_path_factory.mktemp("runs") / "run.journal"
    write_journal(
        path, journal.config, journal.turns(), {"model": "none", "device": "paper"}
    )
    return path


def reported(capsys: pytest.CaptureFixture[str], *options: object, code: int = 0) -> Any:
    assert main(["replay", *map(str, options), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *options: object, code: int = 0) -> str:
    assert main(["replay", *map(str, options)]) == code
    out = capsys.readouterr()
    return out.err if code == 2 else out.out
