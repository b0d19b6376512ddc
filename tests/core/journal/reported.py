"""Facts of turns, as journals have them, and what is said of those that differ."""

import json
from typing import Any

from minfer.engine import step
from minfer.journal.decisions import Facts, facts
from minfer.journal.divergence import find_divergence
from minfer.journal.replay import Journal, open_segments
from minfer.journal.writing import encode_journal
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Executed, Submit, Tick
from minfer.records.request import Request
from minfer.records.state import EngineState, Turn, initial


def opened(config: EngineConfig, turns: list[Turn]) -> Journal:
    return Journal(open_segments({"run": encode_journal(config, turns)}))


def reported(turn: Turn) -> Any:
    """A turn's facts as a journal has them."""
    return json.loads(json.dumps(facts(turn.before, turn.transition)))


def words(then: Facts, now: Facts, before: EngineState | None = None) -> list[str]:
    where = find_divergence(
        7, before or initial(EngineConfig(num_blocks=9)), 1.5, then, now
    )
    assert (where.turn, where.time) == (7, 1.5)
    return [one.words for one in where.differences]


def admitted(name: str, *, hit: int = 0) -> list[Any]:
    return ["Admitted", name, 0, 0.5, hit, 8, 0, hit, 8]


def a_run() -> tuple[EngineState, Facts]:
    """A state in which `a` runs and `b` comes, and what is decided."""
    config = EngineConfig(num_blocks=9, block_size=4, depth=1)
    first = (Tick(0.0), Submit(Request(id="a", prompt=(1, 2, 3), max_tokens=9)))
    state = step(config, initial(config), first).state
    done = Tick(1.0), *_result(state)
    coming = Submit(Request(id="b", prompt=(4, 5), max_tokens=9, n=2))
    transition = step(config, state, (*done, coming))
    return state, reported(Turn(1, state, (), transition))


def _result(state: EngineState) -> tuple[Event, ...]:
    return (Executed(state.inflight[0].step, ((7,),)),)
