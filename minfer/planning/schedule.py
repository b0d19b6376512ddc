"""The scheduler: builds at most one plan from the state.

A step is planned in this order:

    running rows      find the rows to skip: no token due, no block for it, or waiting
                      for the host; if blocks are short, preempt a sequence (grow.py)
    token budget      one token for each decode row; prefill chunks share what is left
                      of the budget, in rank order; a scored token may take more of it
    admission         admit from the waiting queue into the rows, blocks and tokens that
                      are left (admission.py, admit.py)
    build the plan    rows, inputs, and the changes that the device needs (build_plan.py)

In a steady decode there is nothing to do in the first three, and the plan is the running
columns themselves.
"""

from collections.abc import Iterator
from itertools import compress, repeat
from operator import and_, ge, lt, sub

from minfer.lifecycle.committed import all_committed
from minfer.lifecycle.pausing import paused_rows, suspects
from minfer.lifecycle.seat import table_blocks
from minfer.planning.admission import admit_from_queue
from minfer.planning.admit import release_sources
from minfer.planning.build_plan import build_plan
from minfer.planning.grow import grow, grow_for_prefill
from minfer.planning.plan_drafts import plan_drafts, waits_for_results
from minfer.planning.prefill_budget import step_load
from minfer.planning.saves import copy_start_states
from minfer.planning.states import bound_chunk
from minfer.planning.step_builder import StepBuilder, token_cost
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Command, Execute
from minfer.records.sequence import Running, is_bound, joined
from minfer.records.state import EngineState, Transition, head_of_queue
from minfer.values import thresholds
from minfer.values.record import evolve


def schedule(config: EngineConfig, state: EngineState) -> Transition:
    """Plan one more step, or nothing if no row can run now."""
    if not len(state.running) and not state.waiting:
        return Transition(state)
    isolated = isolated_generation(config, state)
    if isolated is not None and state.inflight:
        return Transition(state)
    if waits_for_results(config, state):
        return Transition(state)
    builder = StepBuilder(config, state)
    _find_skipped_rows(builder, isolated)
    _share_tokens(builder)
    if isolated is None and builder.state.waiting:
        _admit(builder)
    reasons = builder.reasons
    builder.state = release_sources(builder.state, builder.newcomers)
    if len(builder.skipped) == len(builder.state.running):
        beside: tuple[Command, ...] = (*builder.loads, *builder.wakes)
        planned = Transition(builder.state, beside, tuple(reasons))
        newly = (
            isolated is None and isolated_generation(config, builder.state) is not None
        )
        return _schedule_again(config, planned) if newly else planned
    if config.state_group:
        copy_start_states(builder)
    plan_drafts(builder)
    plan = build_plan(builder)
    commands: tuple[Command, ...] = (Execute(plan), *builder.loads, *builder.wakes)
    return Transition(builder.state, commands, tuple(reasons))


def _schedule_again(config: EngineConfig, planned: Transition) -> Transition:
    """Schedule once more: nothing was planned because the suspect that must run alone
    was only just admitted.
    """
    second = schedule(config, planned.state)
    commands = (*planned.commands, *second.commands)
    return Transition(second.state, commands, (*planned.reasons, *second.reasons))


def isolated_generation(config: EngineConfig, state: EngineState) -> int | None:
    """The generation of the suspect that must run alone, if any: one more failure could
    end it, and another sequence must not cause that failure. Paused suspects are left
    out: they take no part in the steps of others.
    """
    run = state.running
    for sample in suspects(config, state):
        if sample in run.ids and sample not in state.paused:
            return run.run_ids[run.ids.index(sample)]
    return None


def queue_blocked_by(config: EngineConfig, state: EngineState) -> str:
    """Why the head of the queue waits, if there is one: the cause of `QueueBlocked`;
    "step": no step was planned since it became the head; "fault": a suspect runs alone,
    to find out which sequence makes steps fail.
    """
    if state.faults and isolated_generation(config, state) is not None:
        return "fault"
    blocked = state.blocked
    if blocked is None or blocked.place != head_of_queue(state).place:
        return "step"
    return blocked.cause


def _find_skipped_rows(builder: StepBuilder, isolated: int | None) -> None:
    """Find the rows that skip this step, and grow the block tables of the others.

    A row skips the step if its last token is planned already; if it may not run ahead and
    waits for a token in flight, or for the host (minfer/lifecycle/pausing.py); or if
    another one (`isolated`) has to run alone.
    """
    run = builder.state.running
    ending = tuple(compress(range(len(run)), map(ge, run.scheduled, run.grow_at)))
    builder.skipped.update(
        run.run_ids[i] for i in ending if run.scheduled[i] >= run.last_index[i]
    )
    if builder.state.needs_host_mask:
        builder.skipped.update(_rows_too_far_ahead(builder))
    if builder.state.paused:
        builder.skipped.update(paused_rows(builder.config, builder.state))
    if isolated is not None:
        builder.skipped.update(run_id for run_id in run.run_ids if run_id != isolated)
    if builder.config.by_chunk and builder.state.filling:
        _bound_prefill(builder)
    builder.state, builder.grown, reasons = grow(
        builder.config, builder.state, ending, builder.skipped
    )
    builder.reasons += reasons


def _rows_too_far_ahead(builder: StepBuilder) -> Iterator[int]:
    """The runs that need a mask from the host and may not run further ahead of their
    known tokens.
    """
    run = builder.state.running
    bound = tuple(map(is_bound, run.seqs))
    if not any(bound):
        builder.state = evolve(builder.state, needs_host_mask=False)
        return iter(())
    max_ahead = int(builder.config.late_masks)  # how many tokens ahead they may be
    ahead = map(sub, run.scheduled, run.known)
    far = map(ge, ahead, repeat(max_ahead))
    return compress(run.run_ids, map(and_, bound, far))


def _bound_prefill(builder: StepBuilder) -> None:
    """Find how many tokens the rows in prefill may take, and skip those that may not take
    any.

    Blocks leave a window only once results are known: without a bound, a row would hold
    the blocks of as many chunks as steps are in flight. A quarter of the budget of a step
    is enough to keep the device busy until the results of a whole one are known.
    """
    config, run = builder.config, builder.state.running
    budget = config.max_num_batched_tokens
    filled = _rows_in_prefill(run)
    committed = all_committed(config, builder.state, filled)
    for i in filled:
        left = committed[i] + budget + budget // 4 - run.scheduled[i]
        builder.bounds[run.run_ids[i]] = left
        if left <= 0:
            builder.skipped.add(run.run_ids[i])


def _rows_in_prefill(run: Running) -> tuple[int, ...]:
    """The positions of the rows in prefill."""
    in_prefill = map(lt, run.scheduled, run.num_known_at_admission)
    return tuple(compress(range(len(run)), in_prefill))


def _share_tokens(builder: StepBuilder) -> None:
    """Give each running row one token; rows in prefill share the rest of the budget."""
    config, state, run = builder.config, builder.state, builder.state.running
    filled = _rows_in_prefill(run) if state.filling else ()
    load = step_load(config, state, filled, builder.skipped)
    budget, state = consult.budget(config, state, load)
    builder.room = budget - (len(run) - len(builder.skipped))
    builder.bounded = load.budget < config.max_num_batched_tokens
    builder.state = state if filled or not state.filling else evolve(state, filling=False)
    for i in filled:
        if run.run_ids[i] not in builder.skipped:
            left = (
                run.num_known_at_admission[i]
                - run.scheduled[i]
                - (run.ids[i] in state.paused)
            )
            cost = token_cost(builder.config, run.seqs[i].request)
            extra = max(0, min(builder.room // cost, left - 1))
            if config.by_chunk:
                extra = _within_tables(builder, i, 1 + extra) - 1
            if config.state_group:
                extra = _until_save(builder, i, 1 + extra) - 1
            builder.shares[run.run_ids[i]] = 1 + extra
            builder.room -= extra * cost


def _within_tables(builder: StepBuilder, i: int, share: int) -> int:
    """How many of `share` prefill tokens the row at `i` may take, and has blocks for,
    after its tables have grown.
    """
    config, run = builder.config, builder.state.running
    start, share = run.scheduled[i], min(share, builder.bounds[run.run_ids[i]])
    builder.state, builder.grown = grow_for_prefill(
        config, builder.state, i, start + share, builder.grown
    )
    ends = table_blocks(config, builder.state.running.tables[i]) * config.block_size
    return min(share, ends - start)


def _until_save(builder: StepBuilder, i: int, share: int) -> int:
    """How many of `share` prefill tokens the row at `i` takes until its state is to be
    kept.
    """
    run = builder.state.running
    share, bounded = bound_chunk(builder.config, builder.state, run, i, share)
    if bounded is not run:
        builder.state = evolve(builder.state, running=bounded)
    return share


def _admit(builder: StepBuilder) -> None:
    """Admit from the waiting queue, and join the admitted sequences to the running
    columns.
    """
    before = builder.state.running.run_ids
    admit_from_queue(builder)
    if builder.state.running.run_ids is not before:  # a sequence was preempted
        builder.forget(set(before).difference(builder.state.running.run_ids))
    if not builder.newcomers:
        return
    # In order of rank: a deferred sequence may be admitted after those that passed it.
    builder.newcomers.sort(key=lambda newcomer: newcomer.seat.seqs[0].place)
    run = joined(builder.state.running, [newcomer.seat for newcomer in builder.newcomers])
    stops = builder.state.stops
    if len(stops) > thresholds.STOP_IDS:  # some are of sequences that have left
        stops = frozenset().union(*{seq.request.stop_ids for seq in run.seqs})
    bound = any(
        newcomer.seat.seqs[0].request.needs_host_mask for newcomer in builder.newcomers
    )
    needs_host_mask = builder.state.needs_host_mask or bound
    builder.state = evolve(
        builder.state,
        running=run,
        stops=stops,
        filling=True,
        needs_host_mask=needs_host_mask,
    )
