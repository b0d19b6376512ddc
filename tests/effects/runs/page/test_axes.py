"""Axes end a little above what was used; what is allowed is said in words."""

from pathlib import Path

from minfer.records.config import EngineConfig
from minfer.records.messages import Event
from minfer.records.state import Turn
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import (
    PIXEL,
    requested,
    scene,
    seen,
    shown,
    turns_of,
    words,
)


def roomy() -> tuple[EngineConfig, list[Turn]]:
    """Five requests in an engine made for hundreds."""
    config = EngineConfig(
        num_blocks=16_384,
        block_size=4,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        depth=1,
    )
    events: list[Event] = [requested(f"r{n}", 40, 30, 100 * n) for n in range(5)]
    return config, turns_of(config, {0: events})


@seen
def test_they_end_above_what_was_used(chromium: Browser, tmp_path: Path) -> None:
    config, turns = roomy()
    shown(chromium, tmp_path, (config, turns), "axis=turn")
    blocks = max(config.num_blocks - turn.transition.state.blocks.free for turn in turns)
    assert 50 < blocks < 200
    used = chromium.value("used")
    assert (used["blocks"], used["tokens"]) == (blocks, 200)
    assert (used["decode"], used["crowd"]) == (5, 5)
    assert blocks < used["blocksEnd"] <= 1.1 * blocks
    assert 200 < used["tokensEnd"] <= 220
    # The tallest column of the pool nearly fills its panel.
    top = chromium.value("turn.free.indexOf(Math.min(...turn.free))")
    high = chromium.value("$('pool').clientHeight")
    pixel = f"({PIXEL})('pool', (px({top}) + px({top + 1})) / 2, "
    color = chromium.value("color")
    assert chromium.value(f"{pixel}{0.15 * high})") != color["free"]
    assert chromium.value(f"{pixel}{0.03 * high})") == color["free"]
    # The tallest column of the batch nearly reaches its panel's top.
    assert chromium.value(f"({PIXEL})('batch', (px(0) + px(1)) / 2, 14)") == color["fill"]


@seen
def test_what_is_allowed_is_reported(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, roomy())
    used = chromium.value("used.blocks")
    assert f"At most {used} of 16,384 KV blocks (4 tokens each) were not free" in words(
        chromium, "#blocks"
    )
    assert words(chromium, "#budget") == "at most 200; 8,192 are allowed"
    assert words(chromium, "#most-rows") == "at most 256 at once"


@seen
def test_a_run_that_uses_all_has_axes_of_all(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns))
    used = chromium.value("used")
    assert used["blocksEnd"] == config.num_blocks
    assert used["tokensEnd"] == config.max_num_batched_tokens
    assert words(chromium, "#blocks") == "Where the 16 KV blocks of 4 tokens are."
    assert words(chromium, "#budget") == "at most 16 (dashed)"
