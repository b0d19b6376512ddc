"""What the policy says, as far as it can be used.

A policy is somebody else's code. It may raise, or answer with what is no answer (NaN, None, a rank
that cannot be ordered), and the engine must go on: then the answer is that of first come, first
served, and a reason says which question was overruled and why. The reasons of a turn are collected
in its state and leave with the transition.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from minfer.config import EngineConfig
from minfer.messages import Overruled
from minfer.policy import Load, Rank
from minfer.record import evolve
from minfer.request import Request
from minfer.state import EngineState

_WIDEST: Final = 2**63  # whole numbers that journals and drivers can hold


def _number_flaw(answer: Any) -> str:
    """What keeps an answer from being a point on a line, or nothing; infinities are points."""
    if isinstance(answer, float):
        return "returned NaN" if math.isnan(answer) else ""
    if not isinstance(answer, int):
        return f"returned a {type(answer).__name__}"
    return "" if -_WIDEST <= answer < _WIDEST else "returned a number too large to hold"


def _rank_flaw(answer: Any) -> str:
    if not isinstance(answer, tuple):
        return f"returned a {type(answer).__name__}"
    return next(filter(None, map(_number_flaw, answer)), "")


def _placing_flaw(answer: Any) -> str:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return "returned no pair of rank and state"
    return _rank_flaw(answer[0])


def _flag_flaw(answer: Any) -> str:
    return "" if isinstance(answer, bool) else f"returned a {type(answer).__name__}"


def _count_flaw(answer: Any) -> str:
    return _number_flaw(answer) if type(answer) is int else f"returned a {type(answer).__name__}"


def _any_state(_: Any) -> str:
    return ""  # a policy's state is its own business


def _asked(
    config: EngineConfig,
    state: EngineState,
    question: str,
    *about: Any,
    flaw: Callable[[Any], str],
    instead: Any,
) -> tuple[Any, EngineState]:
    """The policy's answer, or `instead` of one that has a flaw."""
    try:
        answer = getattr(config.policy, question)(state.policy, *about)
        wrong = flaw(answer)
    except Exception as error:  # whatever it is, it is the policy's and not the engine's
        answer, wrong = None, f"raised {type(error).__name__}"
    if not wrong:
        return answer, state
    overruled = (*state.overruled, Overruled(question, wrong))
    return instead, evolve(state, overruled=overruled)


def _with_policy(state: EngineState, policy: Any) -> EngineState:
    return state if policy is state.policy else evolve(state, policy=policy)


def rank(config: EngineConfig, state: EngineState, request: Request) -> tuple[Rank, EngineState]:
    """The rank of a new request. First come: behind all who are here."""
    last: Rank = ()
    if state.waiting:
        last = state.waiting.last().place[0]
    if len(state.running):
        last = max(last, state.running.seqs[-1].place[0])
    instead = last, state.policy
    (found, policy), state = _asked(
        config, state, "rank", request, state.time, flaw=_placing_flaw, instead=instead
    )
    return tuple(found), _with_policy(state, policy)


def again(
    config: EngineConfig, state: EngineState, old: Rank, request: Request, arrived: float, done: int
) -> tuple[Rank, EngineState]:
    """The rank of a sequence that was preempted: never behind its `old` one, which is the default.

    `arrived` is a time in seconds, `done` counts its output tokens.
    """
    found, state = _asked(
        config, state, "again", old, request, arrived, done, flaw=_rank_flaw, instead=old
    )
    return min(old, tuple(found)), state


def admit_from(config: EngineConfig, state: EngineState, load: Load) -> tuple[float, EngineState]:
    """The time in seconds from which the first in line may start. First come: now."""
    found, state = _asked(config, state, "admit_from", load, flaw=_number_flaw, instead=load.time)
    return found, state


def admitted(
    config: EngineConfig, state: EngineState, place: Rank, request: Request, load: Load
) -> EngineState:
    """Tell the policy that a sample starts for the first time."""
    policy, state = _asked(
        config, state, "admitted", place, request, load, flaw=_any_state, instead=state.policy
    )
    return _with_policy(state, policy)


def ended(
    config: EngineConfig, state: EngineState, request: Request, output: int, *, ran: bool
) -> EngineState:
    """Tell the policy that a sample has ended after `output` tokens."""
    policy, state = _asked(
        config, state, "ended", request, output, ran, flaw=_any_state, instead=state.policy
    )
    return _with_policy(state, policy)


def victim(config: EngineConfig, state: EngineState) -> tuple[int, EngineState]:
    """Who of the running, at least two, gives its blocks back. First come: the last."""
    ranks = tuple(seq.place[0] for seq in state.running.seqs)

    def flaw(answer: Any) -> str:
        return _count_flaw(answer) or ("" if 0 < answer < len(ranks) else "chose nobody who may")

    found, state = _asked(config, state, "victim", ranks, flaw=flaw, instead=len(ranks) - 1)
    return found, state


def displaces(config: EngineConfig, state: EngineState) -> tuple[bool, EngineState]:
    """Whether the first in line may take the place of the last that runs. First come: no.

    Never of one that is ahead of it, whatever the policy says, or two could displace each other for
    ever.
    """
    waiting, running = state.waiting.first().place, state.running.seqs[-1].place
    if waiting > running:
        return False, state
    found, state = _asked(
        config, state, "displaces", waiting[0], running[0], flaw=_flag_flaw, instead=False
    )
    return found, state


def budget(config: EngineConfig, state: EngineState, load: Load) -> tuple[int, EngineState]:
    """The tokens of a step, within the engine's limit. First come: the limit.

    While nothing runs it is at least one: nothing else would ever happen.
    """
    found, state = _asked(config, state, "budget", load, flaw=_count_flaw, instead=load.budget)
    least = 0 if len(state.running) else 1
    return max(least, min(found, config.max_num_batched_tokens)), state
