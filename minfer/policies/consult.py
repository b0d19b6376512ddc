"""Calls of the policy, with checked answers.

A policy is third-party code. It may raise, or return what is not usable (NaN, None, a
rank that cannot be ordered), and the engine must go on: then the answer of first come,
first served is used, and a reason reports which answer was overridden and why. The
reasons of a turn are collected in its state and leave with the transition.
"""

import math
from collections.abc import Callable
from typing import Any

from minfer.policies.mistakes import error_text, raising_line
from minfer.records.config import EngineConfig
from minfer.records.messages import PolicyOverride, clip
from minfer.records.policy import ADAPTER_PASSES, Load, Policy, Rank
from minfer.records.request import Request
from minfer.records.sequence import Place
from minfer.records.state import EngineState
from minfer.values.checks import MAX_INT64, MIN_INT64
from minfer.values.record import evolve


class _UnusableError(Exception):
    """An answer is not usable; the message explains why."""


def _number(answer: Any) -> float:
    """A float or integer that is not NaN, as a plain number; infinities are allowed."""
    if isinstance(answer, float):
        if math.isnan(answer):
            raise _UnusableError("returned NaN")
        return float(answer)
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise _UnusableError(f"returned a {type(answer).__name__}")
    if not MIN_INT64 <= answer <= MAX_INT64:
        raise _UnusableError("returned a number too large to hold")
    return int(answer)


def _rank(answer: Any) -> Rank:
    """A plain tuple of plain numbers: comparing other types could run any code."""
    if not isinstance(answer, tuple):
        raise _UnusableError(f"returned a {type(answer).__name__}")
    return tuple([_number(number) for number in answer])


def _rank_and_state(answer: Any) -> tuple[Rank, Any]:
    if type(answer) is not tuple or len(answer) != 2:
        raise _UnusableError("returned no pair of rank and state")
    return _rank(answer[0]), answer[1]


def _flag(answer: Any) -> bool:
    if type(answer) is not bool:
        raise _UnusableError(f"returned a {type(answer).__name__}")
    return answer


def _flag_and_state(answer: Any) -> tuple[bool, Any]:
    if type(answer) is not tuple or len(answer) != 2:
        raise _UnusableError("returned no pair of yes or no and state")
    return _flag(answer[0]), answer[1]


def _count(answer: Any) -> int:
    if type(answer) is not int:
        raise _UnusableError(f"returned a {type(answer).__name__}")
    return int(_number(answer))


def _unchecked(answer: Any) -> Any:
    return answer  # the engine does not look into a policy's state


def _call_policy(
    config: EngineConfig,
    state: EngineState,
    method: str,
    *args: Any,
    read: Callable[[Any], Any],
    default: Any,
) -> tuple[Any, EngineState]:
    """The policy's answer as `read` gives it, or `default` if it cannot be used."""
    ask = None
    try:
        ask = getattr(config.policy, method)
        return read(ask(state.policy, *args)), state
    except _UnusableError as error:
        override = PolicyOverride(method, str(error))
    except Exception as error:  # any error is the policy's and not the engine's
        outcome = f"raised {type(error).__name__}"
        line = raising_line(error, ask)
        override = PolicyOverride(method, outcome, _text(error), line)
    return default, evolve(state, overrides=(*state.overrides, override))


def _text(error: Exception) -> str:
    """The text of an error; nothing if its `str` raises."""
    try:
        return clip(error_text(error))
    except Exception:  # str() of a third-party error may do anything
        return ""


def _with_policy(state: EngineState, policy: Any) -> EngineState:
    return state if policy is state.policy else evolve(state, policy=policy)


def last_rank(state: EngineState) -> Rank:
    """The last rank among all that wait or run."""
    last: Rank = state.waiting.last().place[0] if state.waiting else ()
    return max(last, state.running.seqs[-1].place[0]) if len(state.running) else last


def rank(
    config: EngineConfig, state: EngineState, request: Request, last: Rank
) -> tuple[Rank, EngineState]:
    """The rank of a new request. First come: `last`, behind all others."""
    default = last, state.policy
    (answer, policy), state = _call_policy(
        config, state, "rank", request, state.time, read=_rank_and_state, default=default
    )
    return answer, _with_policy(state, policy)


def requeue_rank(
    config: EngineConfig,
    state: EngineState,
    old: Rank,
    request: Request,
    arrived: float,
    num_output: int,
) -> tuple[Rank, EngineState]:
    """The rank of a preempted sequence: never behind its `old` one, which is the default.

    `arrived` is a time in seconds, `num_output` counts its output tokens.
    """
    answer, state = _call_policy(
        config,
        state,
        "requeue_rank",
        old,
        request,
        arrived,
        num_output,
        read=_rank,
        default=old,
    )
    return min(old, answer), state


def admit_from(
    config: EngineConfig, state: EngineState, load: Load
) -> tuple[float, EngineState]:
    """The time in seconds from which the head of the queue may start. First come: now."""
    answer, state = _call_policy(
        config, state, "admit_from", load, read=_number, default=load.time
    )
    return answer, state


def may_defer(config: EngineConfig) -> bool:
    """Whether the policy overrides `defer`, so that it can defer clients."""
    return getattr(type(config.policy), "defer", None) is not Policy.defer


def defer(
    config: EngineConfig,
    state: EngineState,
    request: Request,
    load: Load,
    num_admitted: int,
) -> tuple[bool, EngineState]:
    """Whether the client of `request` is deferred. First come: no."""
    default = False, state.policy
    (answer, policy), state = _call_policy(
        config,
        state,
        "defer",
        request,
        load,
        num_admitted,
        read=_flag_and_state,
        default=default,
    )
    return answer, _with_policy(state, policy)


def admitted(
    config: EngineConfig, state: EngineState, place: Rank, request: Request, load: Load
) -> EngineState:
    """Notify the policy that a sample starts for the first time."""
    policy, state = _call_policy(
        config,
        state,
        "admitted",
        place,
        request,
        load,
        read=_unchecked,
        default=state.policy,
    )
    return _with_policy(state, policy)


def ended(
    config: EngineConfig, state: EngineState, request: Request, output: int, *, ran: bool
) -> EngineState:
    """Notify the policy that a sample has ended after `output` tokens."""
    policy, state = _call_policy(
        config,
        state,
        "ended",
        request,
        output,
        ran,
        read=_unchecked,
        default=state.policy,
    )
    return _with_policy(state, policy)


def victim(config: EngineConfig, state: EngineState) -> tuple[int, EngineState]:
    """The victim among the running sequences, at least two. First come: the last."""
    ranks = tuple(seq.place[0] for seq in state.running.seqs)

    def seat(answer: Any) -> int:
        if not 0 < _count(answer) < len(ranks):
            # recorded in journals: other words would be another decision
            raise _UnusableError("chose nobody who may")
        return int(answer)

    index, state = _call_policy(
        config, state, "victim", ranks, read=seat, default=len(ranks) - 1
    )
    return index, state


def may_preempt(
    config: EngineConfig, state: EngineState, first: Place
) -> tuple[bool, EngineState]:
    """Whether the head of the queue may preempt the last running sequence. First come:
    no.

    Never one that is ahead of it, whatever the policy answers, or two could preempt each
    other forever.
    """
    running = state.running.seqs[-1].place
    if first > running:
        return False, state
    answer, state = _call_policy(
        config, state, "may_preempt", first[0], running[0], read=_flag, default=False
    )
    return answer, state


def budget(
    config: EngineConfig, state: EngineState, load: Load
) -> tuple[int, EngineState]:
    """The tokens of a step, within the engine's limit. First come: as many as the target
    for the time between tokens allows, or the limit without a target.

    While nothing runs it is at least one, or the engine would never progress.
    """
    answer, state = _call_policy(
        config, state, "budget", load, read=_count, default=load.budget
    )
    min_tokens = 0 if len(state.running) else 1
    return max(min_tokens, min(answer, config.max_num_batched_tokens)), state


def has_default_budget(config: EngineConfig) -> bool:
    """Whether the policy leaves the token budget of steps to the engine."""
    method = getattr(config.policy, "budget", None)
    return getattr(method, "__func__", None) is Policy.budget


def drafts(
    config: EngineConfig, state: EngineState, load: Load, limit: int
) -> tuple[int, EngineState]:
    """How many drafts a row may have in a step. First come: `limit`."""
    answer, state = _call_policy(
        config, state, "drafts", load, limit, read=_count, default=limit
    )
    return max(0, min(answer, limit)), state


def adapter_passes(
    config: EngineConfig, state: EngineState, load: Load
) -> tuple[int, EngineState]:
    """How many samples with one adapter may pass the first sample that waits for a slot,
    in one stay on the device. First come: ADAPTER_PASSES.
    """
    return _call_policy(
        config, state, "adapter_passes", load, read=_count, default=ADAPTER_PASSES
    )
