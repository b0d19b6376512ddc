"""What is drawn, pixel by pixel."""

from pathlib import Path

from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import PIXEL, scene, seen, shown
from tests.effects.runs.page.test_lives import AGAIN, DECODE, FILL, WAIT


@seen
def test_what_is_drawn_is_what_is_known(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns), "axis=turn")
    colors = chromium.value("color")
    drawn = chromium.value(f"""lives.map((life, s) => Array.from({{length: turns}},
        (_, t) => ({PIXEL})('timeline', (px(t) + px(t + 1)) / 2 + 3,
            view.row * (life.lane + 0.2))))""")
    all_states = chromium.value(
        "lives.map((_, s) => Array.from({length: turns}, (_, t) => stateAt(s, t)))"
    )
    look = {
        0: ["panel"],
        WAIT: ["waiting"],
        DECODE: ["decode"],
        FILL: ["fill", "panel"],
        AGAIN: ["again", "waiting"],
    }
    for s, states in enumerate(all_states):
        for t, state in enumerate(states):
            right = [colors[name] for name in look[state]] + ["#000000"] * (state == 0)
            assert drawn[s][t] in right, (s, t, state)
    assert {state for states in all_states for state in states} == {
        0,
        WAIT,
        DECODE,
        FILL,
        AGAIN,
    }
    # Of the 35 tokens of `first` 12 were cached as it came back, in turn 11.
    low = f"({PIXEL})('timeline', (px(11) + px(12)) / 2, view.row * 0.75)"
    assert chromium.value(low) == colors["hit"]
    # Blocks of the pool, from the bottom of its panel.
    high = chromium.value("$('pool').clientHeight")
    for t, turn in enumerate(turns):
        blocks = turn.transition.state.blocks
        idle = blocks.idle
        private = config.num_blocks - blocks.free - blocks.idle - blocks.live
        edge = 0.0
        for name, size in (
            ("private", private),
            ("shareable", blocks.live),
            ("cached", idle),
        ):
            y = high - (edge + size / 2) / config.num_blocks * high
            if size:
                color = chromium.value(
                    f"({PIXEL})('pool', (px({t}) + px({t + 1})) / 2, {y})"
                )
                assert color == colors[name], (t, name)
            edge += size
