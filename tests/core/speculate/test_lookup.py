"""Drafts from what was written before: own, or others' within the scope; bounded."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.speculate.lookup import Library, Lookup, repeat_to
from minfer.speculate.proposer import Proposal, Proposer
from minfer.values.checks import ConfigError

A: Final = ("a", 0)
B: Final = ("b", 0)
RED: Final = b"red"
BLUE: Final = b"blue"
LOOKUP: Final = Lookup(batch=1, min_match=2, max_match=4, max_scope_tokens=100)


def reported(
    lookup: Lookup,
    state: Library,
    who: tuple[str, int],
    prompt: tuple[int, ...],
    *output: int,
    scope: bytes = RED,
) -> Library:
    state = lookup.began(state, who, scope, len(prompt))
    state = lookup.grew(state, who, prompt)
    for token in output:
        state = lookup.grew(state, who, (token,))
    return state


def test_what_followed_the_same_tokens_is_proposed() -> None:
    state = reported(LOOKUP, LOOKUP.start(), A, (1, 2, 3, 4, 5, 6, 9), 1, 2)
    assert LOOKUP.propose(state, A, 3) == Proposal((3, 4, 5), 2)
    state = LOOKUP.grew(state, A, (3,))
    assert LOOKUP.propose(state, A, 2) == Proposal((4, 5), 3)
    assert LOOKUP.propose(state, A, 0) == Proposal()


def test_what_repeats_goes_round() -> None:
    state = reported(LOOKUP, LOOKUP.start(), A, (7, 8, 9), 7, 8, 9, 7, 8)
    assert LOOKUP.propose(state, A, 7).tokens == (9, 7, 8, 9, 7, 8, 9)
    state = reported(LOOKUP, LOOKUP.start(), A, (5, 5, 5))
    assert LOOKUP.propose(state, A, 4) == Proposal((5, 5, 5, 5), 2)
    assert repeat_to((1, 2), 5) == (1, 2, 1, 2, 1)


def test_outputs_of_others_are_proposed_and_their_prompts_are_not() -> None:
    state = reported(LOOKUP, LOOKUP.start(), A, (1, 2, 3), 4, 5, 6)
    state = reported(LOOKUP, state, B, (9, 4, 5))
    assert LOOKUP.propose(state, B, 3) == Proposal((6,), 2)
    other = reported(LOOKUP, state, B, (9, 1, 2))
    assert LOOKUP.propose(other, B, 3) == Proposal()
    across = reported(LOOKUP, state, B, (9, 3, 4))
    assert LOOKUP.propose(across, B, 3) == Proposal(), "3 was of the prompt"


def test_a_chunk_may_hold_the_end_of_a_prompt_and_output() -> None:
    state = LOOKUP.began(LOOKUP.start(), A, RED, 2)
    state = LOOKUP.grew(state, A, (1, 2, 3, 4, 5))
    state = reported(LOOKUP, state, B, (3, 4))
    assert LOOKUP.propose(state, B, 3).tokens == (5,)
    state = reported(LOOKUP, state, B, (2, 3))
    assert LOOKUP.propose(state, B, 3) == Proposal()


def test_what_has_ended_still_serves_others() -> None:
    state = LOOKUP.ended(reported(LOOKUP, LOOKUP.start(), A, (1,), 4, 5, 6), A)
    assert A not in state.samples
    assert LOOKUP.propose(state, A, 3) == Proposal()
    assert LOOKUP.propose(reported(LOOKUP, state, B, (4, 5)), B, 3).tokens == (6,)
    assert LOOKUP.ended(state, A) is state
    assert LOOKUP.grew(state, A, (1,)) is state


def test_others_are_shown_a_batch_at_a_time_and_the_rest_at_the_end() -> None:
    lookup = Lookup(min_match=2, batch=3)
    state = reported(lookup, lookup.start(), A, (1,), 4, 5)
    assert lookup.propose(reported(lookup, state, B, (4, 5)), B, 9) == Proposal()
    state = lookup.grew(state, A, (6,))
    assert lookup.propose(reported(lookup, state, B, (4, 5)), B, 9).tokens == (6,)
    state = lookup.grew(state, A, (7,))
    assert lookup.propose(reported(lookup, state, B, (4, 5)), B, 9).tokens == (6,)
    state = lookup.ended(state, A)
    assert lookup.propose(reported(lookup, state, B, (4, 5)), B, 9).tokens == (6, 7)


def test_who_ends_having_written_nothing_takes_nobodys_room() -> None:
    lookup = Lookup(batch=1, min_match=2, max_scopes=1)
    state = reported(lookup, lookup.start(), A, (), 1, 2, 3)
    state = reported(lookup, state, B, (1, 2), scope=BLUE)
    assert set(lookup.ended(state, B).scopes) == {RED}


def test_the_end_of_a_sample_is_no_candidate() -> None:
    lookup = Lookup(min_match=2, candidates=1)
    state = reported(lookup, lookup.start(), A, (1, 2, 3, 1, 2))
    assert lookup.propose(state, A, 1) == Proposal((3,), 2)


def test_scopes_do_not_see_each_other() -> None:
    state = reported(LOOKUP, LOOKUP.start(), A, (1,), 4, 5, 6)
    state = reported(LOOKUP, state, B, (4, 5), scope=BLUE)
    assert LOOKUP.propose(state, B, 3) == Proposal()


SCOPE = st.sampled_from((RED, BLUE))
STORY = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=6)))


@pytest.mark.long
@given(STORY, STORY, st.lists(st.integers(0, 3), max_size=6))
def test_what_another_scope_writes_changes_nothing(
    mine: list[tuple[int, list[int]]],
    theirs: list[tuple[int, list[int]]],
    last: list[int],
) -> None:
    """Not even by pushing something out, while there is room for another scope."""
    lookup = Lookup(batch=1, min_match=2, max_scope_tokens=12, max_scopes=2)
    separate = mixed = lookup.start()
    for at in range(max(len(mine), len(theirs))):
        if at < len(mine):
            who, tokens = mine[at]
            separate = reported(lookup, separate, (f"m{who}", 0), (), *tokens)
            mixed = reported(lookup, mixed, (f"m{who}", 0), (), *tokens)
        if at < len(theirs):
            who, tokens = theirs[at]
            mixed = reported(lookup, mixed, (f"t{who}", 0), (), *tokens, scope=BLUE)
    separate = reported(lookup, separate, A, tuple(last))
    mixed = reported(lookup, mixed, A, tuple(last))
    assert lookup.propose(separate, A, 5) == lookup.propose(mixed, A, 5)


def test_the_longer_match_wins_and_the_own_of_equals() -> None:
    state = reported(LOOKUP, LOOKUP.start(), A, (), 1, 2, 3, 50)
    equal = reported(LOOKUP, state, B, (1, 2, 3, 60, 1, 2, 3))
    assert LOOKUP.propose(equal, B, 1) == Proposal((60,), 3)
    longer = reported(LOOKUP, state, B, (2, 3, 60, 1, 2, 3))
    assert LOOKUP.propose(longer, B, 1) == Proposal((50,), 3)


def test_no_more_is_compared_than_longest() -> None:
    state = reported(
        LOOKUP, LOOKUP.start(), A, (1, 2, 3, 4, 5, 9, 7, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5)
    )
    assert LOOKUP.propose(state, A, 1) == Proposal((8,), 4)


def test_a_sample_begins_anew_if_it_is_reset() -> None:
    state = reported(LOOKUP, LOOKUP.start(), A, (1, 2, 3, 1, 2))
    state = reported(LOOKUP, state, A, (1, 2))
    assert LOOKUP.propose(state, A, 3) == Proposal()


def test_of_a_sample_that_is_too_long_nothing_is_known() -> None:
    lookup = Lookup(batch=1, min_match=2, max_sample_tokens=5)
    state = reported(lookup, lookup.start(), A, (1, 1, 1, 1, 1))
    assert lookup.propose(state, A, 1).tokens == (1,)
    state = lookup.grew(state, A, (1,))
    assert lookup.propose(state, A, 1) == Proposal()
    assert A not in state.samples


def test_old_scopes_go_when_there_are_too_many() -> None:
    lookup = Lookup(batch=1, min_match=2, max_scope_tokens=10, max_scopes=2)
    state = lookup.start()
    for number in range(6):
        scope = bytes([number])
        state = reported(lookup, state, (str(number), 0), (), 1, 2, 3, scope=scope)
        state = lookup.grew(state, ("0", 0), (7,))  # a request writes into the first
        assert len(state.scopes) <= 2
    assert b"\x00" in state.scopes
    assert b"\x05" in state.scopes


def test_the_outputs_of_the_last_sixteen_scopes_are_kept_by_default() -> None:
    lookup = Lookup()
    state = lookup.start()
    for number in range(40):
        name, output = (str(number), 0), tuple(range(64))
        state = lookup.grew(lookup.began(state, name, bytes([number]), 0), name, output)
        last = range(max(0, number - 15), number + 1)
        assert {*state.scopes} == {bytes([scope]) for scope in last}


def test_who_wrote_into_a_scope_that_went_begins_a_text_of_its_own() -> None:
    lookup = Lookup(batch=1, min_match=2, max_scope_tokens=20, max_scopes=1)
    state = reported(lookup, lookup.start(), A, (), 1, 2)
    state = reported(lookup, state, B, (), 8, 8, 8, scope=BLUE)  # RED goes
    state = reported(lookup, state, ("c", 0), (), 1, 2)  # and is there again
    state = lookup.grew(state, A, (3,))
    (texts,) = [shelf.texts for shelf in state.scopes.values()]
    assert sorted(tuple(text.tokens) for text in texts.texts.values()) == [(1, 2), (3,)]


def test_more_at_once_than_a_scope_holds_leaves_its_end() -> None:
    lookup = Lookup(batch=1, min_match=2, max_scope_tokens=3, max_scopes=2)
    state = lookup.began(lookup.start(), A, RED, 0)
    state = lookup.grew(state, A, (1, 2, 3, 4, 5))
    texts = state.scopes[RED].texts
    assert [tuple(text.tokens) for text in texts.texts.values()] == [(3, 4, 5)]
    for _ in range(9):
        state = lookup.grew(state, A, (6, 7))
    assert state.scopes[RED].texts.size <= 3
    assert len(state.scopes[RED].texts.texts) <= 3


def test_without_others_nothing_is_kept_of_them() -> None:
    lookup = Lookup(batch=1, min_match=2, max_scope_tokens=0)
    state = reported(lookup, lookup.start(), A, (), 1, 2, 3)
    assert not state.scopes
    state = reported(lookup, state, B, (1, 2))
    assert lookup.propose(state, B, 1) == Proposal()


def test_who_never_proposes_is_a_proposer() -> None:
    class Silent(Proposer):
        pass

    silent = Silent()
    state = silent.grew(silent.began(silent.start(), A, RED, 1), A, (1,))
    assert silent.propose(silent.ended(state, A), A, 3) == Proposal()


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="lookup: min_match must be"):
        Lookup(min_match=0)
    with pytest.raises(ConfigError, match="lookup: candidates must be"):
        Lookup(candidates=0)


def test_tokens_behind_the_prompt_are_published_once_all_of_them() -> None:
    lookup, name = Lookup(batch=10), ("a", 0)
    library = lookup.began(lookup.start(), name, b"scope", 2)
    for tokens in ((1, 2, 3, 4), (5, 6, 7)):
        library = lookup.grew(library, name, tokens)
    assert library.samples[name].unpublished == (3, 4, 5, 6, 7)
