"""What may follow in outputs under a grammar: what it forces, else what somebody guesses.

Theory. Where a grammar leaves one text only, as it does within the names of a schema's
properties, that text is drafted in the tokens that the tokenizer makes of it. The model
may still split it otherwise: these are drafts like any others, and it draws what it
draws. Where nothing is forced, a guess is drafted as far as the grammar allows it.

A matcher goes forward by the tokens that have just come, which its next mask has to do
anyway, and is asked there: that takes some ten microseconds. A turn has little time for
it, as no step is planned meanwhile; nobody asks those again whose answer took long, nor
those whose masks a thread makes. Time is the processor's, as others may be busy on it.
"""

import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

from attrs import evolve

from minfer.effects.live.masks import Guess
from minfer.effects.live.walks import Walk
from minfer.effects.text.grammars.protocol import GrammarError
from minfer.sequence import Running, SampleId

IN_A_TURN: Final = 1e-3  # seconds
LONG: Final = 1e-3  # for one sample


def foreseen(
    guesses: Iterable[Guess],
    walks: Mapping[SampleId, Walk],
    slow: Container[SampleId],
    running: Running,
    most: int,
) -> Iterator[Guess]:
    """The guesses that are worth drafting: those for samples that are bound by no
    grammar as they are, and of others what may follow; at most so many tokens of each.

    `running` does not know yet what has just come. `slow` are samples whose masks threads
    make.
    """
    until = time.thread_time() + IN_A_TURN
    places = {name: i for i, name in enumerate(running.ids)}
    for guess in guesses:
        i = places[guess.name]
        request = running.seqs[i].request
        if request.sampling.structured_outputs is None:
            yield guess
            continue
        walk = walks.get(guess.name)
        if walk is None or walk.request is not request or guess.name in slow:
            continue
        begun = time.thread_time()
        if begun > until or not walk.foresees:
            continue
        tokens = _following(walk, guess, running.known[i], most)
        walk.foresees = time.thread_time() - begun <= LONG
        yield evolve(guess, tokens=_before_end(walk, tokens))


def _following(walk: Walk, guess: Guess, known: int, most: int) -> tuple[int, ...]:
    """What may follow what has just come behind so many tokens; nothing, if the matcher
    is elsewhere, or what came is not allowed: then it does not count.
    """
    matcher = walk.matcher
    if matcher is None or walk.job is not None or walk.given != known - walk.prompt:
        return ()
    try:
        if matcher.allowed(guess.new) < len(guess.new):
            return ()
        matcher.advance(guess.new)
        walk.given, walk.allowed = walk.given + len(guess.new), None
        forced = matcher.forced()[:most]
        return forced or guess.tokens[: matcher.allowed(guess.tokens)]
    # Its next mask finds out again, and says so; nor does a library's panic end more.
    except GrammarError:
        walk.spoil()
    except BaseException:
        walk.spoil()
    return ()


def _before_end(walk: Walk, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Those before one that ends the output: what it draws there needs no draft."""
    ends = walk.request.stop_ids | walk.never
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:at]
