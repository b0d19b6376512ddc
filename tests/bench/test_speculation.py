"""What drafts are worth is counted right: on a few tokens of held-out files."""

import argparse
from statistics import mean

import pytest

from bench.held_out import held_out_texts
from bench.speculation import PROMPT, Pair, config_of, distances, ran, windows
from bench.speculation_rules import by_rejection
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.speculation_settings import STANDARD, WITHOUT_HEADS
from minfer.effects.text.tokenizer import Tokenizer

TOKENS = 16


@pytest.mark.long
def test_prompts_are_of_files_that_were_held_out() -> None:
    tokenizer = Tokenizer(bundled_folder())
    texts = held_out_texts()
    prompts = windows(7)
    assert len(prompts) == 7
    for prompt in prompts:
        assert len(prompt) == PROMPT
        # A window may begin or end within a character's bytes, not in its middle.
        assert any(tokenizer.decode(prompt[2:-2]) in text for text in texts)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_is_what_distributions_allow(temperature: float) -> None:
    prompts = windows(3)
    plain = ran(prompts, temperature, TOKENS, None)
    drafted = ran(prompts, temperature, TOKENS, config_of("draft_model", 4))
    assert drafted.texts == plain.texts
    assert plain.seen.figures()["tokens per target step"] == 1
    figures = drafted.seen.figures()
    assert figures["accepted"] == round(figures["acceptance"] * figures["proposed"])
    steps, per_step = figures["decode steps of a row"], figures["tokens per target step"]
    # The first token of each comes with its prompt.
    assert steps * per_step == pytest.approx(len(prompts) * (TOKENS - 1), abs=0.5)
    beside = distances(Pair(), drafted, temperature)
    low, high = beside["(1 - TV) / (1 + TV)"], beside["1 - TV"]
    if temperature:
        assert 0 < low < high < 1
    else:  # drafts are right exactly where the likeliest tokens are the same
        assert beside["accepted"] == low == high


@pytest.mark.long
def test_coins_accept_what_distributions_allow() -> None:
    config = config_of("draft_model", 4, STANDARD)
    drafted = ran(windows(6), 1.0, 2 * TOKENS, config)
    beside = distances(Pair(), drafted, 1.0)
    assert beside["judged"] > 90
    assert beside["accepted"] == pytest.approx(beside["1 - TV"], abs=0.15)


@pytest.mark.long
def test_both_rules_are_counted_alike() -> None:
    args = argparse.Namespace(tokens=10, drafts=3)
    figures = by_rejection(Pair().models, windows(1), args)
    assert [*figures] == [*WITHOUT_HEADS]
    for method_figures in figures.values():
        assert method_figures["tokens per target step"] >= 1
        # Their shares may rise: near a row's end fewer are proposed at later places.
        assert method_figures["accepted by place"] == sorted(
            method_figures["accepted by place"], reverse=True
        )
    assert mean(figures["draft_model"]["by place"]) > 0.2
