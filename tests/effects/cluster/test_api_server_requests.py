"""An API server's requests: how they are asked for again, and how news of them read."""

import pytest
from attrs import evolve

from minfer.effects.cluster.engine_client.api_server_requests import ApiServerRequests
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.effects.cluster.engine_client.request_sender import RequestSender
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_rule import (
    CLEARING_TOKENS,
    MAX_SOLO_DEATHS,
    MAX_SOLO_ENDS,
    EndKind,
)
from minfer.effects.live.request_registry import RequestRegistry
from minfer.records.messages import Admitted, Finish, Finished
from minfer.records.request import Request, SamplingParams
from minfer.sampling.structured import StructuredOutputs


def request(name: str = "a", n: int = 1, first_sample: int = 0) -> Request:
    return Request(id=name, prompt=(1, 2), max_tokens=9, n=n, first_sample=first_sample)


def news(
    *ids: tuple[str, int], tokens: tuple[tuple[int, ...], ...]
) -> wire.ApiServerOutputs:
    return wire.ApiServerOutputs(time=1.0, ids=ids, tokens=tokens)


class Requests(ApiServerRequests):
    """The requests of an API server, and what sends them to its only replica."""

    def __init__(self) -> None:
        live = RequestRegistry()
        super().__init__(live)
        self.link = ReplicaLink(0)
        self.sender = RequestSender(live, self, [self.link])


def begun(*submitted: Request) -> Requests:
    """The requests of an API server, all of them on its only replica."""
    requests = Requests()
    requests.sender.send_to(
        requests.link, [requests.add(request) for request in submitted]
    )
    return requests


def resumed(requests: Requests) -> list[wire.Resumed]:
    """All that is on no replica, as its next engine gets it."""
    records = list(requests.unplaced.values())
    return [entry for record in records for entry in requests.sender.resume(record, 0)]


def test_output_so_far_is_history_when_it_is_resubmitted() -> None:
    requests = begun(request())
    requests.take(news(("a", 0), tokens=((5, 6),)))
    reported = requests.take(
        wire.ApiServerOutputs(time=2.0, ids=None, tokens=((7,),), drafts=(3,))
    )
    assert reported.drafts == (3,)
    requests.lose(0)
    (entry,) = resumed(requests)
    assert (entry.request.output, entry.request.prompt) == ((5, 6, 7), (1, 2))
    assert entry.request.id != "a", "late news of the old one would be taken for its own"
    reported = requests.take(news((entry.request.id, 0), tokens=((8,),)))
    assert (reported.ids, reported.tokens) == ((("a", 0),), ((8,),))


def test_samples_that_have_begun_go_on_each_by_itself() -> None:
    requests = begun(request(n=3, first_sample=4))
    requests.take(news(("a", 0), ("a", 2), tokens=((5,), (6,))))
    requests.end((Finished("a", 0, "length", 1),))
    requests.lose(0)
    resumed_requests = [entry.request for entry in resumed(requests)]
    assert [
        (request.n, request.first_sample, request.output) for request in resumed_requests
    ] == [
        (1, 5, ()),
        (1, 6, (6,)),
    ]
    (end,) = requests.finish([Finish("a", 2, 1)])[0]
    assert (end.id, end.sample) == (resumed_requests[1].id, 0)
    reported = requests.take(
        wire.ApiServerOutputs(
            time=1.0, finished=(Finished(resumed_requests[1].id, 0, "stop", 1),)
        )
    )
    assert (reported.finished[0].id, reported.finished[0].sample) == ("a", 2)


def test_samples_that_have_not_begun_go_on_as_one_request() -> None:
    requests = begun(request(n=3))
    requests.lose(0)
    (entry,) = resumed(requests)
    assert entry.request.n == 3


def test_who_is_blamed() -> None:
    requests = begun(*map(request, "abc"))
    started = tuple(
        wire.AdmittedReason(Admitted(name, 0, waited=0.0, hit=0, known=2))
        for name in "ab"
    )
    requests.take(wire.ApiServerOutputs(time=0.0, reasons=started))
    requests.take(news(("a", 0), ("b", 0), tokens=((), (1,))))
    requests.lose(0)
    assert [entry.deaths for entry in resumed(requests)] == [1, 1, 0], "c only waited"
    blamed = blame(requests, "a", *[EndKind.UNKNOWN] * MAX_SOLO_DEATHS)
    assert blamed == [False] * (MAX_SOLO_DEATHS - 1) + [True]


def blame(requests: Requests, name: str, *ends: EndKind) -> list[bool]:
    """Whether a request is the cause after each of these ends of engines, which served it
    alone.
    """
    blamed = []
    for end in ends:
        requests.lose(0, _name_of(requests, name))
        causes = requests.causes(0, end)
        assert {cause.request.id for cause in causes} <= {name}
        blamed.append(bool(causes))
        resumed(requests)
    return blamed


def test_a_crash_is_the_fault_of_the_request_that_ran_alone() -> None:
    requests = begun(*map(request, "ab"))
    requests.lose(0, _name_of(requests, "a"))
    assert not requests.causes(1, EndKind.CRASHED), "another replica"
    assert not requests.causes(0, EndKind.KILLED)
    assert not requests.causes(0, EndKind.CRASHED), "that was the last one's end"
    resumed(requests)
    requests.lose(0)
    assert not requests.causes(0, EndKind.CRASHED), "it served others"
    resumed(requests)
    assert blame(requests, "a", EndKind.CRASHED) == [True]


@pytest.mark.parametrize("end", [EndKind.OUT_OF_MEMORY, EndKind.HUNG, EndKind.UNKNOWN])
def test_an_end_that_may_be_its_fault_is_so_after_several(end: EndKind) -> None:
    """Kills from outside in between neither blame nor clear it."""
    requests = begun(*map(request, "ab"))
    other_ends = [end, EndKind.KILLED] * (MAX_SOLO_DEATHS - 1)
    assert not any(blame(requests, "a", *other_ends))
    assert blame(requests, "a", end) == [True]
    requests = begun(*map(request, "ab"))
    assert not any(blame(requests, "a", *other_ends))
    requests.lose(0)  # while it served others, too
    resumed(requests)
    assert not any(blame(requests, "a", *other_ends))


def test_kills_from_outside_blame_nobody_but_for_a_bound() -> None:
    requests = begun(*map(request, "ab"))
    assert not any(blame(requests, "a", *[EndKind.KILLED] * (MAX_SOLO_ENDS - 1)))
    assert blame(requests, "a", EndKind.KILLED) == [True]


def test_a_sample_is_cleared_by_more_tokens_than_the_last_engine_gave_it() -> None:
    requests = begun(request("a"))
    base_tokens = CLEARING_TOKENS + 5
    for deaths, tokens in (
        (1, base_tokens),
        (2, base_tokens - 1),
        (1, base_tokens + 9),
        (2, 3),
        (3, 0),
    ):
        name = _name_of(requests, "a")
        admit = wire.AdmittedReason(Admitted(name, 0, waited=0.0, hit=0, known=2))
        requests.take(wire.ApiServerOutputs(time=0.0, reasons=(admit,)))
        requests.take(news((name, 0), tokens=((1,) * tokens,)))
        requests.lose(0)
        (entry,) = resumed(requests)
        assert (entry.deaths, entry.to_clear) == (deaths, CLEARING_TOKENS + tokens)


def test_who_may_have_been_compiling_is_blamed() -> None:
    constraint = SamplingParams(structured_outputs=StructuredOutputs(regex="x"))
    bound = [
        evolve(request(name), sampling=constraint) for name in ("compiles", "in line")
    ]
    requests = begun(*bound, request("free"))
    requests.take(wire.ApiServerOutputs(time=0.0, arrived=("in line", "free", "gone")))
    requests.lose(0)
    assert [entry.deaths for entry in resumed(requests)] == [1, 0, 0]
    requests.lose(0, served=False)
    assert [entry.deaths for entry in resumed(requests)] == [1, 0, 0], "it was not ready"
    requests.lose(0)
    assert [entry.deaths for entry in resumed(requests)] == [2, 1, 0]
    blamed = blame(requests, "compiles", *[EndKind.HUNG] * MAX_SOLO_DEATHS)
    assert blamed == [False] * (MAX_SOLO_DEATHS - 1) + [True]


def _name_of(requests: ApiServerRequests, request_id: str) -> str:
    record = requests.get(request_id)
    assert record is not None
    return next(iter(record.names))


def test_what_was_to_end_ends_without_an_engine() -> None:
    requests = begun(*map(request, "abc"))
    requests.take(news(("a", 0), ("b", 0), tokens=((1, 2, 3), (4,))))
    requests.finish([Finish("a", 0, 2, "stop")])
    assert requests.cancel(["b"]) == {0: ["b"]}
    assert requests.pending_ends() == (), "the engine has them"
    requests.lose(0)
    assert [(end.id, end.reason, end.length) for end in requests.pending_ends()] == [
        ("a", "stop", 2),
        ("b", "cancelled", 1),
    ]
