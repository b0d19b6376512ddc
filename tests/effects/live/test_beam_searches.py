"""Rounds of a search go to an engine client, and news of one request come back."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from attrs import define, evolve, field

from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.beams.beam_rounds import SearchRequest
from minfer.effects.live.beams.beam_searches import BeamSearches
from minfer.effects.live.client import EngineClient, EngineDied, TurnOutputs
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.text.outputs import BeamFinished
from minfer.records.messages import Admitted, Finished, Preempted
from minfer.records.request import Request
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.beam import BeamSearch
from tests.effects.live.test_frontend import Stub

VOCAB, STOP, WIDTH = 7, 6, 3
PLACE = ((2.0,), 5, 0)


def likely(prompt: tuple[int, ...], token: int) -> float:
    """A made-up model: a log-probability that depends on the last two tokens."""
    weights = [
        1 + (prompt[-1] * 7 + prompt[-2] * 3 + place * 5) % 11 for place in range(VOCAB)
    ]
    return math.log(weights[token] / sum(weights))


def requested(name: str = "s", max_tokens: int = 5, n: int = 2) -> SearchRequest:
    return SearchRequest(
        id=name,
        prompt=(1, 2, 3),
        max_tokens=max_tokens,
        n=n,
        stop_ids=frozenset({STOP}),
        width=WIDTH,
        search_params=BeamSearch(),
        block_size=4,
    )


def searched(search: SearchRequest) -> list[tuple[tuple[int, ...], float]]:
    """What plain beam search finds, by the book: outputs and log-probabilities."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended = list[tuple[tuple[int, ...], float]]()
    for length in range(1, search.max_tokens + 1):
        continued = [
            ((*out, token), total + likely(search.prompt + out, token))
            for out, total in beams
            for token in range(VOCAB)
        ]
        continued.sort(key=lambda beam: -beam[1])
        last = length == search.max_tokens
        best = continued[: search.width]
        ended += [beam for beam in best if last or beam[0][-1] == STOP]
        ended.sort(key=lambda beam: -beam[1] / len(beam[0]))
        ended = ended[: search.width]
        beams = [beam for beam in continued if beam[0][-1] != STOP][: search.width]
        worst = (
            ended[-1][1] / len(ended[-1][0]) if len(ended) == search.width else -math.inf
        )
        if beams[0][1] / length <= worst:
            break
    return ended


@define(eq=False)
class Engine(Stub):
    """An engine client that keeps requests until it is told to answer."""

    came: list[Request] = field(factory=list)
    rounds: list[tuple[Request, ...]] = field(factory=list)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.came += requests
        self.rounds.append(tuple(requests))

    def answer(self, **changes: Any) -> TurnOutputs:
        """The news of a turn that ends all that is here, as one step would."""
        requests, self.came = self.came, []
        self.served -= {request.id for request in requests}
        return evolve(answers(requests), **changes)


def answers(requests: Iterable[Request]) -> TurnOutputs:
    requests = tuple(requests)
    places = {request.id: PLACE for request in requests if not request.continues}
    return TurnOutputs(
        time=8.0,
        ids=tuple((request.id, 0) for request in requests),
        tokens=tuple((0,) for _ in requests),
        logprobs=tuple((beside(request),) for request in requests),
        finished=tuple(
            Finished(request.id, 0, "length", 1, cached=4) for request in requests
        ),
        arrived=tuple(request.id for request in requests),
        places=places,
        reasons=tuple(Admitted(request.id, 0, 0.5, 0, 3) for request in requests),
    )


def beside(request: Request) -> TokenLogprobs:
    count = request.sampling.logprobs
    assert count == WIDTH + 1
    best = sorted(range(VOCAB), key=lambda token: -likely(request.prompt, token))[:count]
    logprobs = tuple(likely(request.prompt, token) for token in best)
    return TokenLogprobs(best[0], logprobs[0], 1, tuple(best), logprobs)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def searches(engine: Engine) -> BeamSearches:
    client: EngineClient = engine
    return BeamSearches(client)


def outputs_of(messages: list[Any]) -> TurnOutputs:
    (news,) = messages
    assert isinstance(news, TurnOutputs)
    return news


def run(searches: BeamSearches, engine: Engine) -> TurnOutputs:
    """Answer rounds until the search says something of its end."""
    for _ in range(20):
        news = outputs_of(searches.translate(engine.answer()))
        if news.finished:
            return news
    raise AssertionError("a search has no end")


def check_found(news: TurnOutputs, search: SearchRequest) -> None:
    expected = searched(search)[: search.n]
    assert news.ids == tuple((search.id, i) for i in range(search.n))
    assert news.tokens == tuple(tokens for tokens, _ in expected)
    for end, (tokens, total) in zip(news.finished, expected, strict=True):
        assert isinstance(end, BeamFinished)
        assert (end.id, end.length) == (search.id, len(tokens))
        assert end.reason == ("stop" if tokens[-1] == STOP else "length")
        assert end.cum_logprob == pytest.approx(total)
        assert end.cached == 4


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
def test_its_sequences_are_those_of_plain_beam_search(
    searches: BeamSearches, engine: Engine, max_tokens: int
) -> None:
    search = requested(max_tokens=max_tokens)
    searches.submit([search])
    check_found(run(searches, engine), search)
    assert engine.rounds[0][0].id == "s/0/0"
    assert [request.id for request in engine.rounds[-1]][:1] == [
        f"s/{len(engine.rounds) - 1}/0"
    ]
    for request in (request for requests in engine.rounds for request in requests):
        assert (request.max_tokens, request.root) == (1, search.root)
        assert request.continuation.beam_round is not None
    for requests in engine.rounds[1:]:  # at the place of the first
        assert [request.continuation.place for request in requests] == [
            (*PLACE[:2], index) for index in range(WIDTH)
        ]


def test_one_request_is_heard_of(searches: BeamSearches, engine: Engine) -> None:
    searches.submit([requested()])
    first = outputs_of(searches.translate(engine.answer()))
    assert (first.arrived, first.ids, first.finished) == (("s",), (), ())
    assert [(reason.id, type(reason)) for reason in first.reasons] == [("s", Admitted)]
    preempted = Preempted("s/1/2", 0, ("x", 0), 4, 4)
    other_admitted = Admitted("x", 0, 0.0, 0, 3)
    answered = engine.answer(reasons=(preempted, other_admitted))
    second = outputs_of(
        searches.translate(
            evolve(
                answered,
                ids=(*answered.ids, ("x", 0)),
                tokens=(*answered.tokens, (9,)),
                logprobs=(*answered.logprobs, ()),
                arrived=(*answered.arrived, "x"),
            )
        )
    )
    assert second.arrived == ("x",)
    assert second.reasons == (evolve(preempted, id="s"), other_admitted)
    assert (second.ids, second.tokens) == ((("x", 0),), ((9,),))


def test_cancelling_it_ends_what_runs_of_it(
    searches: BeamSearches, engine: Engine
) -> None:
    searches.submit([requested()])
    searches.translate(engine.answer())
    assert searches.cancel(["s", "unknown"]) == {"s"}
    assert engine.requested[-1] == ("cancel", "s/1/0", "s/1/1", "s/1/2")
    rounds = len(engine.rounds)
    # What the engine had done by then counts no more.
    news = outputs_of(searches.translate(engine.answer()))
    ends = [(end.id, end.sample, end.reason) for end in news.finished]
    assert ends == [("s", 0, "cancelled"), ("s", 1, "cancelled")]
    assert len(engine.rounds) == rounds
    searches.submit([requested()])  # its id may come again


def test_a_beam_that_fails_ends_it_once_the_others_are_gone(
    searches: BeamSearches, engine: Engine
) -> None:
    searches.submit([requested()])
    searches.translate(engine.answer())
    failed, *remaining = engine.came
    broke = Finished(failed.id, 0, "error", 0, "its step failed")
    news = outputs_of(searches.translate(TurnOutputs(time=9.0, finished=(broke,))))
    assert not news.finished
    assert engine.requested[-1] == ("cancel", *[request.id for request in remaining])
    cancelled = tuple(Finished(request.id, 0, "cancelled", 0) for request in remaining)
    news = outputs_of(searches.translate(TurnOutputs(time=9.0, finished=cancelled)))
    ends = [(end.reason, end.error) for end in news.finished]
    assert ends == [("error", "its step failed")] * 2


def test_ends_that_are_reported_while_others_are_read() -> None:
    """As by an engine without a link, which ends at once what is cancelled."""

    @define(eq=False)
    class Ending(Engine):
        reported: list[Any] = field(factory=list)

        def cancel(self, ids: Iterable[str]) -> frozenset[str]:
            cancelled = super().cancel(ids)
            ends = tuple(Finished(name, 0, "cancelled", 0) for name in sorted(cancelled))
            self.reported += frontend.translate(TurnOutputs(time=9.0, finished=ends))
            return cancelled

    engine = Ending()
    frontend = BeamSearches(engine)
    frontend.submit([requested()])
    frontend.translate(engine.answer())
    broke = Finished(engine.came[0].id, 0, "error", 0, "its step failed")
    engine.served.discard(broke.id)
    assert not outputs_of(
        frontend.translate(TurnOutputs(time=9.0, finished=(broke,)))
    ).finished
    ends = [(end.reason, end.error) for end in outputs_of(engine.reported).finished]
    assert ends == [("error", "its step failed")] * 2
    assert not frontend.live


def test_a_model_without_numbers_is_an_error(
    searches: BeamSearches, engine: Engine
) -> None:
    searches.submit([requested()])
    answered = engine.answer()
    emitted = evolve(answered.logprobs[0][0], logprobs=(math.nan,) * 4)
    news = outputs_of(searches.translate(evolve(answered, logprobs=((emitted,),))))
    assert "no log-probabilities" in news.finished[0].error


def test_a_death_is_heard_of_once(searches: BeamSearches, engine: Engine) -> None:
    searches.submit([requested()])
    searches.translate(engine.answer())
    ids = tuple(request.id for request in engine.came)
    assert searches.translate(EngineDied(("x", *ids), "why")) == [
        EngineDied(("x", "s"), "why")
    ]
    assert searches.translate(EngineDied(("s",), "why")) == [EngineDied(("s",), "why")]


def test_an_engine_that_is_dead_by_the_next_round(
    searches: BeamSearches, engine: Engine
) -> None:
    searches.submit([requested()])
    answered = engine.answer()
    engine.refusal = EngineDeadError("it was closed")
    _, death = searches.translate(answered)
    assert death == EngineDied(("s",), "it was closed")


def test_a_round_that_is_refused_ends_it(searches: BeamSearches, engine: Engine) -> None:
    searches.submit([requested()])
    answered = engine.answer()
    engine.refusal = RequestError("s/1/0 is being served")
    news = outputs_of(searches.translate(answered))
    assert {(end.reason, end.error) for end in news.finished} == {
        ("error", "s/1/0 is being served")
    }


def test_a_search_that_is_refused_leaves_nothing(
    searches: BeamSearches, engine: Engine
) -> None:
    engine.refusal = RequestError("no")
    with pytest.raises(RequestError):
        searches.submit([requested()])
    engine.refusal = None
    searches.submit([requested()])
    check_found(run(searches, engine), requested())


def test_it_goes_on_when_its_engine_is_another() -> None:
    """The API server asks again for the round that was lost, without its place there."""
    remote, sent = RemoteEngine(), list[Any]()
    client: EngineClient = remote
    searches, heard = BeamSearches(client), list[Any]()
    remote.listen(lambda message: heard.extend(searches.translate(message)))

    def link() -> None:
        remote.connect(sent.append)
        remote.receive(wire.EngineReady("cpu", 9, b"print"))

    def carry(requests: Sequence[Request]) -> None:
        answered = answers(requests)
        remote.receive(
            wire.ApiServerOutputs(
                time=answered.time,
                ids=answered.ids,
                tokens=answered.tokens,
                logprobs=answered.logprobs,
                finished=answered.finished,
                arrived=answered.arrived,
                places=dict(answered.places),
            )
        )

    link()
    searches.submit([requested()])
    for lost in range(20):
        if any(message.finished for message in heard):
            break
        requests = sent[-1].requests
        if lost in (1, 3):
            remote.disconnect()
            link()
            requests = [entry.request for entry in sent[-1].resumed]
            assert all(not request.continues for request in requests)
            assert all("#" in request.id for request in requests)
        remote.draining = True  # rounds are no new requests
        carry(requests)
    check_found(heard[-1], requested())
