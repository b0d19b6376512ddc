"""What a grammar forces is drafted, and else what it allows of a guess."""

from typing import Any

import pytest
from attrs import evolve

from minfer.effects.live import foreseen as module
from minfer.effects.live.foreseen import foreseen
from minfer.effects.live.masks import Guess
from minfer.effects.live.walks import Walk
from minfer.effects.text.grammars.protocol import GrammarError
from minfer.request import Request, SamplingParams
from minfer.sequence import Running, Sequence
from tests.effects.live.walkers import EOS, Walker, ask

WALK = ask("a")
PROMPT = len(WALK.prompt)


class Forcing(Walker):
    """Forces two tokens behind each 9, and allows no token above 20."""

    def forced(self) -> tuple[int, ...]:
        self.clock.now += self.cost
        if self.broken:
            raise GrammarError("too much work")
        return (7, 8) if self.taken[-1:] == [9] else ()

    def allowed(self, tokens: Any) -> int:
        return next((i for i, one in enumerate(tokens) if one > 20), len(tokens))


@pytest.fixture
def walk() -> Walk:
    """Of a sample that has one output token."""
    return Walk(("a", 0), WALK, given=1, matcher=Forcing(taken=[5]))  # type: ignore[arg-type]  # all that is asked here


def running(*requests: Request) -> Running:
    """Samples that have a token each."""
    seqs = tuple(Sequence(one, 0, ((), 0, 0), 0.0, one.prompt) for one in requests)
    known = tuple(len(one.prompt) + 1 for one in requests)
    return Running(seqs=seqs, ids=tuple(seq.id for seq in seqs), known=known)


def found(
    walk: Walk, *tokens: int, new: tuple[int, ...] = (9,), most: int = 4
) -> list[Guess]:
    guess = Guess(("a", 0), PROMPT + 1 + len(new), new, tokens)
    return [*foreseen([guess], {walk.name: walk}, (), running(WALK), most)]


def drafted(walk: Walk, *tokens: int, **more: Any) -> tuple[int, ...]:
    [guess] = found(walk, *tokens, **more)
    return guess.tokens


def test_what_is_forced_comes_before_what_is_guessed(walk: Walk) -> None:
    assert drafted(walk, 3, 4, 5) == (7, 8)
    assert walk.given == 2
    assert walk.matcher is not None
    assert walk.matcher.taken == [5, 9]  # type: ignore[attr-defined]  # which it has


def test_no_more_is_forced_than_may_be_drafted(walk: Walk) -> None:
    assert drafted(walk, most=1) == (7,)


def test_a_guess_goes_as_far_as_it_is_allowed(walk: Walk) -> None:
    assert drafted(walk, 3, 4, 30, 5, new=(6,)) == (3, 4)


@pytest.mark.parametrize("never", [frozenset({4}), frozenset[int]()])
def test_nothing_is_drafted_behind_an_end_nor_an_end(
    walk: Walk, never: frozenset[int]
) -> None:
    walk.never = never
    assert drafted(walk, 3, 4, EOS, 5, new=(6,)) == ((3,) if never else (3, 4))


def test_what_came_and_is_not_allowed_leaves_the_matcher_where_it_is(walk: Walk) -> None:
    assert drafted(walk, 3, new=(9, 30)) == ()
    assert walk.given == 1
    assert walk.matcher is not None
    assert walk.matcher.taken == [5]  # type: ignore[attr-defined]  # which it has


@pytest.mark.parametrize(
    "changes", [{"given": 0}, {"given": 2}, {"matcher": None}], ids=str
)
def test_who_is_elsewhere_is_left_alone(walk: Walk, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(walk, name, value)
    given = walk.given
    assert drafted(walk, 3) == ()
    assert walk.given == given


def test_of_whom_a_thread_makes_the_masks_nothing_is_asked(walk: Walk) -> None:
    guess = Guess(walk.name, PROMPT + 2, (9,), (3,))
    walks, run = {walk.name: walk}, running(WALK)
    assert not [*foreseen([guess], walks, {walk.name}, run, 4)]
    assert not [*foreseen([guess], {}, (), run, 4)]
    assert not [*foreseen([guess], walks, (), running(evolve(WALK)), 4)], "another one"
    assert walk.given == 1


def test_who_has_no_grammar_is_drafted_as_it_was_guessed(walk: Walk) -> None:
    plain = evolve(WALK, sampling=SamplingParams())
    guess = Guess(walk.name, PROMPT + 2, (30,), (31, EOS, 5))
    assert [*foreseen([guess], {}, (), running(plain), 4)] == [guess]


def test_a_matcher_that_cannot_go_on_begins_anew(walk: Walk) -> None:
    walk.matcher.broken = True  # type: ignore[union-attr]  # it has that
    assert drafted(walk, 3) == ()
    assert (walk.matcher, walk.given, walk.is_new) == (None, 0, False)


def test_whose_answer_takes_long_is_not_asked_again(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher: Any = walk.matcher
    monkeypatch.setattr(module, "time", matcher.clock)
    matcher.cost = 2 * module.LONG
    assert drafted(walk) == (7, 8)
    walk.given, matcher.cost = 1, 0.0
    assert not found(walk)


def test_a_turn_has_little_time(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher: Any = walk.matcher
    monkeypatch.setattr(module, "time", matcher.clock)
    matcher.cost = module.LONG
    names = "abcd"
    walks = {
        (name, 0): Walk((name, 0), ask(name), given=1, matcher=matcher) for name in names
    }
    run = running(*(one.request for one in walks.values()))
    guesses = [Guess(name, PROMPT + 2, (9,), ()) for name in walks]
    served = [*foreseen(guesses, walks, (), run, 4)]
    assert 0 < len(served) < len(names)
