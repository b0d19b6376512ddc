"""The engine's end: each API server hears of its own, and no API server harms another
one.
"""

from typing import Any

import msgspec
import pytest
from attrs import evolve

from minfer.blocks.keys import DIGEST, block_keys, tail_keys
from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.engine_server.engine_server import (
    API_SERVER_RETURN_SECONDS,
    LOADING_STAGE_SECONDS,
    EngineServer,
)
from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashingRequest, request_digest
from minfer.effects.cluster.link.crash_rule import CLEARING_TOKENS, REFUSED
from minfer.effects.live.client import EngineDied, TurnOutputs
from minfer.effects.live.errors import CrashingRequestError
from minfer.effects.live.totals import Totals
from minfer.records.messages import Finish, Finished
from minfer.records.request import Continuation, SamplingParams
from minfer.sampling.structured import StructuredOutputs
from tests.effects.cluster.ends import (
    IDLE,
    READY,
    Ends,
    MadeUp,
    linked,
    names_of,
    request,
)


def hello(
    api_server: int = 0, life: int = 1, *resumed: wire.Resumed
) -> wire.ApiServerHello:
    return wire.ApiServerHello(api_server, life, 0, resumed)


def joined(ends: Ends) -> tuple[Session, list[bytes]]:
    """A link on which nothing was said yet."""
    emitted: list[bytes] = []
    session = Session(emitted.append)
    ends.host.join(session)
    return session, emitted


def nothing_left(ends: Ends) -> None:
    """Of requests that have gone, nothing is kept."""
    host = ends.host
    assert not host._live
    assert not host._quarantine.waiting()


def finished(ends: Ends, api_server: int = 0) -> list[Finished]:
    outputs = [one for one in ends.heard[api_server] if isinstance(one, TurnOutputs)]
    return [end for message in outputs for end in message.finished]


def ended(ends: Ends, api_server: int = 0) -> list[tuple[str, str]]:
    return [(end.id, end.reason) for end in finished(ends, api_server)]


# --- what is said to whom ---------------------------------------------------------------


def test_who_joins_hears_how_far_the_engine_is() -> None:
    ends = Ends()
    ends.link()
    ends.host.report("loading weights", 3, 9)
    ends.carry()
    assert ends.remotes[0].unready == "loading weights (3 of 9)"
    ends.open()
    ends.carry()
    assert not ends.remotes[0].unready
    assert ends.remotes[0].ready == READY


def test_admissions_are_reported_before_the_step() -> None:
    ends = linked()
    ends.remotes[0].submit([request("a")])
    ends.engine.admit("a")
    ends.carry()
    ends.cut()
    ends.link()
    (record,) = ends.remotes[0]._requests.all()
    assert record.histories[0].deaths == 1  # the engine had it, and gave it nothing


def test_all_fronts_hear_how_the_engine_is() -> None:
    ends = linked(2)
    ends.engine.state = evolve(IDLE, running=5)
    ends.host.tick()
    ends.carry()
    assert [remote.snapshot().running for remote in ends.remotes] == [5, 5]


def test_an_engine_that_breaks_is_reported() -> None:
    ends = linked()
    ends.engine.say(EngineDied(("a",), "a kernel failed"))
    assert ends.why == ["a kernel failed"]


# --- links that come and go -------------------------------------------------------------


def test_requests_of_a_front_are_cancelled_when_it_goes() -> None:
    ends = linked(2)
    ends.remotes[0].submit([request("a"), request("b")])
    ends.remotes[1].submit([request("c")])
    ends.host.leave(ends.sessions[0])
    assert ends.engine.cancelled == ["a", "b"]
    ends.engine.end("a", "cancelled")  # it is not reported
    ends.engine.end("b", "cancelled")
    ends.remotes[1].cancel(["c"])
    ends.engine.end("c", "cancelled")
    nothing_left(ends)


def test_links_that_come_and_go_leave_nothing_behind() -> None:
    ends = linked()
    for number in range(50):
        ends.remotes[0].submit([request(str(number))])
        ends.cut()
        ends.link()
        ends.remotes[0].cancel(list(ends.remotes[0].live))
        for name in list(ends.engine.served):
            ends.engine.end(name, "cancelled")
        ends.carry()
    nothing_left(ends)
    assert len(ends.host._sessions) == 1
    remote = ends.remotes[0]
    assert not remote.live


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], wire.SubmitRequests((request(),))),
        ([], wire.CancelRequests(("a",))),
        ([], wire.ApiServerTotals(Totals({}, {}))),
        ([hello()], hello()),
        ([], hello(1)),
        ([], hello(-1)),
        ([hello()], wire.SubmitRequests((request("a"), request("a")))),
        (
            [hello(), wire.SubmitRequests((request("a"),))],
            wire.SubmitRequests((request("a"),)),
        ),
        ([], hello(0, 1, *[wire.Resumed(request("a"), 0, 0)] * 2)),
    ],
)
def test_what_no_front_would_say_is_an_error_of_its_link(
    first: list[wire.ToEngine], second: wire.ToEngine
) -> None:
    ends = Ends()
    ends.open()
    session, _ = joined(ends)
    for message in first:
        ends.host.receive(session, message)
    with pytest.raises(wire.LinkError):
        ends.host.receive(session, second)
    ends.host.leave(session)
    for name in list(ends.engine.served):
        ends.engine.end(name, "cancelled")
    nothing_left(ends)


def test_a_connection_without_a_hello_harms_no_other() -> None:
    ends = linked()
    session, emitted = joined(ends)
    ends.remotes[0].submit([request("a")])
    ends.engine.give(a=1)
    ends.host.tick()
    assert [type(wire.read_to_api_server(message)) for message in emitted] == [
        wire.EngineReady,
        wire.EngineStatus,
    ]
    ends.host.leave(session)
    assert not ends.engine.cancelled


# --- ids that are used twice ------------------------------------------------------------


def test_an_id_that_another_front_uses_is_refused_to_the_second() -> None:
    ends = linked(2)
    ends.remotes[0].submit([request("a")])
    ends.remotes[1].submit([request("a"), request("b")])
    ends.carry()
    assert ended(ends, 1) == [("a", "rejected")]
    assert ends.engine.requested == [("a",), ("b",)]
    ends.engine.end("a")
    ends.carry()
    assert ended(ends, 0) == [("a", "length")]


def test_an_id_that_the_engine_still_has_is_refused_without_harm_to_others() -> None:
    ends = linked()
    ends.engine.busy = frozenset({"a"})
    ends.remotes[0].submit([request("a"), request("b")])
    ends.carry()
    assert ended(ends) == [("a", "rejected")]
    assert ends.engine.requested == [("b",)]
    ends.engine.end("b")
    nothing_left(ends)


def test_a_dead_engine_gets_no_messages_and_its_requests_wait() -> None:
    ends = linked()
    ends.engine.dead = ValueError()
    ends.remotes[0].submit([request("a")])
    ends.carry()
    assert not ends.heard[0]


def test_no_request_waits_for_the_grammars_of_others() -> None:
    ends = linked()
    constraint = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    bound = [evolve(request(name), sampling=constraint) for name in "bd"]
    ends.remotes[0].submit([request("a"), bound[0], request("c"), bound[1]])
    assert ends.engine.requested == [("a", "c"), ("b",), ("d",)]


def test_a_front_ends_only_its_own() -> None:
    ends = linked(2)
    ends.remotes[0].submit([request("a")])
    ends.host.receive(ends.sessions[1], wire.EndSamples((Finish("a", 0, 1),)))
    ends.host.receive(ends.sessions[1], wire.CancelRequests(("a",)))
    assert not ends.engine.ends
    assert not ends.engine.cancelled
    ends.remotes[0].finish([Finish("a", 0, 1)])
    assert ends.engine.ends == [Finish("a", 0, 1)]


def test_keys_of_other_servers_are_computed_again_and_those_of_its_own_are_not() -> None:
    prompt, size = tuple(range(10)), 4
    keys = block_keys(b"root", prompt, size)
    tails = tail_keys(b"root", keys, prompt, size)
    wrong = (b"x" * DIGEST,) * 2
    continuation = Continuation(tail_keys=wrong)
    asked = evolve(
        request(),
        prompt=prompt,
        max_tokens=1,
        root=b"root",
        keys=wrong,
        continuation=continuation,
    )
    cases = {None: (keys, tails), 1: (wrong, wrong)}
    for api_servers, right in cases.items():
        engine = MadeUp()
        host = EngineServer(api_servers, print, block_size=size)
        host.open(engine, READY)
        engine.now = API_SERVER_RETURN_SECONDS
        session = Session(lambda _: None)
        host.join(session)
        host.receive(session, hello(0, 1, wire.Resumed(evolve(asked, id="a"), 0)))
        host.receive(session, wire.SubmitRequests((evolve(asked, id="b"),)))
        for name in "ab":
            assert (
                engine.served[name].keys,
                engine.served[name].continuation.tail_keys,
            ) == right
        plain = evolve(request("c"), prompt=prompt)
        host.receive(session, wire.SubmitRequests((plain,)))
        assert engine.served["c"].keys == ()


# --- quarantine -------------------------------------------------------------------------


def suspects(*names: str) -> tuple[wire.Resumed, ...]:
    return tuple(wire.Resumed(request(name), 2) for name in names)


def alone(emitted: list[bytes]) -> list[tuple[str, bool]]:
    messages = map(wire.read_to_api_server, emitted)
    probes = [message for message in messages if isinstance(message, wire.ProbingRequest)]
    return [(message.id, message.alone) for message in probes]


def evolve_hello(
    message: wire.ApiServerHello, *crashing: CrashingRequest
) -> wire.ApiServerHello:
    return msgspec.structs.replace(message, crashing=crashing)


def probing(emitted: list[bytes]) -> list[str]:
    return [name for name, _ in alone(emitted)]


def test_suspects_run_isolated_and_all_fronts_know() -> None:
    ends = Ends(2)
    ends.open()
    (first, emitted), (second, other_emitted) = joined(ends), joined(ends)
    ends.host.receive(first, hello(0, 1, *suspects("a", "b")))
    assert not ends.engine.requested  # the other API server may have suspects, too
    ends.host.receive(second, hello(1, 1, wire.Resumed(request("c"), 1)))
    ends.host.receive(second, wire.SubmitRequests((request("d"),)))
    assert ends.engine.requested == [("a",)]
    ends.engine.end("a")
    assert ends.engine.requested == [("a",), ("b",)]
    for _ in range(CLEARING_TOKENS):  # it has some tokens, of which an engine may yet die
        ends.engine.give(b=7)
    assert ends.engine.requested == [("a",), ("b",)]
    ends.engine.give(b=7)  # it is cleared, and runs on
    assert ends.engine.requested == [("a",), ("b",), ("c", "d")]
    assert probing(emitted) == probing(other_emitted) == ["a", "b", ""]


def test_a_suspect_runs_once_all_others_have_left_the_engine() -> None:
    ends = linked(2)
    ends.remotes[1].submit([request("c")])
    session, emitted = joined(ends)
    ends.host.receive(session, hello(0, 1, *suspects("a")))
    assert ends.engine.requested == [("c",)]
    assert alone(emitted) == [("a", False)]  # should the engine die, it may be c's fault
    ends.carry()
    assert ends.engine.cancelled == ["c"]
    assert list(ends.remotes[1]._requests.unplaced) == ["c"], "there is no other engine"
    ends.remotes[1].submit([request("d")])
    ends.engine.end("c", "cancelled")
    assert ends.engine.requested == [("c",), ("a",)]
    assert alone(emitted) == [("a", False), ("a", True)]
    ends.engine.end("a")
    ends.carry()
    assert ends.engine.requested[2:] == [("d",), ("c#1",)]
    assert alone(emitted)[2:] == [("", True)]


def test_a_front_that_comes_back_learns_that_an_engine_serves_one_alone() -> None:
    ends = linked(2)
    session, _ = joined(ends)
    ends.host.receive(session, hello(0, 1, *suspects("a")))
    ends.cut(1)
    ends.link(1)
    ends.carry()
    ends.remotes[1].submit([request("b")])
    assert list(ends.remotes[1]._requests.unplaced) == ["b"]
    assert ends.engine.requested == [("a",)]


def test_what_an_engine_died_of_is_refused_by_all_fronts_and_engines() -> None:
    """A digest of prompt and parameters, for one client."""
    ends = linked(2)
    first, second = ends.remotes
    bad = evolve(request("a"), client="x")
    crashing = CrashingRequest("x", request_digest(bad), 3)
    first.submit([evolve(bad, id="like it", seed=7), evolve(bad, id="b", client="y")])
    session, emitted = joined(ends)
    ends.host.receive(session, evolve_hello(hello(0, 1), crashing))
    ends.carry()
    for remote in ends.remotes:
        with pytest.raises(CrashingRequestError, match="refused for 10 minutes"):
            remote.check(evolve(bad, id="c", seed=1))
        remote.check(evolve(bad, id="c", client="y"))
        remote.check(evolve(bad, id="c", max_tokens=7))
    assert ends.engine.cancelled == ["like it"]
    assert ended(ends) == [("like it", "error")]
    # An API server that has not heard of it yet sends it all the same.
    ends.host.receive(session, wire.SubmitRequests((evolve(bad, id="d"),)))
    messages = map(wire.read_to_api_server, emitted)
    outputs = [
        message for message in messages if isinstance(message, wire.ApiServerOutputs)
    ]
    (end,) = [end for message in outputs for end in message.finished]
    assert (end.id, end.reason, end.error.startswith(REFUSED)) == ("d", "error", True)
    # An engine or an API server that starts again learns it from the others.
    ends.host = EngineServer(2, ends.why.append)
    for number in range(2):
        ends.remotes[number].disconnect()
    ends.link(1)
    ends.carry()
    second = ends.remotes[0] = RemoteEngine(0, clock=ends.engine.clock)
    ends.link(0)
    ends.carry()
    with pytest.raises(CrashingRequestError):
        second.check(bad)


def test_requests_of_a_client_whose_requests_ended_many_engines_run_alone() -> None:
    ends = linked(2)
    digests = [request_digest(request("a", n=n)) for n in (1, 2)]
    ends.remotes[0]._deny([CrashingRequest("x", digest, 3) for digest in digests])
    ends.remotes[1].submit([request("b")])
    ends.remotes[0].submit([evolve(request("a", seed=1, n=3), client="x")])
    ends.remotes[0].submit([evolve(request("c", n=3), client="x")])
    ends.carry()
    ends.engine.end("b", "cancelled")
    assert ends.engine.requested == [("b",), ("a#1",)]
    for _ in range(3 * CLEARING_TOKENS):
        ends.engine.give(**{"a#1": 7})
    assert ends.engine.requested == [("b",), ("a#1",)]
    ends.engine.end("a#1")
    ends.carry()
    assert ends.engine.requested[2:] == [("b#1",)]
    ends.engine.now = 0.9
    ends.host.tick()
    ends.engine.now = 1.1
    ends.host.tick()
    ends.carry()
    ends.engine.end("b#1", "cancelled")
    assert ends.engine.requested[3:] == [("c#2",)]
    ends.engine.now = 12.0
    ends.host.tick()
    ends.carry()
    assert ends.engine.requested[4:] == [("b#2",)], "it had its time alone"


def test_a_front_that_does_not_come_is_not_waited_for_for_ever() -> None:
    ends = Ends(2)
    ends.open()
    session, _ = joined(ends)
    ends.host.receive(session, hello(0, 1, *suspects("a")))
    ends.host.tick()
    assert not ends.engine.requested
    ends.engine.now = API_SERVER_RETURN_SECONDS
    ends.host.tick()
    assert ends.engine.requested == [("a",)]


@pytest.mark.parametrize("action", ["cancel", "leave"])
def test_who_is_held_and_not_wanted_any_more(action: str) -> None:
    ends = Ends(2)
    ends.open()
    (first, emitted), (second, _) = joined(ends), joined(ends)
    ends.host.receive(second, hello(1, 1, *suspects("a")))
    ends.host.receive(first, hello(0, 1, *suspects("b"), wire.Resumed(request("c"), 0)))
    if action == "cancel":
        ends.host.receive(first, wire.CancelRequests(("b", "c")))
        messages = map(wire.read_to_api_server, emitted)
        closed = [
            d
            for message in messages
            if isinstance(message, wire.ApiServerOutputs)
            for d in message.finished
        ]
        assert [(d.id, d.reason, d.length) for d in closed] == [
            ("b", "cancelled", 0),
            ("c", "cancelled", 0),
        ]
    else:
        ends.host.leave(first)
    ends.engine.end("a")
    assert ends.engine.requested == [("a",)]
    assert not ends.engine.cancelled
    nothing_left(ends)


@pytest.mark.parametrize("action", ["cancel", "leave"])
def test_others_go_on_when_the_suspect_that_runs_is_not_wanted_any_more(
    action: str,
) -> None:
    ends = Ends(2)
    ends.open()
    (first, _), (second, emitted) = joined(ends), joined(ends)
    ends.host.receive(first, hello(0, 1, *suspects("a")))
    ends.host.receive(second, hello(1, 1))
    ends.host.receive(second, wire.SubmitRequests((request("c"),)))
    if action == "cancel":
        ends.host.receive(first, wire.CancelRequests(("a",)))
        ends.engine.end("a", "cancelled")
    else:
        ends.host.leave(first)
    assert ends.engine.cancelled == ["a"]
    assert ends.engine.requested == [("a",), ("c",)]
    assert probing(emitted) == ["a", ""]


def test_a_suspect_that_is_refused_blocks_none() -> None:
    ends = linked()
    ends.engine.busy = frozenset({"a"})
    session, _ = joined(ends)
    ends.host.receive(session, hello(0, 2, *suspects("a")))
    ends.remotes[0].submit([request("b")])
    assert ends.engine.requested == [("b",)]


# --- what is counted --------------------------------------------------------------------


def counts(ends: Ends) -> Any:
    ends.host.tick()
    ends.carry()
    return dict(ends.remotes[-1].snapshot().api_servers.counts)


def test_what_fronts_count_is_one_sum_and_nothing_counts_twice() -> None:
    ends = linked(2)
    for remote, count in zip(ends.remotes, (1.0, 10.0), strict=True):
        remote.count(Totals({"x": count}, {}))
    assert counts(ends) == {"x": 11}
    ends.cut(0)
    assert counts(ends) == {"x": 11}
    ends.link(0)  # the same API server, over another link
    ends.remotes[0].count(Totals({"x": 2.0}, {}))
    assert counts(ends) == {"x": 12}


def test_a_front_that_was_started_again_counts_anew() -> None:
    ends = linked()
    ends.remotes[0].count(Totals({"x": 5.0}, {}))
    ends.cut()
    ends.remotes[0].life += 1
    ends.link()
    ends.remotes[0].count(Totals({"x": 1.0}, {}))
    assert counts(ends) == {"x": 6}


# --- while an engine is loaded, and while API servers drain -----------------------------


def test_a_front_that_is_started_again_while_the_engine_loads() -> None:
    ends = Ends()
    ends.link()
    ends.remotes[0].submit([request("a")])
    ends.host.leave(ends.sessions[0])  # its process died, and all that it asked for
    session, emitted = joined(ends)
    ends.host.receive(session, hello(0, 2))
    ends.host.receive(session, wire.SubmitRequests((request("b"),)))
    ends.open()
    assert ends.engine.requested == [("b",)]
    assert list(ends.engine.live) == ["b"], "it is in the registry of the client"
    assert wire.read_to_api_server(emitted[-1]) == READY
    ends.engine.end("b")
    nothing_left(ends)


def test_what_is_cancelled_while_the_engine_loads_ends_at_once() -> None:
    ends = Ends()
    ends.link()
    ends.remotes[0].submit([request("a")])
    ends.remotes[0].cancel(["a"])
    ends.carry()
    assert ended(ends) == [("a", "cancelled")]
    ends.open()
    assert not ends.engine.requested
    nothing_left(ends)


def test_fronts_that_drain_get_what_suspects_hold_back() -> None:
    ends = linked()
    (remote,) = ends.remotes
    remote.submit([request("a"), request("b")])
    for _ in range(2):  # two engines die that gave them nothing
        ends.engine.admit(
            *[name for name in names_of(remote) if name in ends.engine.served]
        )
        ends.carry()
        ends.cut()
        ends.engine.served.clear()
        ends.link()
    ends.carry()
    assert not remote.drain(0)
    for _ in range(2):
        (name,) = ends.engine.served  # each alone
        ends.engine.end(name)
        ends.carry()
    assert remote.drain(0)
    assert sorted(ended(ends)) == [("a", "length"), ("b", "length")]


@pytest.mark.parametrize(
    ("device", "stalled", "well"),
    [
        ("cuda", 0.0, True),
        ("cuda", 5.0, False),
        ("cpu", 5.0, True),  # a long prompt of a large model
        ("cpu", 2000.0, False),
    ],
)
def test_an_engine_whose_steps_do_not_end_does_not_say_that_it_is_well(
    device: str, stalled: float, *, well: bool
) -> None:
    beats: list[bool] = []
    host = EngineServer(1, lambda _: None, lambda: beats.append(True))
    host.open(
        MadeUp(state=evolve(IDLE, stalled=stalled)), wire.EngineReady(device, 9, b"print")
    )
    host.tick()
    assert beats == [True] * well, "whether an API server is there or not"


def test_an_engine_that_loads_is_well_while_it_gets_on() -> None:
    beats: list[float] = []
    moments = [0.0]
    host = EngineServer(1, print, lambda: beats.append(moments[-1]), lambda: moments[-1])
    for moment in (0.1, LOADING_STAGE_SECONDS - 1):
        moments.append(moment)
        host.tick()
    host.report("weights", 1, 2)
    for moment in (LOADING_STAGE_SECONDS + 1, 3 * LOADING_STAGE_SECONDS):
        moments.append(moment)
        host.tick()
    assert beats == [0.1, LOADING_STAGE_SECONDS - 1, LOADING_STAGE_SECONDS + 1]
