"""A policy that is watched: each answer is checked as the protocol requires.

Each method is called a second time, with copies of its arguments, and must answer the
same, change no argument, and call neither a clock nor random numbers.
"""

from collections.abc import Callable
from copy import copy, deepcopy
from math import isnan
from typing import Any, Final

from attrs import define, field
from attrs.exceptions import FrozenInstanceError

from minfer.policies.mistakes import error_text, raising_line
from minfer.records.policy import Load, Policy
from minfer.records.request import Request
from minfer.testing.call_limits import CallTooLongError, limits
from minfer.testing.outside_calls import (
    ADDRESS,
    CLOCK,
    RANDOMNESS,
    OutsideCalls,
    outside_calls,
)
from minfer.testing.policy_error import Flaw
from minfer.testing.policy_proxy import PolicyProxy

_MAX_ARGS: Final = 300  # characters of arguments and answers in a report


def _is_rank(rank: Any) -> bool:
    return isinstance(rank, tuple) and all(
        isinstance(n, int | float) and not isnan(n) for n in rank
    )


# Whether an answer (second argument) to these arguments (first) is as the protocol says.
_IS_VALID: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "rank": lambda _, answer: (
        isinstance(answer, tuple) and len(answer) == 2 and _is_rank(answer[0])
    ),
    "requeue_rank": lambda args, answer: _is_rank(answer) and answer <= args[1],
    "admit_from": lambda _, answer: _is_rank((answer,)),
    "victim": lambda args, answer: type(answer) is int and 0 < answer < len(args[1]),
    "may_preempt": lambda _, answer: isinstance(answer, bool),
    "defer": lambda _, answer: (
        isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool)
    ),
    "budget": lambda _, answer: type(answer) is int and answer >= 0,
    "drafts": lambda _, answer: type(answer) is int and answer >= 0,
    "adapter_passes": lambda _, answer: type(answer) is int and answer >= 0,
}


@define
class Call:
    """A call of a method: its arguments and its answer."""

    method: str
    args: tuple[Any, ...]
    answer: Any


@define
class WatchedPolicy(PolicyProxy):
    """A policy with checked answers; `flaws` are the laws that it broke."""

    flaws: list[Flaw] = field(factory=list)
    raised: Exception | None = None  # the policy's first error
    # Of the current turn: answers of `budget`, and clients that `defer` deferred.
    budgets: list[int] = field(factory=list)
    deferred: set[str] = field(factory=set)
    calls: list[Call] | None = None  # all calls, if they are recorded
    twice: bool = True  # whether answers are checked by a second call

    def begin_turn(self) -> None:
        """Forget the answers of the turn before."""
        self.budgets.clear()
        self.deferred.clear()

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        """The policy's answer, checked."""
        ask = None
        try:
            ask = getattr(self.policy, name)
            with limits.call(name):
                if not self.twice:
                    return ask(*args)
                twin = _copies(args)
                answer = ask(*args)
                answered, unchanged = deepcopy(answer), args == twin
                with outside_calls() as outside:
                    repeated = ask(*twin)
        except CallTooLongError as error:
            self.flaws.append(Flaw("never ends", f"{name} {error}", name))
            raise RuntimeError(f"{name} {error}") from None
        except Exception as error:
            self.flaws.append(_raised_flaw(name, args, error, ask))
            self.raised = self.raised or error
            raise  # the engine goes on without an answer: the trial raises later
        if self.calls is not None:
            self.calls.append(Call(name, args, answer))
        if name == "budget":
            self.budgets.append(answer)
        if name == "defer" and _IS_VALID[name](args, answer) and answer[0]:
            self.deferred.add(args[1].client)
        if outside.calls:
            self.flaws += _called_flaws(name, outside)
        is_valid = _IS_VALID.get(name, lambda *_: True)(args, answer)
        is_pure = unchanged and answer == answered == repeated
        if is_valid and is_pure:
            return answer
        report = f"{name}{args!r:.{_MAX_ARGS}} is {answered!r:.{_MAX_ARGS}}"
        if not is_valid:
            protocol = getattr(Policy, name).__doc__
            self.flaws.append(Flaw(name, f"{report}; the protocol: {protocol}", name))
        if not is_pure:
            difference = _difference(repeated, outside, unchanged=unchanged)
            self.flaws.append(Flaw("purity", f"{report}, {difference}", name))
        return answer


def _difference(repeated: Any, outside: OutsideCalls, *, unchanged: bool) -> str:
    """How two answers for equal arguments differ."""
    if not unchanged:
        return "and its arguments changed: a state is an immutable value"
    again = f"then {repeated!r:.{_MAX_ARGS}} for equal arguments"
    called = outside.first(ADDRESS)
    return f"{again}; it calls {called}" if called else again


def _called_flaws(name: str, outside: OutsideCalls) -> list[Flaw]:
    advice = {
        CLOCK: "the time is in its arguments, and in load.time",
        RANDOMNESS: "an answer is a function of the arguments alone",
    }
    return [
        Flaw(kind, f"{name} calls {called}; {advice[kind]}", name)
        for kind in (CLOCK, RANDOMNESS)
        if (called := outside.first(kind))
    ]


def _raised_flaw(name: str, args: tuple[Any, ...], error: Exception, method: Any) -> Flaw:
    """The flaw of a method that raised."""
    line = raising_line(error, method)
    if isinstance(error, FrozenInstanceError):
        return Flaw(
            "hidden state", f"{name} sets self: {error_text(error)} ({line})", name
        )
    if isinstance(error, MemoryError):
        return Flaw("memory", f"{name} ran out of the memory that it may have", name)
    detail = f"{name}{args!r:.{_MAX_ARGS}} raised {error!r} ({line})"
    return Flaw("never raises", detail, name)


def _copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Equal arguments that are other objects."""
    return tuple(
        copy(arg) if isinstance(arg, Request | Load) else deepcopy(arg) for arg in args
    )
