"""`minfer replay --at`: a state as it is shown."""

from pathlib import Path

import pytest
from attrs import evolve

from minfer.effects.live.journal.journal_files import write_journal
from minfer.policies.fair_queue import FairQueue
from minfer.records.messages import Submit
from minfer.values.pmap import Map
from tests.core.simulation.clocked import Run, config, request
from tests.core.simulation.test_fork import recorded
from tests.effects.runs.replays import printed, reported
from tests.effects.runs.replays import run as run


def test_a_state_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, turns = recorded(1)
    state = turns[40].before
    text = printed(capsys, run, "--at", 40)
    assert f"{len(state.running)} sequences, in rank order" in text
    assert f"before turn 40, at {state.time:.6f} s" in text
    figures = reported(capsys, run, "--at", 40)
    assert figures["is"] == "EngineState"
    assert figures["next_step"] == state.next_step
    assert "there is no turn 9999" in printed(capsys, run, "--at", 9999, code=2)
    assert journal.config


def test_the_state_of_a_policy_is_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(policy=FairQueue(weights=Map({"b": 2.0}))))
    run.turn(Submit(evolve(request("r", 3, tokens=3), client="b")))
    run.drain()
    path = tmp_path / "a.journal"
    write_journal(path, run.config, run.turns)
    text = printed(capsys, path, "--at", 1)
    (policy,) = [line for line in text.splitlines() if line.startswith("policy")]
    assert "Map" not in policy
    assert "weights={'b': 2.0}" in policy
    assert "times={0: 0.0}, by_owner={(0, 'b'): Account(" in policy
