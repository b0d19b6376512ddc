"""Policies that never end, allocate without bound, print or keep state outside of the
engine's are bounded by the kit, and named.
"""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request
from minfer.routing.policy import RoutingPolicy
from minfer.testing import (
    PolicyError,
    RouterError,
    bounded,
    call_limits,
    check_policy,
    check_router,
)

SEEN = list[str]()


class NeverEnds(FirstCome):
    def budget(self, state: Any, load: Load) -> int:
        while True:
            pass


class CountsInC(FirstCome):
    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        return 1

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Any:
        return sum(range(10**15))


class Allocates(FirstCome):
    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(len(bytearray(2**40))),), state


class Exits(FirstCome):
    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Any:
        os._exit(3)


class Prints(FirstCome):
    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        print("ranks", request.id)
        return (time,), state


class KeepsInModule(FirstCome):
    """A count that is used alone where it leads to an error."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        SEEN.append(request.id)
        return (time,), state

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Any:
        SEEN.remove(request.id)
        return state


class SetsSelf(FirstCome):
    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        self.last = request.id
        return (time,), state


def found(policy: Any, **options: Any) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        check_policy(policy, seed=1, max_examples=4, **options)
    return caught.value


@pytest.mark.parametrize(
    ("policy", "law", "method", "text"),
    [
        (NeverEnds, "never ends", "budget", "budget took more than 0.2 s"),
        (
            CountsInC,
            "never ends",
            "admitted",
            "admitted did not return within 1 s",
        ),
        (Allocates, "memory", "rank", "rank ran out of the memory"),
        (Exits, "never raises", "ended", "the policy's process ended in ended"),
        (Prints, "prints", "rank", "rank printed 'ranks g0.0"),
        (KeepsInModule, "hidden state", "rank", "rank changes the module's SEEN"),
        (SetsSelf, "hidden state", "rank", "rank sets self"),
    ],
)
@pytest.mark.long
def test_what_is_not_bounded_is_bounded_and_named(
    policy: Callable[[], Any],
    law: str,
    method: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_limits, "CALL_SECONDS", 0.2)
    if policy is CountsInC:  # the others' calls return, however busy the machine is
        monkeypatch.setattr(bounded, "MAX_CALL_SECONDS", 1.0)
    error = found(policy())
    assert (error.law, error.method) == (law, method)
    assert text in str(error)


@pytest.mark.long
def test_a_check_has_a_time() -> None:
    error = found(FirstCome(), seconds=0.1)
    assert error.law == "never ends"
    assert "`seconds` allows more" in error.detail


class NeverChooses(RoutingPolicy):
    def choose(self, state: Any, request: Any, candidates: Any) -> Any:
        while True:
            pass


@pytest.mark.long
def test_a_routing_policy_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "CALL_SECONDS", 0.05)
    with pytest.raises(RouterError, match="choose took more than") as caught:
        check_router(NeverChooses(), seed=1, max_examples=1)
    assert (caught.value.law, caught.value.method) == ("never ends", "choose")


class Startless:
    choose = NeverChooses.choose


def test_a_routing_policy_without_start_is_told_what_to_write() -> None:
    with pytest.raises(TypeError, match="Startless has no method start"):
        check_router(Startless())


@pytest.mark.long
def test_a_policy_that_cannot_be_imported_is_not_tested_with_other_hashes() -> None:
    class Local(FirstCome):
        pass

    with pytest.warns(UserWarning, match="Local: it was not tested in a second process"):
        check_policy(Local(), max_examples=1, seed=1)


@pytest.mark.long
def test_stdout_and_stderr_are_the_callers_afterwards() -> None:
    streams = sys.stdout, sys.stderr
    check_policy(FirstCome(), max_examples=1, seed=1)
    assert streams == (sys.stdout, sys.stderr)
