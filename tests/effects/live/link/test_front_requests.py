"""A front's requests: how they are asked for again, and how news of them read."""

from attrs import evolve

from minfer.effects.live.link import link_messages as wire
from minfer.effects.live.link.front_requests import FrontRequests
from minfer.effects.live.link.quarantine import GUILTY_DEATHS
from minfer.effects.live.live_requests import LiveRequests
from minfer.records.messages import Admitted, Finish, Finished
from minfer.records.request import Request, SamplingParams
from minfer.sampling.structured import StructuredOutputs


def request(name: str = "a", n: int = 1, first_sample: int = 0) -> Request:
    return Request(id=name, prompt=(1, 2), max_tokens=9, n=n, first_sample=first_sample)


def news(*ids: tuple[str, int], tokens: tuple[tuple[int, ...], ...]) -> wire.FrontOutputs:
    return wire.FrontOutputs(time=1.0, ids=ids, tokens=tokens)


def test_output_so_far_is_history_when_it_is_resubmitted() -> None:
    requests = FrontRequests(LiveRequests())
    requests.add(request())
    requests.take(news(("a", 0), tokens=((5, 6),)))
    reported = requests.take(
        wire.FrontOutputs(time=2.0, ids=None, tokens=((7,),), drafts=(3,))
    )
    assert reported.drafts == (3,)
    requests.lose("")
    (again,) = requests.resumed()
    assert (again.request.output, again.request.prompt) == ((5, 6, 7), (1, 2))
    assert again.request.id != "a", "late news of the old one would be taken for its own"
    reported = requests.take(news((again.request.id, 0), tokens=((8,),)))
    assert (reported.ids, reported.tokens) == ((("a", 0),), ((8,),))


def test_samples_that_have_begun_go_on_each_by_itself() -> None:
    requests = FrontRequests(LiveRequests())
    requests.add(request(n=3, first_sample=4))
    requests.take(news(("a", 0), ("a", 2), tokens=((5,), (6,))))
    requests.end((Finished("a", 0, "length", 1),))
    requests.lose("")
    parts = [one.request for one in requests.resumed()]
    assert [(one.n, one.first_sample, one.output) for one in parts] == [
        (1, 5, ()),
        (1, 6, (6,)),
    ]
    (end,) = requests.finish([Finish("a", 2, 1)])
    assert (end.id, end.sample) == (parts[1].id, 0)
    reported = requests.take(
        wire.FrontOutputs(time=1.0, finished=(Finished(parts[1].id, 0, "stop", 1),))
    )
    assert (reported.finished[0].id, reported.finished[0].sample) == ("a", 2)


def test_samples_that_have_not_begun_go_on_as_one_request() -> None:
    requests = FrontRequests(LiveRequests())
    requests.add(request(n=3))
    requests.lose("")
    (again,) = requests.resumed()
    assert again.request.n == 3


def test_who_is_blamed() -> None:
    requests = FrontRequests(LiveRequests())
    for name in "abc":
        requests.add(request(name))
    started = tuple(
        wire.AdmittedReason(Admitted(name, 0, waited=0.0, hit=0, known=2))
        for name in "ab"
    )
    requests.take(wire.FrontOutputs(time=0.0, reasons=started))
    requests.take(news(("a", 0), ("b", 0), tokens=((), (1,))))
    requests.lose("")
    assert [one.deaths for one in requests.resumed()] == [1, 1, 0], "c only waited"
    for _ in range(GUILTY_DEATHS - 1):
        assert not requests.lose(_name_of(requests, "a"))
        requests.resumed()
    (done,) = requests.lose(_name_of(requests, "a"))
    assert (done.id, done.reason) == ("a", "error")


def test_who_may_have_been_compiling_is_blamed() -> None:
    requests = FrontRequests(LiveRequests())
    constraint = SamplingParams(structured_outputs=StructuredOutputs(regex="x"))
    for name in ("compiles", "in line"):
        requests.add(evolve(request(name), sampling=constraint))
    requests.add(request("free"))
    requests.take(wire.FrontOutputs(time=0.0, arrived=("in line", "free", "gone")))
    requests.lose("")
    assert [one.deaths for one in requests.resumed()] == [1, 0, 0]
    requests.lose("", served=False)
    assert [one.deaths for one in requests.resumed()] == [1, 0, 0], "it was not ready"
    requests.lose("")
    assert [one.deaths for one in requests.resumed()] == [2, 1, 0]
    for _ in range(GUILTY_DEATHS - 1):
        assert not requests.lose(_name_of(requests, "compiles"))
        requests.resumed()
    (done,) = requests.lose(_name_of(requests, "compiles"))
    assert (done.id, done.reason) == ("compiles", "error")


def _name_of(requests: FrontRequests, own: str) -> str:
    kept = requests.get(own)
    assert kept is not None
    return next(iter(kept.names))


def test_what_was_to_end_ends_without_an_engine() -> None:
    requests = FrontRequests(LiveRequests())
    for name in "abc":
        requests.add(request(name))
    requests.take(news(("a", 0), ("b", 0), tokens=((1, 2, 3), (4,))))
    requests.finish([Finish("a", 0, 2, "stop")])
    assert requests.cancel(["b"]) == ("b",)
    assert [(one.id, one.reason, one.length) for one in requests.pending_ends()] == [
        ("a", "stop", 2),
        ("b", "cancelled", 1),
    ]
