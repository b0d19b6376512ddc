"""A beam search as rounds of ordinary requests: what to submit next, and when it is over.

Theory. In a round each beam is a request: the search's prompt and the beam's output so
far, of which one token is generated. This token is not used, but the likeliest tokens
with their log-probabilities: from them `minfer.sampling.beam` chooses the next beams. The
request of a beam finds the KV of its parent in the prefix cache, as the blocks of the
round before are published by then.

    SearchRounds --requests--> engine --Candidates of each beam--> after_round

It is a fold on plain values: the same for a search that runs and for one that is read
from a journal, which has the requests and their log-probabilities.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import evolve, field, frozen

from minfer.blocks.keys import Keys, block_keys, extend_keys, tail_keys
from minfer.effects.live.request_names import round_name
from minfer.records.messages import Executed, Submit
from minfer.records.request import Continuation, Request, SamplingParams
from minfer.records.state import Turn
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.beam import (
    BeamRound,
    BeamSearch,
    Candidates,
    Hypothesis,
    RoundContext,
    Search,
    choose_beams,
    num_candidates,
)

# fills up where fewer than requested were found
NO_HYPOTHESIS: Final = Hypothesis((), 0.0, 0.0, "length")


@frozen(kw_only=True)
class SearchRequest(Request):
    """A beam search as one request: with `width` beams, of which the `n` best sequences
    are returned. No engine gets it: its rounds are submitted instead.
    """

    width: int
    search_params: BeamSearch
    block_size: int


@frozen
class Beam:
    """One of the sequences that a search continues."""

    output: tuple[int, ...]
    logprob: float  # of the output: a sum of float64
    keys: Keys = field(default=(), eq=False)  # content keys, of as many blocks as known


@frozen
class SearchRounds:
    """A search between two rounds."""

    next_round: BeamRound  # its `beam` is not used
    stop_ids: frozenset[int]
    beams: tuple[Beam, ...] = (Beam((), 0.0),)  # empty: the search is over
    done: tuple[Hypothesis, ...] = ()  # the best, best first

    @classmethod
    def of(cls, request: SearchRequest) -> "SearchRounds":
        """Returns a new search."""
        first_round = BeamRound(
            id=request.id,
            width=request.width,
            prompt=len(request.prompt),
            most=request.max_tokens,
            how=request.search_params,
        )
        keys = block_keys(request.root, request.prompt, request.block_size)
        return cls(first_round, request.stop_ids, (Beam((), 0.0, keys),))

    @property
    def is_finished(self) -> bool:
        """Whether no round follows."""
        return not self.beams

    def best(self, count: int) -> tuple[Hypothesis, ...]:
        """Returns the best `count` outputs of a search that is over."""
        return (*self.done, *(NO_HYPOTHESIS,) * count)[:count]

    def after_round(self, offers: Sequence[Candidates]) -> "SearchRounds":
        """Returns the search after a round with these candidates of its beams, in
        order.
        """
        outputs = [beam.output for beam in self.beams]
        padding = self.next_round.width - len(offers)  # fewer beams than the width
        search = Search(
            logprobs=(*[beam.logprob for beam in self.beams], *(0.0,) * padding),
            candidates=(*offers, *(None,) * padding),
            hypotheses=self.done,
        )
        choice = choose_beams(
            search,
            RoundContext(
                params=self.next_round.how,
                stop_ids=self.stop_ids,
                length=len(outputs[0]) + 1,
                max_tokens=self.next_round.most,
                output_of=outputs.__getitem__,
            ),
        )
        beams = tuple(
            Beam((*outputs[child.parent], child.token), child.logprob, parent.keys)
            for child in choice.next_beams
            if child.logprob > _PADDING_LOGPROB
            for parent in (self.beams[child.parent],)
        )
        next_round = evolve(self.next_round, number=self.next_round.number + 1)
        return SearchRounds(next_round, self.stop_ids, beams, choice.hypotheses)


def replay_searches(
    turns: Iterable[Turn], earlier: Mapping[str, SearchRounds] = MappingProxyType({})
) -> dict[str, SearchRounds]:
    """Returns a journal's searches, by id, after all its turns; `earlier` are those that
    began in earlier journals. A first round begins a new search: an id may be used again
    once its search has ended.
    """
    searches, offers = dict(earlier), dict[tuple[str, int], Candidates]()
    for turn in turns:
        for event in turn.events:
            if (
                isinstance(event, Submit)
                and (beam_round := event.request.continuation.beam_round) is not None
            ):
                if not beam_round.number:
                    searches[beam_round.id] = SearchRounds(
                        beam_round, event.request.stop_ids
                    )
                    offers = {
                        key: offer
                        for key, offer in offers.items()
                        if key[0] != beam_round.id
                    }
            elif isinstance(event, Executed):
                offers |= _offers_in(turn, event)
        for name in {name for name, _ in offers} & searches.keys():
            round_offers = [
                offers.get((name, beam)) for beam in range(len(searches[name].beams))
            ]
            if not searches[name].is_finished and None not in round_offers:
                searches[name] = searches[name].after_round(
                    [offer for offer in round_offers if offer]
                )
                for beam in range(len(round_offers)):
                    del offers[name, beam]
    return searches


def _offers_in(turn: Turn, event: Executed) -> dict[tuple[str, int], Candidates]:
    """Returns the candidates of beams in the results of a step: search and beam ->
    candidates.
    """
    run = turn.before.running
    inflight = turn.before.inflight
    plan = next((plan for plan in inflight if plan.step == event.step), None)
    if plan is None or not event.logprobs:
        return {}
    rounds = {
        run_id: seq.request.continuation.beam_round
        for run_id, seq in zip(run.run_ids, run.seqs, strict=True)
    }
    offers = dict[tuple[str, int], Candidates]()
    for run_id, logprobs in zip(plan.run_ids, event.logprobs, strict=True):
        beam_round = rounds.get(run_id)
        if (
            beam_round is not None
            and (offer := candidates_of(beam_round.beam, logprobs)) is not None
        ):
            offers[beam_round.id, beam_round.beam] = offer
    return offers


_PADDING_LOGPROB: Final = float("-inf")  # the log-probability of a padding beam


def candidates_of(beam: int, logprobs: Sequence[TokenLogprobs]) -> Candidates | None:
    """Returns a beam's candidates, from the log-probabilities of its token; None if they
    cannot be compared.
    """
    if len(logprobs) != 1 or not logprobs[0].likeliest:
        return None
    likeliest, values = logprobs[0].likeliest, logprobs[0].logprobs
    if not all(value < float("inf") for value in values):  # NaN is not, either
        return None
    return Candidates(beam, likeliest, values)


def round_requests(
    rounds: SearchRounds, request: SearchRequest
) -> tuple[SearchRounds, tuple[Request, ...]]:
    """Returns the requests of the next round, one for each beam, and the search with
    their content keys, which those of later rounds extend.
    """
    next_round, size = rounds.next_round, request.block_size
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=num_candidates(request.width, len(request.stop_ids)),
    )
    beams, requests = list[Beam](), list[Request]()
    place = request.continuation.place
    for number, beam in enumerate(rounds.beams):
        prompt = request.prompt + beam.output
        keys = extend_keys(beam.keys, request.root, prompt, size)
        beams.append(Beam(beam.output, beam.logprob, keys))
        requests.append(
            Request(
                id=round_name(next_round.id, next_round.number, number),
                prompt=prompt,
                max_tokens=1,
                stop_ids=request.stop_ids,
                sampling=sampling,
                priority=request.priority,
                client=request.client,
                deadline=request.deadline,
                adapter=request.adapter,
                root=request.root,
                keys=keys,
                continuation=Continuation(
                    place=None if place is None else (*place[:2], number),
                    tail_keys=tail_keys(request.root, keys, prompt, size),
                    beam_round=evolve(next_round, beam=number),
                ),
            )
        )
    return evolve(rounds, beams=tuple(beams)), tuple(requests)
