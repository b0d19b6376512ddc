"""States of recurrent layers that are kept, saved or copied wrongly are named."""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.prefix import node_of
from minfer.records.config import CacheGroup
from minfer.records.messages import Event, Preempted, SavesSkipped, Submit
from minfer.records.state import EngineState, Transition, Turn
from minfer.records.state_keeping import StateKeeping
from minfer.testing.kept_states import kept_states
from tests.core.test_engine import CONFIG, ask
from tests.core.testing.turns import (
    Bite,
    bitten,
    blocks_with,
    named,
    planned,
    plans,
    reasoned,
    run_with,
    sent,
)

STATES = evolve(
    CONFIG,
    num_blocks=64,
    groups=(CacheGroup(), CacheGroup(state=True, pages=2)),
    states=StateKeeping(max_share=1.0),
)
PROMPT = tuple(range(9))
AGAIN: tuple[tuple[Event | str, ...], ...] = (
    (Submit(ask("a", prompt=PROMPT, max_tokens=12)),),
    (),
    (Submit(ask("b", prompt=PROMPT, max_tokens=12)),),
    (),
    (),
    ("boom",),
)
FORKED: tuple[tuple[Event | str, ...], ...] = (
    (Submit(ask("a", prompt=PROMPT, max_tokens=12, n=2)),),
    (),
    (),
)


def saves(turn: Turn) -> bool:
    return any(plan.saves for plan in plans(turn)[-1:])


def copies(turn: Turn) -> bool:
    return any(plan.copies for plan in plans(turn)[-1:])


def fails(turn: Turn) -> bool:
    return any(isinstance(one, Preempted) for one in turn.transition.reasons)


def later(turn: Turn) -> bool:
    """A plan decodes, and has no saves; a state is kept."""
    kept = kept_states(STATES, turn.transition.state.blocks.prefix)
    return bool(kept) and turn.number == 4


def moved(turn: Turn, state: EngineState) -> Transition:
    return evolve(turn.transition, state=state)


def with_states(turn: Turn, **changes: Any) -> Transition:
    """The states of the first running sequence are others."""
    state = turn.transition.state
    first, *rest = state.running.chains
    chains = (evolve(first, states=evolve(first.states, **changes)), *rest)
    return moved(turn, run_with(state, chains=chains))


def behind_another_block(turn: Turn) -> Transition:
    """A kept state is the child of no block."""
    state = turn.transition.state
    prefix = state.blocks.prefix
    (key, node), *_ = kept_states(STATES, prefix).items()
    parent = node_of(prefix, node.parent)
    assert parent is not None
    nodes = prefix.nodes.set(key, (node.pages, b"", 0, 0, node.last_use)).set(
        node.parent,
        (parent.pages, parent.parent, parent.users, parent.children - 1, parent.last_use),
    )
    return moved(turn, blocks_with(state, nodes=nodes))


def from_another_page(turn: Turn) -> Transition:
    """A state is copied from the working state of another row."""
    plan = plans(turn)[-1]
    sources = [*turn.transition.state.running.tables[0][-1]]
    pairs = zip(plan.copies, sources, strict=True)
    return planned(turn, copies=tuple(evolve(copy, source=page) for copy, page in pairs))


def without_saves(turn: Turn) -> Transition:
    """The last plan saves nothing, and its pages are free."""
    (save,) = plans(turn)[-1].saves
    changed = planned(turn, saves=())
    pool = changed.state.blocks.pool
    state = blocks_with(
        changed.state, spare=save.pages + pool.spare, free=pool.free + len(save.pages)
    )
    return evolve(changed, state=state)


def saved_twice(turn: Turn) -> Transition:
    (save,) = plans(turn)[-1].saves
    return planned(turn, saves=(save, save))


def half_saved(turn: Turn) -> Transition:
    (save,) = plans(turn)[-1].saves
    return planned(turn, saves=(evolve(save, pages=save.pages[:1]),))


def half_copied(turn: Turn) -> Transition:
    return sent(turn, copies=plans(turn)[-1].copies[:1])


def not_counted(turn: Turn) -> Transition:
    return moved(turn, blocks_with(turn.transition.state, state_pages=0))


def held_again(turn: Turn) -> Transition:
    """A row that was opened long ago holds the state from which it started."""
    states = turn.transition.state.running.chains[0].states
    return with_states(turn, origin=states.kept[0])


def bite(law: str, when: Any, wrong: Any) -> Bite:
    return Bite(law, when, wrong, STATES, AGAIN)


def less_urgent(turn: Turn) -> Transition:
    """The last plan saves the state of the other row."""
    (save,) = plans(turn)[-1].saves
    return planned(turn, saves=(evolve(save, index=1 - save.index),))


def skips(turn: Turn) -> bool:
    return any(isinstance(one, SavesSkipped) for one in turn.transition.reasons)


FEW = evolve(STATES, states=StateKeeping(max_share=1.0, max_saved_pages=2))
TWO: tuple[tuple[Event | str, ...], ...] = (
    (
        Submit(ask("a", prompt=PROMPT, max_tokens=12)),
        Submit(ask("b", prompt=(7, *PROMPT[1:]), max_tokens=12)),
    ),
    *[()] * 5,
)


def both_saved(turn: Turn) -> Transition:
    """The last plan saves the states of both rows."""
    (save,) = plans(turn)[-1].saves
    return planned(turn, saves=(save, evolve(save, index=1 - save.index)))


def decoding(turn: Turn) -> bool:
    """A plan behind both prompts skips a save."""
    return skips(turn) and not plans(turn)[-1].fills


BITES = (
    bite("states: a state behind another", later, behind_another_block),
    bite("states: 0 pages of", later, not_counted),
    bite("states: to be saved at 8", later, lambda t: with_states(t, save_at=8)),
    bite("states: to be saved at 17", later, lambda t: with_states(t, save_at=17)),
    bite("states: a row that starts|refcount", later, held_again),
    bite("states: a state is saved twice|partition", saves, saved_twice),
    bite("states: SaveState|partition", saves, half_saved),
    Bite("states: .* does not save", saves, without_saves, STATES, FORKED),
    bite("states: .* starts at 8", copies, from_another_page),
    bite("states: .* starts at 8", copies, half_copied),
    bite("states: .* start again", fails, lambda t: reasoned(t, Preempted)),
    Bite("states: 2 are saved|partition", skips, both_saved, FEW, TWO),
    Bite("states: .* is skipped", decoding, less_urgent, FEW, TWO),
    Bite("reason: 0 of 1", decoding, lambda t: reasoned(t, SavesSkipped), FEW, TWO),
    Bite(
        "reason: SavesSkipped",
        skips,
        lambda t: reasoned(t, SavesSkipped, saved=2),
        FEW,
        TWO,
    ),
)


@pytest.mark.parametrize("wrong", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(wrong: Bite) -> None:
    bitten(wrong)
