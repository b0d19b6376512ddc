"""A matcher of the library: it raises where the library falls silent."""

from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.text.grammars import llguidance_matcher as walking
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.llguidance_matcher import (
    MAX_ERROR_CHARS,
    Companions,
    LlguidanceMatcher,
    raise_if_failed,
    shorten_error,
)
from tests.effects.text.grammars.bundled import ENDS, allowed, ids, matcher


def test_it_goes_by_several_tokens_and_back_by_none() -> None:
    walk = matcher(regex="(ab|c)*d")
    by_one = matcher(regex="(ab|c)*d")
    tokens = ids("ab") + ids("c") + ids("c")
    walk.advance(tokens)
    for token in tokens:
        by_one.advance([token])
    assert walk.mask() == by_one.mask()
    walk.advance([])
    walk.rollback(0)
    assert walk.mask() == by_one.mask()
    walk.rollback(2)
    by_one.rollback(1)
    by_one.rollback(1)
    assert walk.mask() == by_one.mask()


def test_to_go_back_behind_the_beginning_is_an_error() -> None:
    walk = matcher(regex="a+")
    walk.advance(ids("a"))
    with pytest.raises(GrammarError):
        walk.rollback(2)


def test_a_slow_one_goes_on_with_a_companion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lets other threads run where two take a token, unnoticed."""
    pairs = list[int]()
    take = Companions.take

    def noted(self: Companions, inner: Any, companion: Any, token: int) -> None:
        pairs.append(token)
        take(self, inner, companion, token)

    monkeypatch.setattr(Companions, "take", noted)
    tokens = ids("ab") + ids("c") * 30
    quick = matcher(regex="(ab|c)*d")
    quick.advance(tokens)
    assert not pairs, "a few microseconds each"
    monkeypatch.setattr(walking, "MASK_WAIT_SECONDS", -1.0)
    slow = matcher(regex="(ab|c)*d")
    slow.advance(tokens)
    assert pairs == tokens[1:]
    assert slow.mask() == quick.mask()
    slow.rollback(3)
    slow.advance(ids("d"))
    assert (slow.may_end, slow.must_end) == (True, True)
    slow.advance([min(ENDS)])
    with pytest.raises(GrammarError):
        slow.advance(ids("a"))


def test_a_matcher_in_error_stays_there() -> None:
    walk = matcher(regex="a+")
    with pytest.raises(GrammarError):
        walk.advance(ids("b"))
    for call in (walk.mask, lambda: walk.advance(ids("a"))):
        with pytest.raises(GrammarError):
            call()
    assert not walk.must_end


def test_the_end_is_allowed_where_the_output_may_be_over() -> None:
    walk = matcher(regex="aa?")
    assert not allowed(walk.mask()) & ENDS
    walk.advance(ids("a")[:1])
    assert allowed(walk.mask()) > ENDS
    assert (walk.may_end, walk.must_end) == (True, False)


def test_the_time_of_other_threads_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk = matcher(regex="a+")
    clock = SimpleNamespace(thread_time=lambda: 1.0, monotonic=iter(range(9)).__next__)
    monkeypatch.setattr(walking, "time", clock)
    assert allowed(walk.mask())
    clock.thread_time = iter([1.0, 1.5]).__next__
    with pytest.raises(GrammarError, match=r"took 0.50 s .* at most 0.1"):
        walk.mask()


class Emitted:
    """A library's matcher in error, which says why."""

    def __init__(self, error_text: str) -> None:
        self.error_text = error_text

    def is_error(self) -> bool:
        return bool(self.error_text)

    def get_error(self) -> str:
        return self.error_text

    def is_stopped(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error_text", "reported"),
    [
        ("NoExtensionBias", "there is no text that it allows"),
        ("too many items <non-verbose/>", "too many items"),
        ("x" * 1000, "x" * (MAX_ERROR_CHARS - 3) + "..."),
    ],
)
def test_what_the_library_says_is_handed_on_in_short(
    error_text: str, reported: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        raise_if_failed(Emitted(error_text))  # type: ignore[arg-type]  # stands in for one
    assert str(caught.value) == reported
    assert len(shorten_error(error_text)) <= MAX_ERROR_CHARS


def test_who_is_stopped_by_an_error_need_not_end() -> None:
    raise_if_failed(Emitted(""))  # type: ignore[arg-type]  # stands in for one
    for error_text in ("", "broken"):
        companions = Companions(lambda: Emitted(""))  # type: ignore[arg-type, return-value]  # stands in
        walk = LlguidanceMatcher(Emitted(error_text), companions)  # type: ignore[arg-type]  # likewise
        assert walk.must_end == (not error_text)
