"""What the page works out of a run, against the states of the engine."""

from pathlib import Path

import pytest

from minfer.records.messages import (
    Emit,
    Execute,
)
from minfer.records.state import Turn
from tests.core.recorded import recorded
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import seen, shown

# As lives.js has them.
WAIT = 1
DECODE = 2
FILL = 4
AGAIN = 5


def truth(turn: Turn) -> dict[tuple[str, int], set[int]]:
    """The states in which a page may show samples after a turn."""
    state, states = turn.transition.state, dict[tuple[str, int], set[int]]()
    run, plans = (
        state.running,
        [
            command.plan
            for command in turn.transition.commands
            if isinstance(command, Execute)
        ],
    )
    filled = {plan.run_ids[fill.index] for plan in plans for fill in plan.fills}
    columns = zip(
        run.seqs,
        run.run_ids,
        run.starts,
        run.scheduled,
        run.num_known_at_admission,
        strict=True,
    )
    for seq, gen, start, scheduled, base in columns:
        states[seq.id] = {FILL} if gen in filled or scheduled < base else {DECODE}
        if (
            start == scheduled < base
        ):  # again after a failed step, and without a plan: as it was
            states[seq.id] = {FILL, DECODE}
    return states | {seq.id: {AGAIN if seq.preempted else WAIT} for seq in state.waiting}


@pytest.mark.long
@seen
@pytest.mark.parametrize(
    "seed", [0, 1, 2, 33, 37]
)  # in 33 a planned sample is preempted in that turn
def test_the_page_shows_the_states_of_every_sequence(
    chromium: Browser, tmp_path: Path, seed: int
) -> None:
    config, turns = recorded(seed, 120)
    turns = turns[20 * (seed % 3) :]  # some begin in the middle
    shown(chromium, tmp_path, (config, turns))
    drawn = chromium.value("""
        lives.map((life, s) => ({
          id: text(sample.id[s]), sample: sample.sample[s],
          born: life.born, died: life.died,
          first: came(s) ? life.first : -2,
          states: Array.from({length: turns}, (_, t) => stateAt(s, t)),
        }))""")
    for t, turn in enumerate(turns):
        alive = [life for life in drawn if life["born"] <= t < life["died"]]
        right = truth(turn)
        assert {(life["id"], life["sample"]) for life in alive} == set(right)
        for life in alive:
            assert life["states"][t] in right[life["id"], life["sample"]], (t, life)
    wrote: dict[tuple[str, int], list[int]] = {}
    for t, turn in enumerate(turns):
        for emit in (
            command for command in turn.transition.commands if isinstance(command, Emit)
        ):
            for name, tokens in zip(emit.ids, emit.tokens, strict=True):
                if tokens:
                    wrote.setdefault(name, []).append(t)
    present = set(turns[0].before.running.ids)
    for life in drawn:
        if life["first"] != -2:
            name = (
                life["id"],
                life["sample"],
            )  # an id may come again: none writes as it comes
            after = -1 if life["born"] == 0 and name in present else life["born"]
            later_turns = (t for t in wrote.get(name, ()) if after < t <= life["died"])
            assert life["first"] == next(later_turns, -1), life
