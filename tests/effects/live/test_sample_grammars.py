"""Where a matcher is, where it is due, and what may not end an output yet."""

from concurrent.futures import Future
from typing import Any

import pytest

from minfer.effects.live.constraints.sample_grammars import (
    AllowedTokens,
    DueMask,
    SampleGrammar,
    barred_tokens,
    due_mask,
)
from minfer.effects.live.engine.driver import Driver
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.records.config import EngineConfig
from minfer.records.messages import Submit
from minfer.records.sequence import Running
from minfer.simulation.oracle import Oracle
from tests.effects.live.matchers import EOS, ask

BLOCK = 4
ALL = b"\xff\xff"


def grammar(consumed: int = 0, **settings: Any) -> SampleGrammar:
    request = ask("a", **settings)
    return SampleGrammar((request.id, 0), request, consumed)


@pytest.fixture(scope="module")
def running() -> Running:
    """One sample, of which 9 output tokens are known: in several blocks."""
    config = EngineConfig(num_blocks=20, block_size=BLOCK, vocab_size=32, depth=1)
    driver = Driver(config, Oracle(BLOCK, 32))
    driver.post(Submit(ask("a", stop_ids=frozenset())))
    while not len(driver.state.running) or driver.state.running.known[0] < 3 + 9:
        driver.turn()
    return driver.state.running


def output(running: Running) -> tuple[int, ...]:
    return running.inputs(0, 3, 3 + 9, BLOCK)


def test_a_matcher_is_due_behind_the_last_token_that_is_known(running: Running) -> None:
    assert len(output(running)) == 9
    for consumed in range(10):
        sample_grammar = grammar(consumed)
        mask = due_mask(sample_grammar, running, 0, BLOCK)
        assert (mask.back, mask.tokens) == (0, output(running)[consumed:])
        assert mask.length == 9
        assert sample_grammar.consumed == 9


def test_what_does_not_count_any_more_is_taken_back_first(running: Running) -> None:
    sample_grammar = grammar(consumed=11)
    mask = due_mask(sample_grammar, running, 0, BLOCK)
    assert (mask.back, mask.tokens, mask.length) == (2, (), 9)
    assert sample_grammar.consumed == 9


@pytest.mark.parametrize(
    ("length", "back", "is_made"), [(9, 0, True), (8, 0, False), (9, 1, False)]
)
def test_a_mask_is_made_once_for_so_many_tokens(
    length: int, back: int, is_made: bool
) -> None:
    sample_grammar = grammar()
    assert not DueMask(sample_grammar, back, (), 9).is_made
    sample_grammar.allowed = AllowedTokens(length, ALL)
    assert DueMask(sample_grammar, back, (), 9).is_made == is_made


def test_for_whom_there_can_be_no_matcher_no_mask_is_to_be_made() -> None:
    sample_grammar = grammar()
    sample_grammar.failed = GrammarError("no way")
    assert DueMask(sample_grammar, 0, (), 9).is_made


@pytest.mark.parametrize("is_done", [False, True])
def test_a_walk_is_busy_until_its_thread_is_done(is_done: bool) -> None:
    sample_grammar = grammar()
    sample_grammar.wait_for_job()  # which waits for nothing
    sample_grammar.job = Future()
    if is_done:
        sample_grammar.job.set_exception(ValueError())
    assert sample_grammar.busy == (not is_done)
    if is_done:
        sample_grammar.wait_for_job()
        assert sample_grammar.job is None


def test_what_may_not_end_an_output_yet_is_barred() -> None:
    sample_grammar = grammar(sampling={"min_tokens": 3}, stop_ids=frozenset({EOS, 9}))
    sample_grammar.forbidden_tokens = frozenset({12})
    assert sample_grammar.min_tokens == 3
    assert barred_tokens(sample_grammar) == {
        EOS,
        9,
        12,
    }  # all that may end it, and what never comes


def test_who_has_lost_a_matcher_begins_anew_and_is_not_new() -> None:
    sample_grammar: Any = grammar()
    assert sample_grammar.is_new
    sample_grammar.consumed, sample_grammar.allowed = 3, AllowedTokens(3, ALL)
    sample_grammar.discard_matcher()
    assert (sample_grammar.consumed, sample_grammar.allowed, sample_grammar.matcher) == (
        0,
        None,
        None,
    )
    assert not sample_grammar.is_new, "a thread was told of it before"
