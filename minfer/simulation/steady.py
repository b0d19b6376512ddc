"""Steady decode, advanced by many turns as one step.

Theory. In a steady decode nothing is decided: each running sequence yields one token, the
next plan has the same rows one position further, and no reason is given. Until the next
event, and until a sequence fills a block, needs a block or ends, a turn changes the time,
the positions, the tokens and the plans in flight, all by sums that are known in advance.
So the state after N such turns is computed without `engine.step`. It is the state that
`step` computes, field by field, and the turns are the same: `SteadyTurns.turns` calls
`step` for a reader who wants to see each.

Every condition is tested that could make a turn differ: if one does not hold, or the
policy has a token budget of its own to be asked for, the turn is taken by `step`.
"""

from collections.abc import Iterator
from operator import add, sub
from typing import Final

from attrs import frozen

from minfer.engine import step
from minfer.planning.build_plan import ones
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Tick
from minfer.records.plan import Plan, Yields
from minfer.records.policy import FirstCome
from minfer.records.sequence import Running
from minfer.records.state import EngineState, Turn
from minfer.values import thresholds
from minfer.values.record import evolve

# Fewer steady turns than these are taken one by one.
MIN_TURNS: Final = 2


@frozen
class SteadyTurns:
    """Consecutive turns of a steady decode."""

    number: int  # of the first turn
    before: EngineState
    after: EngineState
    times: tuple[float, ...]  # of the turns, seconds
    yields: Yields  # of each step: one token per row

    def turns(self, config: EngineConfig) -> Iterator[Turn]:
        """Each of the turns, as `step` takes it."""
        state = self.before
        for number, time in enumerate(self.times, self.number):
            executed = Executed(state.inflight[0].step, self.yields)
            events = (Tick(time), executed)
            transition = step(config, state, events)
            yield Turn(number, state, events, transition)
            state = transition.state


def count_steady_turns(config: EngineConfig, state: EngineState) -> int:
    """The number of turns for which the state alone lets a decode be steady, if nothing
    comes but the results of its steps.
    """
    run = state.running
    if not len(run) or not _is_steady(config, state):
        return 0
    if not all(_is_decode_of(run, plan) for plan in state.inflight):
        return 0
    until_publish = min(map(sub, run.publish_at, run.known)) - 1
    until_growth = min(map(sub, run.grow_at, run.scheduled))
    return int(max(0, min(until_publish, until_growth)))


def _is_steady(config: EngineConfig, state: EngineState) -> bool:
    """Whether nothing but the running sequences needs a decision."""
    tiers = state.tiers
    return not (
        state.waiting
        or state.fences
        or state.faults
        or state.paused
        or state.filling
        or state.needs_host_mask
        or len(state.inflight) != config.depth
        or config.speculation is not None
        or config.state_group
        or tiers.host_queue
        or tiers.external_queue
        or state.blocks.prefix.unstored
        or not _has_usual_budget(config.policy)
    )


def _has_usual_budget(policy: object) -> bool:
    """Whether the policy leaves the token budget of steps, which is asked for in every
    turn, to the engine.
    """
    method = getattr(policy, "budget", None)
    return getattr(method, "__func__", None) is FirstCome.budget


def _is_decode_of(run: Running, plan: Plan) -> bool:
    """Whether a plan in flight is one token of each running sequence, and no more."""
    is_plain = not (plan.fills or plan.drafts or plan.deferred or plan.saves)
    return is_plain and plan.run_ids == run.run_ids


def advanced(
    state: EngineState, num_turns: int, yields: Yields, time: float
) -> EngineState:
    """The state after steady turns, the last of which is at `time`."""
    run, num_rows = state.running, len(state.running)
    first_step = state.inflight[0].step
    column = ones(num_rows)
    num_kept = max(0, len(state.inflight) - num_turns)  # plans that stay in flight
    num_planned = len(state.inflight) - num_kept
    plans = [
        Plan(
            step=state.next_step + turn,
            run_ids=run.run_ids,
            rows=run.rows,
            starts=tuple([start + turn for start in run.scheduled]),
            num_scheduled_tokens=column,
            max_sampled_tokens=column,
        )
        for turn in range(num_turns - num_planned, num_turns)
    ]
    kept = state.inflight[num_turns:] if num_kept else ()
    return evolve(
        state,
        time=time,
        running=_advanced_rows(run, num_turns, yields, first_step),
        inflight=(*kept, *plans),
        next_step=state.next_step + num_turns,
    )


def _advanced_rows(
    run: Running, num_turns: int, yields: Yields, first_step: int
) -> Running:
    """The columns after steps from `first_step` on, one for each turn."""
    tails, num_fresh = run.tails, num_turns
    fresh = run.fresh
    # The last step after which fresh tokens have joined the tails.
    last_join = (first_step + num_turns - 1) // thresholds.FRESH_STEPS
    last_join *= thresholds.FRESH_STEPS
    if last_join >= first_step:
        older = [tokens * (last_join - first_step) for tokens in yields]
        tails = tuple(map(add, map(add, tails, fresh), older))
        num_fresh = first_step + num_turns - last_join
        fresh = ((),) * len(run)
    newer = [tokens * num_fresh for tokens in yields]
    return evolve(
        run,
        known=tuple([known + num_turns for known in run.known]),
        scheduled=tuple([scheduled + num_turns for scheduled in run.scheduled]),
        tails=tails,
        fresh=tuple(map(add, fresh, newer)),
    )
