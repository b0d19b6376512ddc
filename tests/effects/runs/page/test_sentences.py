"""What the page says."""

from pathlib import Path
from typing import get_args

import pytest

from minfer.effects.runs.page.columns import KINDS
from minfer.effects.runs.page.scripts import SCRIPTS
from minfer.journal.wire_names import name_of
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Loading,
    Reason,
    Recomputing,
)
from minfer.records.tiers import LOAD, RECOMPUTE
from tests.effects.browser import Browser
from tests.effects.runs.page.scenes import requested, scene, seen, shown, turns_of, words
from tests.effects.runs.tiered import tiered


def test_every_reason_has_a_sentence() -> None:
    kinds = {name_of(kind) for kind in get_args(Reason)} - {
        "Ended"
    }  # of which `Finished` tells
    assert kinds <= set(KINDS)
    sentences = (SCRIPTS / "sentences.js").read_text("utf-8")
    assert {kind for kind in kinds if f'case "{kind}":' not in sentences} == set()


@seen
def test_it_says_why_in_plain_words(chromium: Browser, tmp_path: Path) -> None:
    config, turns = scene()
    shown(chromium, tmp_path, (config, turns))

    def at(turn: int) -> str:
        chromium.value(f"go({turn})")
        return words(chromium, "#turn")

    assert "request first arrives: 30 prompt tokens, at most 20 to write" in at(0)
    assert "none of its 30 tokens found in the prefix cache" in at(0)
    assert (
        "step 0, 16 of at most 16 tokens: 16 tokens of 1 sequence are read: request "
        "first (16)" in at(0)
    )
    assert "1 of at most 4 sequences run, 0 wait" in at(0)
    assert "8 private, 0 shareable, 0 cached, 8 free blocks" in at(0)
    assert "step 0 is done: 0 new tokens" in at(1)
    assert "nothing out of the ordinary: all go on" in at(4)
    assert "step 4, 1 of at most 16 tokens: 1 sequence writes a token" in at(4)
    assert "request first is preempted for request urgent, and keeps its 35 tokens" in at(
        6
    )
    assert "request first waits: the token budget of this step is spent" in at(6)
    assert "request huge is refused after 0 tokens: the prompt has 64 tokens" in at(8)
    assert "request first waits: it needs 9 blocks, 3 are available" in at(9)
    assert "head of the queue: request first waits: it needs 9 blocks" in at(10)
    assert "(logged in turn 9)" in at(10)
    assert "request gone is not wanted any more: cancel" in at(10)
    assert "request gone is cancelled after 0 tokens" in at(10)
    assert (
        "request first starts to run 110 ms after it came: 12 of its 35 tokens found"
        in at(11)
    )
    assert "step 11 failed: out of memory; 1 sequence starts again" in at(12)
    chromium.value("choose(0)")
    story = words(chromium, "#story")
    assert story.startswith("Request first Close 30 prompt tokens, at most 20 to write.")
    assert "it is preempted for request urgent" in story
    assert "it has reached its limit after 20 tokens" in story
    chromium.value("choose(1)")
    assert "; priority -1, client Ann." in words(chromium, "#story")
    chromium.value("choose(2)")
    assert "head of the queue: request first waits: the token budget" in words(
        chromium, "#story"
    )


@seen
@pytest.mark.parametrize(
    ("keyed", "tier"), [(False, "host memory"), (True, "disk or another engine")]
)
def test_it_says_which_tier_blocks_come_from(
    keyed: bool, tier: str, chromium: Browser, tmp_path: Path
) -> None:
    for choice, sentence in (
        (LOAD, f"request again waits for 4 blocks from {tier}: 0 are on the device"),
        (RECOMPUTE, f"computes 4 blocks again, which {tier} has, too"),
    ):
        config, turns = tiered(external=keyed, choice=choice)
        [turn] = [
            turn.number
            for turn in turns
            for reason in turn.transition.reasons
            if isinstance(reason, Loading | Recomputing)
        ]
        shown(chromium, tmp_path, (config, turns))
        chromium.value(f"go({turn})")
        assert sentence in words(chromium, "#turn")


@seen
def test_the_cached_share_is_of_the_prompts_of_all_samples(
    chromium: Browser, tmp_path: Path
) -> None:
    """Later samples find what the first one computed: the cache gave it, as
    to a reader.
    """
    config = EngineConfig(
        num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=16
    )
    turns = turns_of(
        config, {0: [requested("a", 16, 2, n=4)], 9: [requested("b", 16, 2, n=2)]}
    )
    lets = {
        (reason.id, reason.sample): (reason.cached, reason.prompt)
        for turn in turns
        for reason in turn.transition.reasons
        if isinstance(reason, Admitted)
    }
    assert lets["a", 3] == lets["b", 0] == (12, 16)
    assert lets["a", 0] == (0, 16)
    shown(chromium, tmp_path, (config, turns))
    assert "63% of prompts cached" in words(chromium, "header")
