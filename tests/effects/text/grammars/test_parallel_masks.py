"""Masks of many rows at once are those that each matcher would make for itself."""

import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minfer.effects.text.grammars import parallel_masks as module
from minfer.effects.text.grammars.grammar_library import (
    MASK_WAIT_SECONDS,
    GrammarError,
    Matcher,
    MatcherUpdate,
)
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.effects.text.grammars.parallel_masks import ParallelMasks
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.bundled import (
    ENDS,
    allowed,
    compiler,
    ids,
    matcher,
    tokenizer,
    vocab,
)
from tests.effects.text.grammars.one_by_one import OneByOne

EACH: list[dict[str, Any]] = [
    {"regex": "(a|b)*c{2,5}(xy)+"},
    {"choice": ["yes", "no", "never"]},
    {"json_object": True},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
    {"grammar": 'start: "(" start ")" | /[0-9]{2,4}/ | start "+" start'},
]


@pytest.fixture(params=[0, module.MAX_SERIAL_ROWS], ids=["many", "few"])
def parallel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ParallelMasks:
    monkeypatch.setattr(module, "MAX_SERIAL_ROWS", request.param)
    return ParallelMasks(vocab())


def move(walk: Matcher, *tokens: int, back: int = 0) -> MatcherUpdate:
    return MatcherUpdate(walk, back, tokens)


def masks(
    parallel_masks: Any, updates: list[MatcherUpdate]
) -> list[bytes | GrammarError]:
    """Of each in order, its mask or why there is none; in lines the other way round."""
    lines = np.full((len(updates) + 1, parallel_masks.words), 7, np.int32)
    for line, update in enumerate(reversed(updates)):
        update.line = line
    errors = parallel_masks.masks(updates, lines)
    assert (lines[len(updates)] == 7).all()
    assert errors.keys() <= set(range(len(updates)))
    return [errors.get(update.line) or lines[update.line].tobytes() for update in updates]


def bits(mask: bytes | GrammarError) -> set[int]:
    assert isinstance(mask, bytes)
    return allowed(mask)


def test_no_updates_have_no_masks(parallel: ParallelMasks) -> None:
    assert masks(parallel, []) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_they_are_as_one_by_one_on_random_walks(
    parallel: ParallelMasks, seed: int
) -> None:
    rng = random.Random(seed)
    two = [[matcher(**requested) for requested in EACH] for _ in range(2)]
    outputs: list[list[int]] = [[] for _ in EACH]
    updates: list[tuple[int, tuple[int, ...]]] = [(0, ())] * len(EACH)
    for _ in range(25):
        parallel_masks, single_masks = (
            masks(
                maker,
                [
                    MatcherUpdate(w, back, new)
                    for w, (back, new) in zip(walks, updates, strict=True)
                ],
            )
            for maker, walks in zip(
                (parallel, OneByOne(words=parallel.words)), two, strict=True
            )
        )
        assert list(map(bits, parallel_masks)) == list(map(bits, single_masks))
        updates = [
            step(rng, *walk_and_mask)
            for walk_and_mask in zip(outputs, parallel_masks, strict=True)
        ]
    assert max(map(len, outputs)) > 5


def step(
    rng: random.Random, output: list[int], mask: bytes | GrammarError
) -> tuple[int, tuple[int, ...]]:
    """A sample goes on, or some tokens back, or back and on by another way."""
    back = rng.randint(0, len(output)) if rng.random() < 0.3 else 0
    taken_back = output[len(output) - back :]
    del output[len(output) - back :]
    if back:
        new = taken_back[: rng.randint(0, back)]
    else:
        new = rng.sample(sorted(bits(mask) - ENDS), 1) if bits(mask) - ENDS else []
    output += new
    return back, tuple(new)


def test_one_that_may_not_go_there_is_an_error_among_the_others(
    parallel: ParallelMasks,
) -> None:
    walks = [matcher(regex="a+") for _ in range(3)]
    token = {name: ids(name)[0] for name in "ab"}
    good, bad, third = masks(
        parallel, [move(walks[0], token["a"]), move(walks[1], token["b"]), move(walks[2])]
    )
    assert isinstance(bad, GrammarError)
    assert "doesn't satisfy" in str(bad)
    assert bits(good) == bits(third) | ENDS
    retried = masks(parallel, [move(walk_or_error) for walk_or_error in walks])
    assert [isinstance(walk_or_error, GrammarError) for walk_or_error in retried] == [
        False,
        True,
        False,
    ]


def test_several_may_be_stuck_and_each_has_its_error(parallel: ParallelMasks) -> None:
    walks = [matcher(regex="a+"), matcher(regex="[0-9]+"), matcher(choice=["#"])]
    updates = [move(walk, *ids("b")) for walk in walks]
    assert all(isinstance(answer, GrammarError) for answer in masks(parallel, updates))


def test_one_of_several_goes_back(parallel: ParallelMasks) -> None:
    walks = [matcher(regex="ab?c?") for _ in range(3)]
    first = bits(masks(parallel, [move(walk) for walk in walks])[0])
    a, b = ids("a")[0], ids("b")[0]
    masks(parallel, [move(walks[0], a), move(walks[1], a, b), move(walks[2], a)])
    back, second, on = masks(
        parallel, [move(walks[0], back=1), move(walks[1], a, back=2), move(walks[2], b)]
    )
    assert bits(back) == first
    assert b in bits(second)
    assert b not in bits(on)


def test_a_rollback_too_far_is_an_error_among_the_others(parallel: ParallelMasks) -> None:
    first, second = matcher(regex="a+"), matcher(regex="a+")
    bad, good = masks(parallel, [move(first, back=3), move(second)])
    assert isinstance(bad, GrammarError)
    assert isinstance(good, bytes)


@pytest.mark.long
def test_a_mask_that_takes_longer_than_the_bound_is_late(parallel: ParallelMasks) -> None:
    executor: Any = parallel._executor

    class Slow:
        """Writes a line later than all others."""

        consume_token_par = executor.consume_token_par

        def unsafe_compute_mask_ptr(self, going: list[Any], *pointers: int) -> None:
            executor.unsafe_compute_mask_ptr([p for p in going if p[1] != 1], *pointers)
            time.sleep(20 * MASK_WAIT_SECONDS)
            executor.unsafe_compute_mask_ptr([p for p in going if p[1] == 1], *pointers)

    parallel._executor = Slow()  # type: ignore[assignment]  # stands in
    updates = [MatcherUpdate(matcher(regex="a+"), 0, (), line) for line in range(3)]
    for _ in range(2):
        assert not parallel.masks(updates, np.zeros((3, parallel.words), np.int32))
        assert [update.slow for update in updates] == [False, True, False]


def test_a_token_that_takes_longer_than_the_bound_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = ParallelMasks(vocab())
    seconds = iter([0.0, MASK_WAIT_SECONDS, 1.0, 1.001 + MASK_WAIT_SECONDS])
    clock = SimpleNamespace(thread_time=lambda: next(seconds))
    monkeypatch.setattr(module, "time", clock)
    updates = [
        MatcherUpdate(matcher(regex="a+"), 0, (*ids("a"),), line) for line in range(2)
    ]
    assert not parallel.masks(updates, np.zeros((2, parallel.words), np.int32))
    assert [update.slow for update in updates] == [False, True]


def test_masks_are_of_the_whole_vocabulary_and_allow_nothing_behind_it() -> None:
    padded = LlguidanceCompiler(tokenizer().as_json(), vocab() + 5, ENDS)
    walk = padded.compile(StructuredOutputs(regex="(.|\n)*")).matcher()
    (mask,) = masks(padded, [move(walk)])
    assert isinstance(mask, bytes)
    assert len(mask) >= (vocab() + 5) / 8
    assert max(allowed(mask)) < vocab()
    assert allowed(mask) == allowed(walk.mask())


@pytest.mark.long
def test_what_stands_for_an_end_of_sequence_is_reported_never_to_come() -> None:
    endless = LlguidanceCompiler(tokenizer().as_json(), vocab(), [])
    walk = endless.compile(StructuredOutputs(choice=["#"])).matcher()
    (mask,) = masks(endless, [move(walk, *ids("#"))])
    assert bits(mask) == endless.forbidden_tokens != set()
    assert allowed(walk.mask()) == endless.forbidden_tokens  # whatever makes it
    assert compiler().forbidden_tokens == set()


def test_matchers_of_another_library_are_refused(parallel: ParallelMasks) -> None:
    class Other:
        pass

    with pytest.raises(TypeError, match="not made by this library"):
        masks(parallel, [MatcherUpdate(Other(), 0, ())])  # type: ignore[arg-type]  # what it is about


def test_a_compiler_makes_them_for_its_own() -> None:
    walks = [matcher(**requested) for requested in EACH]
    made_masks = masks(compiler(), [move(walk) for walk in walks])
    assert list(map(bits, made_masks)) == [allowed(walk.mask()) for walk in walks]
