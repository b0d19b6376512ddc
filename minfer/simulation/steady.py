"""Steady decode, advanced by many turns as one step.

Theory. In a steady decode nothing is decided: each running sequence yields one token, the
next plan has the same rows one position further, and no reason is given. Until the next
event, and until a sequence ends, a turn changes the time, the positions, the tokens and
the plans in flight, all by sums that are known in advance. So the state after N such
turns is computed without `engine.step`, by `SteadyWalk`:

    quiet turns   by these sums
    a block turn  by the functions that `step` calls for that: some sequences fill a
                  block, which is published and stored in tiers, or need the next one;
                  or a transfer has ended, or blocks behind a fence are freed
    a last turn   likewise, but all tokens of some sequences are planned already, so the
                  plan leaves these out; no steady turn follows

The state is the one that `step` computes, field by field, and the turns are the same:
`SteadyTurns.turns` calls `step` for a reader who wants to see each. Every condition that
could make a turn differ is tested: if one does not hold, or the policy has a token budget
of its own, `step` takes the turn.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import add, ge, sub

from attrs import Factory, define, field, frozen

from minfer.engine import step
from minfer.lifecycle.publish import publish_blocks
from minfer.lifecycle.retire import free_fenced_blocks
from minfer.lifecycle.seat import growth_lead
from minfer.planning.build_plan import ones
from minfer.planning.grow import grow
from minfer.planning.spread import deferrable_blocks
from minfer.policies.consult import has_default_budget
from minfer.records.config import EngineConfig
from minfer.records.messages import Command, Executed, Lost, Moved, Tick
from minfer.records.plan import Grow, Plan, Yields
from minfer.records.sequence import Running, edited_column, less
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
    min_available: int = 0  # the fewest pages that could be allocated after any of them

    def turns(self, config: EngineConfig) -> Iterator[Turn]:
        """Each of the turns, as `step` takes it."""
        state = self.before
        for index, time in enumerate(self.times):
            executed = Executed(state.inflight[0].step, self.yields)
            events = (Tick(time), executed, *self.ended.get(index, ()))
            transition = step(config, state, events)
            yield Turn(self.number + index, state, events, transition)
            state = transition.state


def is_steady(config: EngineConfig, state: EngineState) -> bool:
    """Whether decode is steady: if nothing comes but the results of a step, the next turn
    needs no decision, unless a sequence fills its block, needs the next one or ends.
    After that turn decode is steady, too, unless tiers have no room for blocks that were
    published.
    """
    run = state.running
    # Another budget would have to be asked for in every turn.
    if not len(run) or not has_default_budget(config):
        return False
    return _decodes_alone(config, state) and all(
        _is_decode_of(run, plan) for plan in state.inflight
    )


def _decodes_alone(config: EngineConfig, state: EngineState) -> bool:
    """Whether the engine has nothing to do but decode."""
    tiers = state.tiers
    return not (
        state.waiting
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


def _is_decode_of(run: Running, plan: Plan) -> bool:
    """Whether a plan in flight is one token of each running sequence, and no more."""
    is_plain = not (plan.fills or plan.drafts or plan.deferred or plan.saves)
    return is_plain and plan.run_ids == run.run_ids


def count_quiet_turns(config: EngineConfig, state: EngineState) -> int:
    """The number of steady turns before one in which a sequence fills its block, needs
    the next one, or ends, or blocks behind a fence are freed.
    """
    run, lead = state.running, growth_lead(config)
    quiet: int = min(map(sub, run.publish_at, run.known)) - 1
    if state.fences:
        first_step = _first_step(config, state)
        quiet = min(quiet, *[fence.until - first_step for fence in state.fences])
    if quiet <= min(map(sub, run.grow_at, run.scheduled)):
        return max(0, quiet)
    # A table that reaches to the last token does not grow any more.
    marks = [
        grow_at if grow_at + lead < last else last
        for grow_at, last in zip(run.grow_at, run.last_index, strict=True)
    ]
    growth: int = min(map(sub, marks, run.scheduled))
    return max(0, min(quiet, growth))


@define
class SteadyWalk:
    """Steady turns, taken one after the other. Never kept, never shared.

    The plans of these turns are made at their end: of those before the last, nothing is
    read. Until then `state` has those that were in flight before.
    """

    config: EngineConfig
    number: int  # of the first turn
    before: EngineState
    yields: Yields
    state: EngineState = Factory(lambda self: self.before, takes_self=True)
    times: list[float] = field(factory=list)
    # as in `SteadyTurns`
    ended: dict[int, tuple[TransferEnd, ...]] = field(factory=dict)
    min_available: int = Factory(
        lambda self: self.before.blocks.available, takes_self=True
    )
    # Positions of sequences that the plan of the last turn leaves out.
    left_out: tuple[int, ...] = ()
    # how tables grow in the plans of the last turns
    _grows: deque[tuple[Grow, ...]] = Factory(
        lambda self: deque(maxlen=self.config.depth), takes_self=True
    )
    _has_windows: bool = Factory(
        lambda self: any(group.window for group in self.config.groups), takes_self=True
    )

    def take_quiet(self, times: Sequence[float]) -> None:
        """Take quiet turns at these times."""
        state, num_turns = self.state, len(times)
        state = _advanced(self.config, state, times, self.yields, num_turns)
        self._append(state, times, ())

    def take_block_turn(
        self, times: Sequence[float], ended: Sequence[TransferEnd]
    ) -> tuple[Command, ...] | None:
        """Take quiet turns and, at the last of these times, one in which these transfers
        have ended, blocks are published, stored in tiers and freed, tables grow, and
        sequences that need no more steps are left out of the plan.

        Returns the transfers that begin; None, and no turn is taken, if more than that
        happens in the last turn, such as the end of a sequence.
        """
        before, config, num_turns = self.state, self.config, len(times)
        run, num_rows = before.running, len(before.running)
        scheduled = _plus(run.scheduled, num_turns - 1)
        left_out = tuple(compress(range(num_rows), map(ge, scheduled, run.last_index)))
        # With one step in flight, those that are left out end in this turn.
        is_end = bool(left_out) and config.depth == 1
        if self._has_windows or is_end or len(left_out) == num_rows:
            return None
        growing = tuple(compress(range(num_rows), map(ge, scheduled, run.grow_at)))
        # `grow` looks at what is scheduled before the plan of the last turn.
        num_planned = num_turns - bool(growing or left_out)
        state = _advanced(config, before, times, self.yields, num_planned)
        state = _with_published_blocks(config, state)
        state = free_fenced_blocks(state, _first_step(config, state) - 1)
        for event in ended:
            transition = finish_transfer(config, state, event)
            state = transition.state
            if transition.reasons:
                return None
        commands: tuple[Command, ...] = ()
        if config.has_tiers:
            stored = store_blocks(config, state)
            state, commands = stored.state, stored.commands
        grows: tuple[Grow, ...] = ()
        if growing or left_out:
            if len(growing) * config.block_pages > state.blocks.available:
                return None
            state, grows = _with_last_plan(config, state, growing, left_out)
        if ended:
            self.ended[len(self.times) + num_turns - 1] = tuple(ended)
        self.left_out = left_out
        self._append(state, times, grows)
        return commands

    def _append(
        self, state: EngineState, times: Sequence[float], grows: tuple[Grow, ...]
    ) -> None:
        """Append turns at these times; `grows` are of the plan of the last one."""
        self.state = state
        self.times += times
        self._grows.extend([()] * min(len(times) - 1, self.config.depth))
        self._grows.append(grows)
        self.min_available = min(self.min_available, state.blocks.available)

    def done(self) -> SteadyTurns:
        """The turns, with the plans that are in flight after them."""
        num_new = len(self._grows)
        new = [
            self._plan(turn, grows)
            for turn, grows in zip(range(-num_new, 0), self._grows, strict=True)
        ]
        inflight = (*self.before.inflight[num_new:], *new)
        after = evolve(self.state, inflight=inflight)
        return SteadyTurns(
            self.number,
            self.before,
            after,
            self.yields,
            tuple(self.times),
            self.ended,
            self.min_available,
        )

    def _plan(self, turn: int, grows: tuple[Grow, ...]) -> Plan:
        """The plan of the last turn (-1), or of one before it (-2 ...)."""
        run, left_out = self.state.running, self.left_out
        # As if the last plan had the sequences that it leaves out.
        scheduled = edited_column(
            run.scheduled, {i: run.scheduled[i] + 1 for i in left_out}
        )
        starts = _plus(scheduled, turn)
        out = [*left_out] if turn == -1 else []
        column = ones(len(run) - len(out))
        return Plan(
            step=self.state.next_step + turn,
            run_ids=less(run.run_ids, out),
            rows=less(run.rows, out),
            starts=less(starts, out),
            num_scheduled_tokens=column,
            max_sampled_tokens=column,
            grows=grows,
        )


def _with_published_blocks(config: EngineConfig, state: EngineState) -> EngineState:
    """The state with the full blocks published that `step` publishes in this turn."""
    run, num_rows = state.running, len(state.running)
    ripe = tuple(compress(range(num_rows), map(ge, run.known, run.publish_at)))
    if not ripe:
        return state
    published = ripe[: deferrable_blocks(config, num_rows)]
    upto = {i: (run.known[i] - 1) // config.block_size for i in published}
    return publish_blocks(config, state, upto)


def _with_last_plan(
    config: EngineConfig,
    state: EngineState,
    growing: tuple[int, ...],
    left_out: tuple[int, ...],
) -> tuple[EngineState, tuple[Grow, ...]]:
    """The state after a plan that leaves out some sequences, and how its tables grow."""
    before = state.running
    skipped = {before.run_ids[i] for i in left_out}
    state, grown, _ = grow(config, state, growing, skipped)
    cells = {i: before.scheduled[i] for i in left_out}
    scheduled = edited_column(_plus(before.scheduled, 1), cells)
    state = evolve(state, running=evolve(state.running, scheduled=scheduled))
    return state, tuple(grown.values())


def _first_step(config: EngineConfig, state: EngineState) -> int:
    """The first step in flight."""
    return state.next_step - config.depth


def _advanced(
    config: EngineConfig,
    state: EngineState,
    times: Sequence[float],
    yields: Yields,
    num_planned: int,
) -> EngineState:
    """The state after turns at these times, without their plans: the results of one step
    are committed in each, and as many steps are planned, of which rows are scheduled for
    the first `num_planned`.
    """
    run, first_step, num_turns = state.running, _first_step(config, state), len(times)
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
        known=_plus(run.known, num_turns),
        scheduled=_plus(run.scheduled, num_planned),
        tails=tails,
        fresh=tuple(map(add, fresh, newer)),
    )
    step_times = state.step_times
    if config.itl_target is not None:
        for time in times:
            step_times = step_times.after(time, len(run), 0)
    return evolve(
        state,
        time=times[-1],
        running=run,
        next_step=state.next_step + num_turns,
        step_times=step_times,
    )


def _plus(column: tuple[int, ...], number: int) -> tuple[int, ...]:
    """A column with a number added to each entry."""
    return tuple([entry + number for entry in column])
