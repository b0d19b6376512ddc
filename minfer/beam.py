"""Beam search: which continuations of a search's beams go on, and when it is over.

Theory. A search of width k keeps the k likeliest sequences that it knows. In a round each
beam offers its likeliest next tokens; all offers are ranked by the log-probability of the
whole output. Of the k best, those that end their sequence (a stop id, or the last token
that there is room for) become hypotheses, scored by log-probability / length^penalty; the
k best that do not end are the beams of the next round. The k best hypotheses are kept,
and the search is over once they cannot be bettered, as `BeamSearch.early_stopping` says.

That is transformers' beam search (`GenerationMixin._beam_search`), choice for choice. It
ranks (1 + stop ids) * k offers of all beams; nothing is lost if a beam offers no more
than k + stop ids: at most so many of them can be among the k best, or among the k best
that do not end.

All is on plain values. The engine knows no beams: each is a request of its own in every
round.
"""

from collections.abc import Callable, Container
from math import inf
from operator import attrgetter
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.checks import ParameterError, check_number

NEVER: Final = "never"
# Beams and stop ids together: a request may ask for as many likeliest tokens.
MAX_CANDIDATES: Final = 20
MAX_BEAMS: Final = 16  # of one search: four are left for stop ids
MAX_LENGTH_PENALTY: Final = 10.0  # with it, any length's power is a finite number


@frozen(kw_only=True)
class BeamSearch:
    """How a search scores hypotheses and when it ends. Raises ParameterError."""

    # Hypotheses are scored by log-probability / length^penalty: above 0 favours longer
    # ones.
    length_penalty: float = 1.0
    # What ends a search that has its k hypotheses. True: that it has them. False: that
    # no beam's score now is above the worst of theirs. "never": that no beam's could come
    # to be, if it were as long as may be and lost no more probability.
    early_stopping: bool | str = False

    def __attrs_post_init__(self) -> None:
        most = MAX_LENGTH_PENALTY
        check_number(self.length_penalty, "length_penalty", -most, most)
        stopping: Any = self.early_stopping
        if not (isinstance(stopping, bool) or stopping == NEVER):
            raise ParameterError("early_stopping", f"must be true, false or {NEVER!r}")


@frozen(kw_only=True)
class BeamRound:
    """Which beam of which search a request is, and how the search goes on.

    What a round's requests yielded, this and their prompts are enough to go through the
    search again.
    """

    id: str  # of the search
    width: int  # beams
    prompt: int  # tokens of the search's prompt; what follows them is the beam's output
    most: int  # tokens that an output may have
    number: int = 0  # of the round
    beam: int = 0
    how: BeamSearch = BeamSearch()


@frozen
class Candidates:
    """What a beam offers: the likeliest tokens after its last one, best first."""

    index: int  # of the beam
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # theirs, natural


@frozen
class Child:
    """A continuation: a beam, and a token after it."""

    parent: int  # the beam
    token: int
    logprob: float  # of the whole output, this token included


@frozen
class Hypothesis:
    """An output that has ended."""

    tokens: tuple[int, ...]
    logprob: float  # natural, of all tokens together
    score: float  # by which it is ranked
    reason: str  # "stop" or "length"


@frozen
class Search:
    """A search in a round."""

    logprobs: tuple[float, ...]  # of each beam's output
    # What each beam offers in this round, once it is known.
    offers: tuple[Candidates | None, ...]
    done: tuple[Hypothesis, ...] = ()  # the best, best first; never more than beams


@frozen
class Round:
    """What there is to know of a round besides what the beams offer."""

    how: BeamSearch
    stop_ids: Container[int]
    length: int  # of an output with one more token
    most: int  # tokens that an output may have
    output_of: Callable[[int], tuple[int, ...]] = field(repr=False)  # of a beam so far


@frozen
class Choice:
    """What comes of a round."""

    children: tuple[Child, ...]  # the next beams, best first; none: it is over
    done: tuple[Hypothesis, ...]  # the hypotheses so far, best first


def wanted(width: int, stop_ids: int) -> int:
    """How many candidates each beam is to offer."""
    return min(width + stop_ids, MAX_CANDIDATES)


def choose(search: Search, this: Round) -> Choice:
    """What becomes of a search all of whose beams have made an offer."""
    width = len(search.logprobs)
    ranked = _ranked(search)
    full = this.length >= this.most
    ended = [one for one in ranked[:width] if full or one.token in this.stop_ids]
    done = _kept(search.done, [_hypothesis(one, this) for one in ended], width)
    if full:
        return Choice((), done)
    children = [one for one in ranked if one.token not in this.stop_ids][:width]
    if not children or _is_over(this, children[0], done, width):
        return Choice((), done)
    # Where few tokens are on offer there may be fewer; the others then count for nothing.
    children += [evolve(children[0], logprob=-inf)] * (width - len(children))
    return Choice(tuple(children), done)


def _ranked(search: Search) -> list[Child]:
    """All continuations on offer, the likeliest first; of equals the first beam's."""
    every = [
        Child(beam, token, before + logprob)
        for beam, (before, offer) in enumerate(
            zip(search.logprobs, search.offers, strict=True)
        )
        if offer is not None
        for token, logprob in zip(offer.tokens, offer.logprobs, strict=True)
    ]
    return sorted(every, key=attrgetter("logprob"), reverse=True)  # stable


def _hypothesis(one: Child, this: Round) -> Hypothesis:
    return Hypothesis(
        tokens=(*this.output_of(one.parent), one.token),
        logprob=one.logprob,
        score=one.logprob / this.length**this.how.length_penalty,
        reason="stop" if one.token in this.stop_ids else "length",
    )


def _kept(
    done: tuple[Hypothesis, ...], new: list[Hypothesis], width: int
) -> tuple[Hypothesis, ...]:
    """The best hypotheses; of equals those that were first."""
    if not new:
        return done
    return tuple(sorted((*done, *new), key=attrgetter("score"), reverse=True)[:width])


def _is_over(this: Round, best: Child, done: tuple[Hypothesis, ...], width: int) -> bool:
    """Whether no beam is expected to better what is done; `best` is the likeliest."""
    if len(done) < width:
        return False
    how = this.how
    if how.early_stopping is True:
        return True
    hopeful = how.early_stopping == NEVER and how.length_penalty > 0
    length = this.most if hopeful else this.length
    hoped: float = best.logprob / length**how.length_penalty
    return hoped <= done[-1].score
