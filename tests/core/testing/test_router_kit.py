"""The router's kit on trial: what it must pass, and that it finds policies and routers
that are wrong.
"""

from collections.abc import Callable
from typing import Any, Final

import pytest
from attrs import define, evolve, field, frozen
from hypothesis import Phase

from minfer.routing import accounts, key_index, router
from minfer.routing.messages import ReplicaChoice, ReplicaJoined, RoutingRequest
from minfer.routing.policies import (
    ROUTING_POLICIES,
    LeastLoaded,
    Prefix,
    routing_policy_named,
)
from minfer.routing.policy import Candidate, Candidates, RoutingPolicy
from minfer.routing.state import RouterState
from minfer.testing import RouterError, check_router, router_kit
from minfer.testing.router_trial import RouterTrial
from minfer.values.pmap import Map
from tests.circles import long

# --- policies that are wrong ------------------------------------------------------------

CANDIDATES: Final = router._candidates
REQUEST: Final = RoutingRequest("r", (), 5)


def named(candidates: Candidates, at: int) -> ReplicaChoice:
    return ReplicaChoice(candidates[at % len(candidates)].replica.name, "why")


@frozen
class Simple(RoutingPolicy):
    """Answers by the candidates alone."""

    says: Callable[[Candidates], Any]

    def choose(self, state: Any, _: Any, candidates: Any) -> Any:
        return self.says(candidates), state


class Divides(RoutingPolicy):
    def choose(self, state: Any, request: Any, candidates: Any) -> Any:
        return named(candidates, 60 // len(request.keys)), state


class Pairless(RoutingPolicy):
    def choose(self, _: Any, __: Any, candidates: Any) -> Any:
        return named(candidates, 0)


class TwoOfThree(RoutingPolicy):
    """Sends two of three requests to the first replica."""

    def start(self) -> int:
        return 0

    def choose(self, state: Any, _: Any, candidates: Any) -> Any:
        return named(candidates, state % 3 % 2), state + 1


@define
class KeepsCounts(RoutingPolicy):
    count: int = field(default=0)

    def choose(self, state: Any, _: Any, candidates: Any) -> Any:
        self.count += 1
        return named(candidates, self.count), state


class CountsInPlace(RoutingPolicy):
    def start(self) -> Any:
        return [0]

    def choose(self, state: Any, _: Any, candidates: Any) -> Any:
        state[0] += 1
        return named(candidates, state[0]), state


WRONG: Final[dict[str, tuple[str, Any]]] = {
    "keeps counts": ("hidden state", KeepsCounts()),
    "counts in place": ("purity", CountsInPlace()),
    "raises": ("never raises", Divides()),
    "who may be gone": ("policy", Simple(lambda _: ReplicaChoice("a", "why"))),
    "no pair": ("policy", Pairless()),
    "always the first": ("bounded load", Simple(lambda every: named(every, 0))),
    "most hits": (
        "bounded load",
        Simple(lambda every: ReplicaChoice(max(every, key=_hit).replica.name, "hit")),
    ),
    "defers all": ("policy", Simple(lambda _: None)),
}


def _hit(one: Candidate) -> int:
    return one.hit


@pytest.mark.parametrize("name", WRONG)
def test_wrong_policies_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_kit, "PHASES", (Phase.generate,))
    law, policy = WRONG[name]
    with pytest.raises(RouterError) as caught:
        check_router(policy, seed=1)
    assert caught.value.law == law
    assert caught.value.method == "choose"
    start = f"{law}: {caught.value.detail}\n  method at fault: choose\n  under "
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("name", long(ROUTING_POLICIES))
def test_the_policies_that_come_with_minfer_keep_all_laws(name: str) -> None:
    check_router(routing_policy_named(name), seed=1)


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_they_keep_all_laws_in_a_few_stories(name: str) -> None:
    check_router(routing_policy_named(name), seed=2, max_examples=12)


def test_a_policy_that_shares_unequally_needs_a_wider_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_kit, "PHASES", (Phase.generate,))
    check_router(TwoOfThree(), seed=1, max_examples=10, spread=4.0)
    with pytest.raises(RouterError, match="bounded load"):
        check_router(TwoOfThree(), seed=1, max_examples=40, spread=1.2)


@pytest.mark.parametrize("what", [Prefix, 5])
def test_what_is_no_policy_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="check_router takes a routing policy"):
        check_router(what)


# --- routers that are wrong -------------------------------------------------------------


def _nothing(first: Any, *_: Any) -> Any:
    """A function that returns its first argument as it is."""
    return first


def _but_last(index: Any, slot: int, keys: Any) -> Any:
    return key_index.publish(index, slot, keys[:-1])


def _forgets_slot(index: Any, slot: int) -> Any:
    return evolve(index, used=index.used & ~slot)  # another replica gets it at once


def _loses_a_token(one: Any, _: Any) -> Any:
    return evolve(one, waiting_tokens=one.waiting_tokens - 1)


def _every_replica(config: Any, state: RouterState, request: Any) -> Any:
    every = {name: evolve(one, draining=False) for name, one in state.replicas.items()}
    return CANDIDATES(config, evolve(state, replicas=Map(every)), request)


def _to_the_first(state: RouterState, request: Any, _: str, prefill: int) -> Any:
    return accounts.dispatch(state, request, state.names[0], prefill)


def _one_more(index: Any, keys: Any) -> dict[int, int]:
    return {slot: hit + 1 for slot, hit in key_index.prefix_hits(index, keys).items()}


# where, which function, what is there instead, and the law that it breaks
PLANTED: Final[dict[str, tuple[Any, str, Any, str]]] = {
    "evicts nothing": (router, "evict", _nothing, "index"),
    "publishes all but the last": (router, "publish", _but_last, "index"),
    "keys outlive their replica": (router, "remove_slot", _forgets_slot, "index"),
    "nothing starts": (router, "start", _nothing, "accounts"),
    "waiting tokens are lost": (accounts, "_finish_prefill", _loses_a_token, "accounts"),
    "no request is lost": (router, "drop_requests", _nothing, "accounts"),
    "reports are not heard": (router, "report", _nothing, "accounts"),
    "who drains is asked": (router, "_candidates", _every_replica, "eligible"),
    "dispatched elsewhere": (router, "dispatch", _to_the_first, "accounts"),
    "hits are too long": (router, "prefix_hits", _one_more, "reason"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_routers_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_kit, "PHASES", (Phase.generate,))
    module, function, instead, law = PLANTED[name]
    monkeypatch.setattr(module, function, instead)
    with pytest.raises(RouterError) as caught:
        check_router(LeastLoaded(), seed=1)
    assert caught.value.law == law


def test_a_deferral_is_of_a_tenant_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_waiting_tokens", lambda *_: 1)
    trial = RouterTrial(Simple(lambda _: None))
    trial.tell(ReplicaJoined("a"))
    with pytest.raises(RouterError) as caught:
        trial.route(REQUEST)
    assert caught.value.law == "deferred"
    assert "ReplicaJoined" in str(caught.value)


def test_a_decision_that_is_taken_otherwise_again_is_found() -> None:
    asked = 0

    class Forgets(RoutingPolicy):
        """Answers four questions the same way: each decision is asked for twice."""

        def choose(self, state: Any, _: Any, candidates: Any) -> Any:
            nonlocal asked
            asked += 1
            return named(candidates, (asked - 1) // 2), state

    trial = RouterTrial(Forgets())
    trial.tell(ReplicaJoined("a"))
    trial.tell(ReplicaJoined("b"))
    with pytest.raises(RouterError) as caught:
        trial.route(REQUEST)
    assert caught.value.law == "determinism"


def test_a_story_that_fails_is_shrunk() -> None:
    with pytest.raises(RouterError) as caught:
        check_router(Simple(lambda _: None), seed=1, max_examples=10)
    assert len(caught.value.story) < 8
