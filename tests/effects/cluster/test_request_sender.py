"""What an API server sends to an engine of its requests."""

from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashingRequest
from minfer.effects.cluster.link.crash_rule import MAX_CLIENT_DEATHS
from tests.effects.cluster.ends import READY, request


def test_a_full_queue_refuses_what_no_engine_had_also_of_an_isolated_client() -> None:
    remote, sent = RemoteEngine(), list[wire.ToEngine]()
    remote.submit([request("waits")])
    remote.connect(sent.append)
    remote.receive(READY)
    crashing = CrashingRequest("isolated", b"another one", MAX_CLIENT_DEATHS + 1)
    remote.receive(wire.NewCrashingRequests((crashing,)))
    remote.submit([request("alone", client="isolated")])
    hello, isolated = sent
    assert isinstance(hello, wire.ApiServerHello)
    assert isinstance(isolated, wire.ResumeRequests)
    assert [entry.isolated for entry in isolated.resumed] == [True]
    assert not any(entry.request.taken for entry in (*hello.resumed, *isolated.resumed))
    remote.disconnect()
    remote.connect(sent.append)
    second_hello = sent[-1]
    assert isinstance(second_hello, wire.ApiServerHello)
    assert [entry.request.taken for entry in second_hello.resumed] == [True, True]
