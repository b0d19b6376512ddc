"""`minfer replay --at`: a state as it is shown."""

from pathlib import Path

import pytest

from tests.core.runs.test_fork import recorded
from tests.effects.runs.replays import found, said
from tests.effects.runs.replays import run as run


def test_a_state_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, turns = recorded(1)
    state = turns[40].before
    text = said(capsys, run, "--at", 40)
    assert f"{len(state.running)} sequences, in rank order" in text
    assert f"before turn 40, at {state.time:.6f} s" in text
    whole = found(capsys, run, "--at", 40)
    assert whole["is"] == "EngineState"
    assert whole["next_step"] == state.next_step
    assert "there is no turn 9999" in said(capsys, run, "--at", 9999, code=2)
    assert journal.config
