"""Steady decode, advanced by many turns as one step.

Theory. In a steady decode nothing is decided: each running sequence yields one token, the
next plan has the same rows one position further, and no reason is given. Until the next
event, and until a sequence ends, a turn changes the time, the positions, the tokens and
the plans in flight, all by sums that are known in advance. So the state after N such
turns is computed without `engine.step`:

    quiet turns       `advanced`, by these sums
    a turn of blocks  `turn_of_blocks`, by the functions that `step` calls for that: some
                      sequences fill a block, which is published and stored in tiers, or
                      need the next one, or a transfer has ended

The state is the one that `step` computes, field by field, and the turns are the same:
`SteadyTurns.turns` calls `step` for a reader who wants to see each. Every condition that
could make a turn differ is tested: if one does not hold, or the policy has a token budget
of its own, `step` takes the turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import add, ge, sub

from attrs import Factory, field, frozen

from minfer.engine import step
from minfer.lifecycle.publish import publish_blocks
from minfer.lifecycle.seat import growth_lead
from minfer.planning.build_plan import ones
from minfer.planning.grow import grow
from minfer.planning.spread import deferrable_blocks
from minfer.records.config import EngineConfig
from minfer.records.messages import Command, Executed, Lost, Moved, Tick
from minfer.records.plan import Grow, Plan, Yields
from minfer.records.policy import FirstCome
from minfer.records.sequence import Running
from minfer.records.state import EngineState, Turn
from minfer.tiers.finish import finish_transfer
from minfer.tiers.store import store_blocks
from minfer.values import thresholds
from minfer.values.record import evolve

TransferEnd = Moved | Lost


@frozen
class SteadyTurns:
    """Consecutive turns of a steady decode."""

    number: int  # of the first turn
    before: EngineState
    after: EngineState
    yields: Yields  # of each step: one token per row
    times: tuple[float, ...] = ()  # of the turns, seconds
    # the transfers that ended, by the index of the turn
    ended: Mapping[int, tuple[TransferEnd, ...]] = field(factory=dict)
    # the fewest pages that could be allocated after any of the turns
    min_available: int = field(
        default=Factory(lambda self: self.before.blocks.available, takes_self=True)
    )

    def extended(
        self,
        after: EngineState,
        times: Sequence[float],
        ended: tuple[TransferEnd, ...] = (),
    ) -> "SteadyTurns":
        """With further turns, in the first of which transfers have `ended`."""
        return SteadyTurns(
            self.number,
            self.before,
            after,
            self.yields,
            (*self.times, *times),
            {**self.ended, len(self.times): ended} if ended else self.ended,
            min(self.min_available, after.blocks.available),
        )

    def turns(self, config: EngineConfig) -> Iterator[Turn]:
        """Each of the turns, as `step` takes it."""
        state = self.before
        for index, time in enumerate(self.times):
            executed = Executed(state.inflight[0].step, self.yields)
            events = (Tick(time), executed, *self.ended.get(index, ()))
            transition = step(config, state, events)
            yield Turn(self.number + index, state, events, transition)
            state = transition.state


@frozen
class BlockTurn:
    """A steady turn that changes blocks."""

    after: EngineState
    commands: tuple[Command, ...]  # transfers that begin


def is_steady(config: EngineConfig, state: EngineState) -> bool:
    """Whether decode is steady: if nothing comes but the results of a step, the next turn
    needs no decision, unless a sequence fills its block, needs the next one or ends.
    After that turn decode is steady, too, unless tiers have no room for blocks that were
    published.
    """
    run = state.running
    if not len(run) or not _has_usual_budget(config.policy):
        return False
    return _decodes_alone(config, state) and all(
        _is_decode_of(run, plan) for plan in state.inflight
    )


def _decodes_alone(config: EngineConfig, state: EngineState) -> bool:
    """Whether the engine has nothing to do but decode."""
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
    )


def _has_usual_budget(policy: object) -> bool:
    """Whether the policy leaves the token budget of steps to the engine. A budget of its
    own would have to be asked for in every turn.
    """
    method = getattr(policy, "budget", None)
    return getattr(method, "__func__", None) is FirstCome.budget


def _is_decode_of(run: Running, plan: Plan) -> bool:
    """Whether a plan in flight is one token of each running sequence, and no more."""
    is_plain = not (plan.fills or plan.drafts or plan.deferred or plan.saves)
    return is_plain and plan.run_ids == run.run_ids


def count_quiet_turns(config: EngineConfig, state: EngineState) -> int:
    """The number of steady turns before one in which a sequence fills its block, needs
    the next one, or ends.
    """
    run, lead = state.running, growth_lead(config)
    until_publish = min(map(sub, run.publish_at, run.known)) - 1
    # A table that reaches to the last token does not grow any more.
    marks = [
        grow_at if grow_at + lead < last else last
        for grow_at, last in zip(run.grow_at, run.last_index, strict=True)
    ]
    return int(max(0, min(until_publish, min(map(sub, marks, run.scheduled)))))


def advanced(
    config: EngineConfig,
    state: EngineState,
    num_turns: int,
    yields: Yields,
    time: float,
) -> EngineState:
    """The state after quiet turns, the last of which is at `time`."""
    return _planned(config, _committed(state, num_turns, yields, time), num_turns)


def turn_of_blocks(
    config: EngineConfig,
    state: EngineState,
    yields: Yields,
    time: float,
    ended: Sequence[TransferEnd],
) -> BlockTurn | None:
    """A steady turn in which these transfers have ended, blocks are published and stored
    in tiers, and tables grow; None if more than that happens, such as the end of a
    sequence.
    """
    run = state.running
    rows = range(len(run))
    ripe = [i for i in rows if run.known[i] + 1 >= run.publish_at[i]]
    growing = tuple(compress(rows, map(ge, run.scheduled, run.grow_at)))
    if (
        any(run.known[i] >= run.last_index[i] for i in ripe)
        or any(run.scheduled[i] >= run.last_index[i] for i in growing)
        or any(group.window for group in config.groups)
    ):
        return None
    after = _committed(state, 1, yields, time)
    published = ripe[: deferrable_blocks(config, len(run))]
    upto = {i: (after.running.known[i] - 1) // config.block_size for i in published}
    after = publish_blocks(config, after, upto)
    for event in ended:
        transition = finish_transfer(config, after, event)
        after = transition.state
        if transition.reasons:
            return None
    commands: tuple[Command, ...] = ()
    if config.has_tiers:
        stored = store_blocks(config, after)
        after, commands = stored.state, stored.commands
    skipped = set[int]()
    after, grown, reasons = grow(config, after, growing, skipped)
    if reasons or skipped:
        return None
    return BlockTurn(_planned(config, after, 1, tuple(grown.values())), commands)


def _committed(
    state: EngineState, num_turns: int, yields: Yields, time: float
) -> EngineState:
    """The state with the results of one step for each turn committed."""
    run, first_step = state.running, state.inflight[0].step
    tails, fresh, num_fresh = run.tails, run.fresh, num_turns
    # The last step after which fresh tokens have joined the tails.
    last_step = first_step + num_turns - 1
    last_join = last_step // thresholds.FRESH_STEPS * thresholds.FRESH_STEPS
    if last_join >= first_step:
        older = [tokens * (last_join - first_step) for tokens in yields]
        tails = tuple(map(add, map(add, tails, fresh), older))
        fresh, num_fresh = ((),) * len(run), last_step + 1 - last_join
    newer = [tokens * num_fresh for tokens in yields]
    run = evolve(
        run,
        known=tuple([known + num_turns for known in run.known]),
        tails=tails,
        fresh=tuple(map(add, fresh, newer)),
    )
    return evolve(state, time=time, running=run, inflight=state.inflight[num_turns:])


def _planned(
    config: EngineConfig,
    state: EngineState,
    num_turns: int,
    grows: tuple[Grow, ...] = (),
) -> EngineState:
    """The state after the plans of the turns, each with `grows`; the last ones are in
    flight.
    """
    run, column = state.running, ones(len(state.running))
    num_planned = config.depth - len(state.inflight)
    plans = [
        Plan(
            step=state.next_step + turn,
            run_ids=run.run_ids,
            rows=run.rows,
            starts=tuple([start + turn for start in run.scheduled]),
            num_scheduled_tokens=column,
            max_sampled_tokens=column,
            grows=grows,
        )
        for turn in range(num_turns - num_planned, num_turns)
    ]
    scheduled = tuple([start + num_turns for start in run.scheduled])
    return evolve(
        state,
        running=evolve(run, scheduled=scheduled),
        inflight=(*state.inflight, *plans),
        next_step=state.next_step + num_turns,
    )
