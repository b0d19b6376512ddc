"""A long run opens and moves smoothly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from minfer.effects.runs.page.make import write_page
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Event,
)
from minfer.records.state import Turn
from minfer.values.record import evolve
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import requested, seen, turns_of


def long_run() -> Iterator[Turn]:
    """100,000 turns and 10,000 samples: one real run of a fiftieth of that, fifty times
    over.
    """
    config = EngineConfig(num_blocks=600, max_num_seqs=64, max_model_len=2048, depth=1)
    inbox: dict[int, list[Event]] = {}
    for n in range(200):
        prompt, max_tokens = 10 + n * 37 % 900, 20 + n * 91 % 300
        inbox.setdefault(n * 8, []).append(requested(f"r{n}", prompt, max_tokens, n % 7))
    turns = turns_of(config, inbox, 2000)
    assert not turns[-1].transition.state.requests
    turns += [turns[-1]] * (2000 - len(turns))
    for round_ in range(50):
        for n, turn in enumerate(turns):
            number = round_ * 2000 + n
            state = evolve(turn.transition.state, time=number * 0.01)
            yield Turn(
                number, turn.before, turn.events, evolve(turn.transition, state=state)
            )


@pytest.mark.long
@seen
def test_a_hundred_thousand_turns_open_and_move_smoothly(
    chromium: Browser, tmp_path: Path
) -> None:
    config = EngineConfig(num_blocks=600)
    size = write_page(tmp_path / "page.html", "long", config, long_run())
    chromium.open(tmp_path / "page.html")
    assert chromium.value(
        "[turns, samples, lives.every((life) => life.died < turns)]"
    ) == [100_000, 10_000, True]
    assert size < 4e6
    # Limits for a busy machine; alone these are about 0.3 s, 40 ms and 2 ms, the loop 25
    # ms.
    assert chromium.value("+document.documentElement.dataset.drawn") < 5000
    timed = """(times, act) => [...Array(times).keys()].map((i) => {
        const begin = performance.now();
        act(i);
        return performance.now() - begin; }).sort((a, b) => a - b)[times >> 2]"""
    loop, redraw, move = (
        chromium.value(f"({timed})({act})")
        for act in (
            "12, () => { for (let i = 0; i < 2e7; i++) window.sum = i % 7; }",
            "12, () => { overviewOf = ''; draw(); }",
            "100, (i) => go(50000 + i * 7)",
        )
    )
    assert redraw < 10 * loop
    assert move < 0.8 * loop
    assert chromium.value("document.querySelectorAll('*').length") < 500
