"""The keeper restarts engines of a cluster as a server restarts its own."""

import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest
from attrs import define, field

from minfer.effects.cluster.processes.process_ends import (
    MAX_FAILED_STARTS,
    Processes,
    Start,
)
from minfer.values.checks import ConfigError

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.long  # importing Ray takes a second

NAMES: Final = ("engine 0", "engine 1")
FAR: Final = 1e9  # s: more than any pause


@define(eq=False)
class ScriptedEngine:
    """An engine that becomes ready, and ends, as it is told."""

    starts: int = 0
    ready: bool = False
    state: Any = None
    ends: list[Any] = field(factory=list)

    def start(self) -> None:
        self.starts += 1

    def poll(self) -> Any:
        if not self.ends:
            return None
        self.ready = False
        return self.ends.pop(0)


@pytest.fixture
def engines() -> dict[str, ScriptedEngine]:
    return {name: ScriptedEngine() for name in NAMES}


@pytest.fixture
def keeper(engines: dict[str, ScriptedEngine]) -> Iterator[Any]:
    from minfer.effects.cluster.ray.engine_keeper import Keeper

    called: list[None] = []
    scripted: Any = engines
    instance = Keeper(scripted, lambda: called.append(None))
    over = threading.Event()
    over.set()
    instance.keep(over, lambda: None, is_resumed=False)
    instance.poll(FAR)
    yield instance
    assert len(called) <= 1


def end(code: int) -> Any:
    from minfer.effects.cluster.ray.ray_engine import ActorEngineEnd

    return ActorEngineEnd(node="a node", code=code, why="a reason")


def test_pauses_are_those_of_one_machine(
    keeper: Any, engines: dict[str, ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    local = Processes(0, 2)
    for name in NAMES:
        engines[name].ready = True
        local.note_started(name)
        local.note_ready(name)
    keeper.poll(0.0)
    for ready, code in ((True, 137), (False, 1), (False, 1), (False, 139), (True, 0)):
        engines[NAMES[0]].ready = ready
        keeper.poll(0.0)
        engines[NAMES[0]].ends.append(end(code))
        keeper.poll(0.0)
        if ready:
            local.note_ready(NAMES[0])
        (action,) = local.note_ended(NAMES[0], code)
        assert isinstance(action, Start)
        before = engines[NAMES[0]].starts
        keeper.poll(action.pause / 2)
        assert engines[NAMES[0]].starts == before
        keeper.poll(action.pause)
        assert engines[NAMES[0]].starts == before + 1
        local.note_started(NAMES[0])


def test_one_that_cannot_be_started_is_named(
    keeper: Any, engines: dict[str, ScriptedEngine]
) -> None:
    engines[NAMES[1]].ends.append(end(2))
    with pytest.raises(ConfigError, match="engine 1 cannot be started on a node: a rea"):
        keeper.poll(FAR)


def test_it_gives_up_if_no_other_is_ready(
    keeper: Any, engines: dict[str, ScriptedEngine]
) -> None:
    first, second = (engines[name] for name in NAMES)
    first.ready = True
    keeper.poll(FAR)
    for _ in range(2 * MAX_FAILED_STARTS):  # the first is ready
        second.ends.append(end(1))
        keeper.poll(FAR)
        keeper.poll(FAR)
    first.ends.append(end(137))
    second.ends.append(end(1))
    with pytest.raises(ConfigError, match="engine 1 cannot be started"):
        keeper.poll(FAR)
    assert second.starts == 2 * MAX_FAILED_STARTS + 1
