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
from tests.effects.live.test_front import Stub

VOCAB, STOP, WIDTH = 7, 6, 3
PLACE = ((2.0,), 5, 0)


def likely(prompt: tuple[int, ...], token: int) -> float:
    """A made-up model: a log-probability that depends on the last two tokens."""
    weights = [1 + (prompt[-1] * 7 + prompt[-2] * 3 + at * 5) % 11 for at in range(VOCAB)]
    return math.log(weights[token] / sum(weights))


def requested(name: str = "s", most: int = 5, n: int = 2) -> SearchRequest:
    return SearchRequest(
        id=name,
        prompt=(1, 2, 3),
        max_tokens=most,
        n=n,
        stop_ids=frozenset({STOP}),
        width=WIDTH,
        search_params=BeamSearch(),
        block_size=4,
    )


def searched(search: SearchRequest) -> list[tuple[tuple[int, ...], float]]:
    """What plain beam search finds, by the book: outputs and log-probabilities."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done = list[tuple[tuple[int, ...], float]]()
    for length in range(1, search.max_tokens + 1):
        every = [
            ((*out, token), total + likely(search.prompt + out, token))
            for out, total in beams
            for token in range(VOCAB)
        ]
        every.sort(key=lambda one: -one[1])
        last = length == search.max_tokens
        best = every[: search.width]
        done += [one for one in best if last or one[0][-1] == STOP]
        done.sort(key=lambda one: -one[1] / len(one[0]))
        done = done[: search.width]
        beams = [one for one in every if one[0][-1] != STOP][: search.width]
        worst = done[-1][1] / len(done[-1][0]) if len(done) == search.width else -math.inf
        if beams[0][1] / length <= worst:
            break
    return done


@define(eq=False)
class Engine(Stub):
    """An engine client that keeps requests until it is told to answer."""

    came: list[Request] = field(factory=list)
    rounds: list[tuple[Request, ...]] = field(factory=list)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.came += requests
        self.rounds.append(tuple(requests))

    def answer(self, **more: Any) -> TurnOutputs:
        """The news of a turn that ends all that is here, as one step would."""
        some, self.came = self.came, []
        self.served -= {one.id for one in some}
        return evolve(answers(some), **more)


def answers(some: Iterable[Request]) -> TurnOutputs:
    some = tuple(some)
    places = {one.id: PLACE for one in some if one.place is None}
    return TurnOutputs(
        time=8.0,
        ids=tuple((one.id, 0) for one in some),
        tokens=tuple((0,) for _ in some),
        logprobs=tuple((beside(one),) for one in some),
        finished=tuple(Finished(one.id, 0, "length", 1, cached=4) for one in some),
        arrived=tuple(one.id for one in some),
        places=places,
        reasons=tuple(Admitted(one.id, 0, 0.5, 0, 3) for one in some),
    )


def beside(one: Request) -> TokenLogprobs:
    count = one.sampling.logprobs
    assert count == WIDTH + 1
    best = sorted(range(VOCAB), key=lambda token: -likely(one.prompt, token))[:count]
    logprobs = tuple(likely(one.prompt, token) for token in best)
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
    due = searched(search)[: search.n]
    assert news.ids == tuple((search.id, i) for i in range(search.n))
    assert news.tokens == tuple(tokens for tokens, _ in due)
    for done, (tokens, total) in zip(news.finished, due, strict=True):
        assert isinstance(done, BeamFinished)
        assert (done.id, done.length) == (search.id, len(tokens))
        assert done.reason == ("stop" if tokens[-1] == STOP else "length")
        assert done.cum_logprob == pytest.approx(total)
        assert done.cached == 4


@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_its_sequences_are_those_of_plain_beam_search(
    searches: BeamSearches, engine: Engine, most: int
) -> None:
    search = requested(most=most)
    searches.submit([search])
    check_found(run(searches, engine), search)
    assert engine.rounds[0][0].id == "s/0/0"
    assert [one.id for one in engine.rounds[-1]][:1] == [f"s/{len(engine.rounds) - 1}/0"]
    for one in (one for some in engine.rounds for one in some):
        assert (one.max_tokens, one.root) == (1, search.root)
        assert one.search is not None
    for some in engine.rounds[1:]:  # at the place of the first
        assert [one.place for one in some] == [(*PLACE[:2], at) for at in range(WIDTH)]


def test_one_request_is_heard_of(searches: BeamSearches, engine: Engine) -> None:
    searches.submit([requested()])
    first = outputs_of(searches.translate(engine.answer()))
    assert (first.arrived, first.ids, first.finished) == (("s",), (), ())
    assert [(one.id, type(one)) for one in first.reasons] == [("s", Admitted)]
    gone = Preempted("s/1/2", 0, ("x", 0), 4, 4)
    other = Admitted("x", 0, 0.0, 0, 3)
    answered = engine.answer(reasons=(gone, other))
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
    assert second.reasons == (evolve(gone, id="s"), other)
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
    ends = [(one.id, one.sample, one.reason) for one in news.finished]
    assert ends == [("s", 0, "cancelled"), ("s", 1, "cancelled")]
    assert len(engine.rounds) == rounds
    searches.submit([requested()])  # its id may come again


def test_a_beam_that_fails_ends_it_once_the_others_are_gone(
    searches: BeamSearches, engine: Engine
) -> None:
    searches.submit([requested()])
    searches.translate(engine.answer())
    failed, *others = engine.came
    broke = Finished(failed.id, 0, "error", 0, "its step failed")
    news = outputs_of(searches.translate(TurnOutputs(time=9.0, finished=(broke,))))
    assert not news.finished
    assert engine.requested[-1] == ("cancel", *[one.id for one in others])
    gone = tuple(Finished(one.id, 0, "cancelled", 0) for one in others)
    news = outputs_of(searches.translate(TurnOutputs(time=9.0, finished=gone)))
    ends = [(one.reason, one.error) for one in news.finished]
    assert ends == [("error", "its step failed")] * 2


def test_ends_that_are_reported_while_others_are_read() -> None:
    """As by an engine without a link, which ends at once what is cancelled."""

    @define(eq=False)
    class Ending(Engine):
        reported: list[Any] = field(factory=list)

        def cancel(self, ids: Iterable[str]) -> frozenset[str]:
            known = super().cancel(ids)
            ends = tuple(Finished(name, 0, "cancelled", 0) for name in sorted(known))
            self.reported += front.translate(TurnOutputs(time=9.0, finished=ends))
            return known

    engine = Ending()
    front = BeamSearches(engine)
    front.submit([requested()])
    front.translate(engine.answer())
    broke = Finished(engine.came[0].id, 0, "error", 0, "its step failed")
    engine.served.discard(broke.id)
    assert not outputs_of(
        front.translate(TurnOutputs(time=9.0, finished=(broke,)))
    ).finished
    ends = [(one.reason, one.error) for one in outputs_of(engine.reported).finished]
    assert ends == [("error", "its step failed")] * 2
    assert not front.live


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
    ids = tuple(one.id for one in engine.came)
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
    assert {(one.reason, one.error) for one in news.finished} == {
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
    """The front asks again for the round that was lost, without its place there."""
    remote, sent = RemoteEngine(), list[Any]()
    client: EngineClient = remote
    searches, heard = BeamSearches(client), list[Any]()
    remote.listen(lambda message: heard.extend(searches.translate(message)))

    def link() -> None:
        remote.connect(sent.append)
        remote.receive(wire.EngineReady("cpu", 9, b"print"))

    def carry(some: Sequence[Request]) -> None:
        answered = answers(some)
        remote.receive(
            wire.FrontOutputs(
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
        if any(one.finished for one in heard):
            break
        some = sent[-1].requests
        if lost in (1, 3):
            remote.disconnect()
            link()
            some = [one.request for one in sent[-1].resumed]
            assert all(one.place is None for one in some)
            assert all("#" in one.id for one in some)
        remote.draining = True  # rounds are no new requests
        carry(some)
    check_found(heard[-1], requested())
