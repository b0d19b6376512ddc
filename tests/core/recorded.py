"""Runs of hostile worlds as turns."""

from typing import Any

import pytest

from minfer.config import EngineConfig
from minfer.engine import step
from minfer.state import EngineState, Turn
from tests.core import world as worlds
from tests.core.world import run_swarm


def recorded(seed: int, turns: int = 60) -> tuple[EngineConfig, list[Turn]]:
    """A swarm world's configuration, and its turns."""
    log: list[Turn] = []

    def spy(config: EngineConfig, state: Any, events: Any) -> Any:
        transition = step(config, state, events)
        log.append(Turn(len(log), state, events, transition))
        return transition

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "step", spy)
        world = run_swarm(seed, turns)
    return world.config, log


class Seen(list[Turn]):
    """Turns as a driver records them."""

    def __call__(self, turn: Turn) -> None:
        self.append(turn)

    def close(self, state: EngineState) -> None:
        pass
