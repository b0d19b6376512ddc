"""Which values the router's messages refuse, when they are made."""

from typing import Any

import pytest

from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    Dispatched,
    LoadReport,
    ReplicaJoined,
    RequestEnded,
    RequestStarted,
    RoutingRequest,
)
from minfer.values.checks import ParameterError

REQUEST = RoutingRequest("r", (b"k",), 70, "t", "s", 9)


@pytest.mark.parametrize(
    ("kind", "values", "param"),
    [
        (RoutingRequest, (1, (), 0), "id"),
        (RoutingRequest, ("r", [b"k"], 0), "keys"),
        (RoutingRequest, ("r", ("k",), 0), "keys"),
        (RoutingRequest, ("r", (), -1), "tokens"),
        (RoutingRequest, ("r", (), 1.5), "tokens"),
        (RoutingRequest, ("r", (), 0, None), "tenant"),
        (RoutingRequest, ("r", (), 0, "", None), "session"),
        (RoutingRequest, ("r", (), 0, "", "", -1), "output"),
        (RoutingRequest, ("r", (), 0, "", "", 0.5), "output"),
        (RoutingRequest, ("r", (), 0, "", "", None, ["a"]), "allowed"),
        (RoutingRequest, ("r", (), 0, "", "", None, (1,)), "allowed"),
        (ReplicaJoined, (b"a",), "replica"),
        (BlocksPublished, ("a", "k"), "keys"),
        (BlocksPublished, (0, (b"k",)), "replica"),
        (BlocksEvicted, ("a", (b"k", 1)), "keys"),
        (BlocksEvicted, (0, ()), "replica"),
        (LoadReport, (0, 0, 0, 0), "replica"),
        (LoadReport, ("a", -1, 0, 0), "waiting"),
        (LoadReport, ("a", 0, -1, 0), "running"),
        (LoadReport, ("a", 0, 0, 0, 0, ["a1"]), "adapters"),
        (LoadReport, ("a", 0, 0, 0, 0, (1,)), "adapters"),
        (LoadReport, ("a", 0, 0, -1), "prefill"),
        (LoadReport, ("a", 0, 0, 0.5), "prefill"),
        (LoadReport, ("a", 0, 0, 0, -1), "pages"),
        (LoadReport, ("a", 0, 0, 0, 0.5), "pages"),
        (Dispatched, ("a", "r"), "request"),
        (Dispatched, (0, REQUEST), "replica"),
        (RequestStarted, (0,), "id"),
        (RequestEnded, (None,), "id"),
    ],
)
def test_wrong_values_are_refused_by_name(kind: Any, values: Any, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        kind(*values)
    assert caught.value.param == param


def test_least_values_are_taken() -> None:
    assert RoutingRequest("", (), 0, "", "", 0).output == 0
    assert LoadReport("", 0, 0, 0, 0).pages == 0
    assert Dispatched("a", REQUEST).request is REQUEST
