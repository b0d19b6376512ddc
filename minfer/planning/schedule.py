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
from minfer.planning.admit import current_load, release_sources
from minfer.planning.build_plan import build_plan
from minfer.planning.grow import grow, grow_for_prefill
from minfer.planning.plan_drafts import plan_drafts, waits_for_results
from minfer.planning.work import StepBuilder, token_cost
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Command, Execute
from minfer.records.sequence import is_bound, joined
from minfer.records.state import EngineState, Transition, head_of_queue
from minfer.values import thresholds
from minfer.values.record import evolve


def schedule(config: EngineConfig, state: EngineState) -> Transition:
    """Plan one more step, or nothing if no row can run now."""
    if not len(state.running) and not state.waiting:
        return Transition(state)
    alone = isolated_generation(config, state)
    if alone is not None and state.inflight:
        return Transition(state)
    if waits_for_results(config, state):
        return Transition(state)
    work = StepBuilder(config, state)
    _find_skipped_rows(work, alone)
    _share_tokens(work)
    if alone is None and work.state.waiting:
        _admit(work)
    reasons = work.reasons
    work.state = release_sources(work.state, work.newcomers)
    if len(work.skipped) == len(work.state.running):
        beside: tuple[Command, ...] = (*work.loads, *work.wakes)
        planned = Transition(work.state, beside, tuple(reasons))
        newly = alone is None and isolated_generation(config, work.state) is not None
        return _schedule_again(config, planned) if newly else planned
    plan_drafts(work)
    plan = build_plan(work)
    commands: tuple[Command, ...] = (Execute(plan), *work.loads, *work.wakes)
    return Transition(work.state, commands, tuple(reasons))


def _schedule_again(config: EngineConfig, planned: Transition) -> Transition:
    """Schedule once more: nothing was planned because the suspect that must run alone
    was only just admitted.
    """
    more = schedule(config, planned.state)
    commands = (*planned.commands, *more.commands)
    return Transition(more.state, commands, (*planned.reasons, *more.reasons))


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


def _find_skipped_rows(work: StepBuilder, alone: int | None) -> None:
    """Find the rows that skip this step, and grow the block tables of the others.

    A row skips the step if its last token is planned already; if it may not run ahead and
    waits for a token in flight, or for the host (minfer/lifecycle/pausing.py); or if
    another one has to run `alone`.
    """
    run = work.state.running
    due = tuple(compress(range(len(run)), map(ge, run.scheduled, run.grow_at)))
    work.skipped.update(
        run.run_ids[i] for i in due if run.scheduled[i] >= run.last_index[i]
    )
    if work.state.needs_host_mask:
        work.skipped.update(_in_lockstep(work))
    if work.state.paused:
        work.skipped.update(paused_rows(work.config, work.state))
    if alone is not None:
        work.skipped.update(gen for gen in run.run_ids if gen != alone)
    if work.config.by_chunk and work.state.filling:
        _bound_prefill(work)
    work.state, work.grown, reasons = grow(work.config, work.state, due, work.skipped)
    work.reasons += reasons


def _in_lockstep(work: StepBuilder) -> Iterator[int]:
    """The generations in lockstep with the host that may not run further ahead of their
    known tokens.
    """
    run = work.state.running
    bound = tuple(map(is_bound, run.seqs))
    if not any(bound):
        work.state = evolve(work.state, needs_host_mask=False)
        return iter(())
    most = int(work.config.late_masks)  # how many tokens ahead they may be
    ahead = map(sub, run.scheduled, run.known)
    far = map(ge, ahead, repeat(most))
    return compress(run.run_ids, map(and_, bound, far))


def _bound_prefill(work: StepBuilder) -> None:
    """Find how many tokens the rows in prefill may take, and skip those that may not take
    any.

    Blocks leave a window only once results are known: without a bound, a row would hold
    the blocks of as many chunks as steps are in flight. A quarter of the budget of a step
    is enough to keep the device busy until the results of a whole one are known.
    """
    config, run = work.config, work.state.running
    budget = config.max_num_batched_tokens
    filled = [
        *compress(range(len(run)), map(lt, run.scheduled, run.num_known_at_admission))
    ]
    done = all_committed(config, work.state, filled)
    for i in filled:
        left = done[i] + budget + budget // 4 - run.scheduled[i]
        work.bounds[run.run_ids[i]] = left
        if left <= 0:
            work.skipped.add(run.run_ids[i])


def _share_tokens(work: StepBuilder) -> None:
    """Give each running row one token; rows in prefill share the rest of the budget."""
    config, state = work.config, work.state
    budget, state = consult.budget(config, state, current_load(config, state))
    run = state.running
    work.state = state
    work.room = budget - (len(run) - len(work.skipped))
    if not state.filling:
        return
    filled = tuple(
        compress(range(len(run)), map(lt, run.scheduled, run.num_known_at_admission))
    )
    if not filled:
        work.state = evolve(state, filling=False)
    for i in filled:
        if run.run_ids[i] not in work.skipped:
            left = (
                run.num_known_at_admission[i]
                - run.scheduled[i]
                - (run.ids[i] in state.paused)
            )
            each = token_cost(work.config, run.seqs[i].request)
            more = max(0, min(work.room // each, left - 1))
            if config.by_chunk:
                more = _within_tables(work, i, 1 + more) - 1
            work.shares[run.run_ids[i]] = 1 + more
            work.room -= more * each


def _within_tables(work: StepBuilder, i: int, share: int) -> int:
    """How many of `share` prefill tokens the row at `i` may take, and has blocks for,
    after its tables have grown.
    """
    config, run = work.config, work.state.running
    start, share = run.scheduled[i], min(share, work.bounds[run.run_ids[i]])
    work.state, work.grown = grow_for_prefill(
        config, work.state, i, start + share, work.grown
    )
    ends = table_blocks(config, work.state.running.tables[i]) * config.block_size
    return min(share, ends - start)


def _admit(work: StepBuilder) -> None:
    """Admit from the waiting queue, and join the admitted sequences to the running
    columns.
    """
    before = work.state.running.run_ids
    admit_from_queue(work)
    if work.state.running.run_ids is not before:  # a sequence was preempted
        work.forget(set(before).difference(work.state.running.run_ids))
    if not work.newcomers:
        return
    # In order of rank: a deferred sequence may be admitted after those that passed it.
    work.newcomers.sort(key=lambda newcomer: newcomer.seat.seqs[0].place)
    run = joined(work.state.running, [newcomer.seat for newcomer in work.newcomers])
    stops = work.state.stops
    if len(stops) > thresholds.STOP_IDS:  # some are of sequences that have left
        stops = frozenset().union(*{seq.request.stop_ids for seq in run.seqs})
    bound = any(
        newcomer.seat.seqs[0].request.needs_host_mask for newcomer in work.newcomers
    )
    lockstep = work.state.needs_host_mask or bound
    work.state = evolve(
        work.state, running=run, stops=stops, filling=True, needs_host_mask=lockstep
    )
