"""Beam search: which beams continue in the next round, and when a search is over.

Theory. A search of width k keeps its k likeliest sequences. In a round each beam proposes
its likeliest next tokens; all candidates are ranked by the log-probability of the whole
output. Of the k best, those that end their sequence (a stop id, or the last allowed
token) become hypotheses, scored by log-probability / length^penalty; the k best that do
not end are the beams of the next round. The k best hypotheses are kept, and the search is
over once none can be better, as `BeamSearch.early_stopping` defines.

This is transformers' beam search (`GenerationMixin._beam_search`), with the same choices.
That ranks (1 + stop ids) * k candidates of all beams; nothing is lost if a beam proposes
no more than k + stop ids: at most that many of them can be among the k best, or among the
k best that do not end.

All values are plain. The engine does not know beams: each is a request of its own in
every round.
"""

from collections.abc import Callable, Container
from math import inf
from operator import attrgetter
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.values.checks import MAX_INT64, ParameterError, check_number, check_text

NEVER: Final = "never"
# Beams and stop ids together: a request may ask for as many top log-probabilities.
MAX_CANDIDATES: Final = 20
MAX_BEAMS: Final = 16  # of one search: four are left for stop ids
MAX_LENGTH_PENALTY: Final = 10.0  # with it, the power of any length is finite


@frozen(kw_only=True)
class BeamSearch:
    """How a search scores hypotheses and when it ends. Raises ParameterError if
    invalid.
    """

    # Hypotheses are scored by log-probability / length^penalty: above 0 favours longer
    # ones.
    length_penalty: float = 1.0
    # When a search with k hypotheses ends. True: at once. False: when no beam's score now
    # is above the worst of theirs. "never": when no beam could reach it, even at the
    # maximal length without losing more probability.
    early_stopping: bool | str = False

    def __attrs_post_init__(self) -> None:
        limit = MAX_LENGTH_PENALTY
        check_number(self.length_penalty, "length_penalty", -limit, limit)
        stopping: Any = self.early_stopping
        if not (isinstance(stopping, bool) or stopping == NEVER):
            raise ParameterError("early_stopping", f"must be true, false or {NEVER!r}")


@frozen(kw_only=True)
class BeamRound:
    """The beam of a search that a request is, and the parameters of the search.

    With the prompts and the yields of a round's requests this is enough to replay the
    search.
    """

    id: str  # of the search
    width: int  # beams
    prompt: int  # tokens of the search's prompt; after them comes the beam's output
    most: int  # tokens that an output may have
    number: int = 0  # of the round
    beam: int = 0
    how: BeamSearch = BeamSearch()

    def __attrs_post_init__(self) -> None:
        check_text(self.id, "beam_round.id")
        for name in ("width", "prompt", "most", "number", "beam"):
            value = getattr(self, name)
            check_number(value, f"beam_round.{name}", 0, MAX_INT64, whole=True)
        if not isinstance(self.how, BeamSearch):
            raise ParameterError("beam_round.how", "must be a BeamSearch")


@frozen
class Candidates:
    """The candidates of a beam: the likeliest tokens after its last one, best first."""

    index: int  # of the beam
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of `tokens`, natural


@frozen
class BeamCandidate:
    """A continuation: a beam and one more token."""

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
    """The state of a search in a round."""

    logprobs: tuple[float, ...]  # of each beam's output
    # The candidates of each beam in this round, once they are known.
    candidates: tuple[Candidates | None, ...]
    hypotheses: tuple[Hypothesis, ...] = ()  # the best, best first; never more than beams


@frozen
class RoundContext:
    """What a round depends on besides the candidates of its beams."""

    params: BeamSearch
    stop_ids: Container[int]
    length: int  # of an output with one more token
    max_tokens: int  # of an output
    output_of: Callable[[int], tuple[int, ...]] = field(repr=False)  # of a beam so far


@frozen
class RoundResult:
    """The result of a round."""

    next_beams: tuple[BeamCandidate, ...]  # best first; none: the search is over
    hypotheses: tuple[Hypothesis, ...]  # so far, best first


def num_candidates(width: int, stop_ids: int) -> int:
    """How many candidates each beam must propose."""
    return min(width + stop_ids, MAX_CANDIDATES)


def choose_beams(search: Search, context: RoundContext) -> RoundResult:
    """The next beams and hypotheses of a search whose beams all have candidates."""
    width = len(search.logprobs)
    candidates = _rank_candidates(search)
    is_last = context.length >= context.max_tokens
    ended = [
        candidate
        for candidate in candidates[:width]
        if is_last or candidate.token in context.stop_ids
    ]
    hypotheses = _best_hypotheses(
        search.hypotheses, [_hypothesis(candidate, context) for candidate in ended], width
    )
    if is_last:
        return RoundResult((), hypotheses)
    next_beams = [
        candidate for candidate in candidates if candidate.token not in context.stop_ids
    ][:width]
    if not next_beams or _is_over(context, next_beams[0], hypotheses, width):
        return RoundResult((), hypotheses)
    # There may be fewer if few tokens are proposed; the missing ones do not count.
    next_beams += [evolve(next_beams[0], logprob=-inf)] * (width - len(next_beams))
    return RoundResult(tuple(next_beams), hypotheses)


def _rank_candidates(search: Search) -> list[BeamCandidate]:
    """All continuations, the likeliest first; equals in the order of beams."""
    candidates = [
        BeamCandidate(beam, token, before + logprob)
        for beam, (before, proposed) in enumerate(
            zip(search.logprobs, search.candidates, strict=True)
        )
        if proposed is not None
        for token, logprob in zip(proposed.tokens, proposed.logprobs, strict=True)
    ]
    return sorted(candidates, key=attrgetter("logprob"), reverse=True)  # stable


def _hypothesis(candidate: BeamCandidate, context: RoundContext) -> Hypothesis:
    return Hypothesis(
        tokens=(*context.output_of(candidate.parent), candidate.token),
        logprob=candidate.logprob,
        score=candidate.logprob / context.length**context.params.length_penalty,
        reason="stop" if candidate.token in context.stop_ids else "length",
    )


def _best_hypotheses(
    hypotheses: tuple[Hypothesis, ...], new: list[Hypothesis], width: int
) -> tuple[Hypothesis, ...]:
    """The best hypotheses; of equals the earlier ones."""
    return tuple(
        sorted((*hypotheses, *new), key=attrgetter("score"), reverse=True)[:width]
    )


def _is_over(
    context: RoundContext,
    best: BeamCandidate,
    hypotheses: tuple[Hypothesis, ...],
    width: int,
) -> bool:
    """Whether no beam is expected to beat the hypotheses done; `best` is the
    likeliest.
    """
    if len(hypotheses) < width:
        return False
    params = context.params
    if params.early_stopping is True:
        return True
    longer_is_better = params.early_stopping == NEVER and params.length_penalty > 0
    length = context.max_tokens if longer_is_better else context.length
    best_score: float = best.logprob / length**params.length_penalty
    return best_score <= hypotheses[-1].score
