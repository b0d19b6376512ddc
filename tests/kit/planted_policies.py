"""Policies with one fault each, of the kinds that authors of policies do not notice, and
policies without one. `bench.policy_faults` counts how often the kit finds them.
"""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

import random
import time as clock
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from attrs import frozen

from minfer.planning.schedule import queue_blocked_by
from minfer.policies.builtin import Ageing
from minfer.policies.fair_queue import FairQueue
from minfer.records.messages import Execute
from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request
from minfer.records.state import head_of_queue, pages_coming
from minfer.testing.trial import Law, Trial
from minfer.values.pmap import Map
from tests.kit.example_sound import TwoClasses

_SERVED: Final = Counter[str]()  # the fault of HiddenCount


class Starves(FirstCome):
    """Short requests first, however long the others have waited."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(len(request.prompt) + request.max_tokens), time), state


class NoVictim(FirstCome):
    """Preempts the request with the lowest rank number: the first, which may not be."""

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        return ranks.index(min(ranks))


class Thrashes(FirstCome):
    """Who was preempted pays for what it had: it goes behind all others."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (time,), state

    def requeue_rank(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        return (rank[0] + 0.5 * done,)


class Random(FirstCome):
    """A lottery between requests of one second."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(int(time)), random.random()), state


class HiddenCount(FirstCome):
    """Round robin between clients, by counts of the module."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(_SERVED[request.client] // 2), time), state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Any:
        _SERVED[request.client] += 1
        return state


class ReadsClock(FirstCome):
    """Urgent for the first half of each minute of the day."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(int(clock.time() // 3600)), time), state


class SetOrder(FirstCome):
    """A new client goes behind the first of the clients that are there."""

    def start(self) -> Map[str, int]:
        return Map()

    def rank(
        self, state: Map[str, int], request: Request, time: float
    ) -> tuple[Rank, Map[str, int]]:
        state = state.set(request.client, state.get(request.client, 0) + request.n)
        turn = list(set(state)).index(request.client)
        return (time // 100, float(turn), time), state

    def ended(
        self, state: Map[str, int], request: Request, output: int, ran: bool
    ) -> Map[str, int]:
        left = state[request.client] - 1
        return state.set(request.client, left) if left else state.delete(request.client)


class RareInput(FirstCome):
    """A table of classes of length that ends at 30,000 tokens."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        classes = (0, 0, 1, 1, 2, 2)
        return (time // 60, float(classes[len(request.prompt) // 5_000]), time), state


class RareLoad(FirstCome):
    """A smaller budget for a longer queue, of which none is left at 300."""

    def budget(self, state: Any, load: Load) -> int:
        return max(1, load.budget // max(1, 3 - load.waiting // 100)) // (
            1 if load.waiting < 300 else 0
        )


class Grows(FirstCome):
    """Remembers when each request came, and forgets those alone that ran."""

    def start(self) -> Map[str, float]:
        return Map()

    def rank(
        self, state: Map[str, float], request: Request, time: float
    ) -> tuple[Rank, Map[str, float]]:
        return (time,), state.set(request.id, time)

    def ended(
        self, state: Map[str, float], request: Request, output: int, ran: bool
    ) -> Map[str, float]:
        return state.delete(request.id) if output > 2 and request.id in state else state


@frozen
class StatedBudget(FirstCome):
    """No step takes more than `most` tokens, it says; but the first two steps' rest is
    kept for later.
    """

    most: int = 12

    def budget(self, state: Any, load: Load) -> int:
        return min(load.budget, self.most + (load.waiting > 2) * self.most)


class UrgentPreempts(FirstCome):
    """An urgent request preempts, it says; but not one of the class next to its own."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(request.priority),), state

    def may_preempt(self, state: Any, waiting: Rank, running: Rank) -> bool:
        return waiting[0] + 1 < running[0]


def stated_budget(trial: Trial) -> None:
    """No step takes more tokens than the policy states."""
    policy: Any = trial.config.policy
    for command in trial.turns[-1].transition.commands:
        if isinstance(command, Execute):
            tokens = sum(command.plan.num_scheduled_tokens)
            assert tokens <= policy.most, f"a step of {tokens} tokens"


def urgent_preempts(trial: Trial) -> None:
    """When a step is planned, the head of the queue does not wait for the row of a
    request that is less urgent; but while blocks are about to be freed, the engine
    preempts none.
    """
    turn = trial.turns[-1]
    state = turn.transition.state
    plans = any(isinstance(command, Execute) for command in turn.transition.commands)
    if not plans or pages_coming(turn.before) or pages_coming(state):
        return
    if state.waiting and queue_blocked_by(trial.config, state) == "rows":
        head, last = head_of_queue(state).request, state.running.seqs[-1].request
        assert head.priority >= last.priority, f"{head.id} waits while {last.id} runs"


@frozen
class Fault:
    """A policy with a fault, the laws that may find it, and the method that has it."""

    policy: Callable[[], Any]
    laws: tuple[str, ...]
    method: str
    promises: tuple[Law, ...] = ()


FAULTS: Final[dict[str, Fault]] = {
    "starvation": Fault(Starves, ("bounded starvation",), "rank"),
    "no victim": Fault(NoVictim, ("victim",), "victim"),
    "thrash by requeue_rank": Fault(Thrashes, ("requeue_rank",), "requeue_rank"),
    "randomness": Fault(Random, ("randomness",), "rank"),
    "hidden count": Fault(HiddenCount, ("hidden state",), "admitted"),
    "clock": Fault(ReadsClock, ("clock",), "rank"),
    "set order": Fault(SetOrder, ("set order",), "rank"),
    "rare input": Fault(RareInput, ("never raises",), "rank"),
    "rare load": Fault(RareLoad, ("never raises",), "budget"),
    "growing state": Fault(Grows, ("state size",), "rank"),
    "stated budget": Fault(StatedBudget, ("stated_budget",), "budget", (stated_budget,)),
    "urgent preempts": Fault(
        UrgentPreempts, ("urgent_preempts",), "may_preempt", (urgent_preempts,)
    ),
}

SOUND: Final[dict[str, Any]] = {
    "first come": FirstCome(),
    "ageing": Ageing(),
    "fair shares of tokens": FairQueue(),
    "two classes": TwoClasses(),
}
