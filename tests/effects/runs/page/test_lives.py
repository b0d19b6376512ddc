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
    state, found = turn.transition.state, dict[tuple[str, int], set[int]]()
    run, plans = (
        state.running,
        [one.plan for one in turn.transition.commands if isinstance(one, Execute)],
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
        found[seq.id] = {FILL} if gen in filled or scheduled < base else {DECODE}
        if (
            start == scheduled < base
        ):  # again after a failed step, and without a plan: as it was
            found[seq.id] = {FILL, DECODE}
    return found | {seq.id: {AGAIN if seq.preempted else WAIT} for seq in state.waiting}


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
        here = [one for one in drawn if one["born"] <= t < one["died"]]
        right = truth(turn)
        assert {(one["id"], one["sample"]) for one in here} == set(right)
        for one in here:
            assert one["states"][t] in right[one["id"], one["sample"]], (t, one)
    wrote: dict[tuple[str, int], list[int]] = {}
    for t, turn in enumerate(turns):
        for emit in (one for one in turn.transition.commands if isinstance(one, Emit)):
            for name, tokens in zip(emit.ids, emit.tokens, strict=True):
                if tokens:
                    wrote.setdefault(name, []).append(t)
    present = set(turns[0].before.running.ids)
    for one in drawn:
        if one["first"] != -2:
            name = (
                one["id"],
                one["sample"],
            )  # an id may come again: none writes as it comes
            after = -1 if one["born"] == 0 and name in present else one["born"]
            mine = (t for t in wrote.get(name, ()) if after < t <= one["died"])
            assert one["first"] == next(mine, -1), one
