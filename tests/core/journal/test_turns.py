"""An engine that raises is told from one that decides otherwise."""

import pytest

from minfer.engine import step
from minfer.journal import replay as replays
from minfer.journal.turns import EngineRaisedError
from minfer.records.config import EngineConfig
from minfer.records.messages import Event
from minfer.records.state import EngineState, Transition
from tests.core.journal.reported import opened
from tests.core.recorded import recorded


def test_a_replay_names_the_turn_in_which_the_engine_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, turns = recorded(3)
    journal = opened(config, turns)

    def other(
        config: EngineConfig, state: EngineState, events: tuple[Event, ...]
    ) -> Transition:
        if state is turns[20].before or state == turns[20].before:
            raise KeyError("r7")
        return step(config, state, events)

    monkeypatch.setattr(replays, "step", other)
    at = next(turn.number for turn in turns if turn.before == turns[20].before)
    with pytest.raises(EngineRaisedError) as caught:
        list(journal.turns())
    error = caught.value
    assert (error.turn, error.time) == (at, turns[at].before.time)
    assert error.error == "KeyError: 'r7'"
    assert error.where.startswith("test_turns.py:")
    assert str(error).startswith(
        f"run: turn {at}: the engine raised KeyError: 'r7' (test_turns.py"
    )
    assert journal.count == at


def test_a_transition_that_is_none_is_the_engines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, turns = recorded(3)
    monkeypatch.setattr(replays, "step", lambda *_: None)
    with pytest.raises(
        EngineRaisedError, match="turn 0: the engine raised AttributeError"
    ):
        list(opened(config, turns).turns())
