"""Growth of block tables; if blocks run out, preemption.

A table is grown a little before it ends (`grow_at`), for a bounded number of sequences a
step, so that a batch whose blocks end together causes no spike; early growth never takes
the last blocks. Growth that is due now takes the blocks that are available. If there are
none, the sequence waits for blocks behind fences; only if none are behind fences, the
policy's victim is preempted: one victim for one shortage.
"""

from collections.abc import Mapping
from itertools import islice

from minfer.blocks.ownership import Transaction
from minfer.lifecycle.preempt import preempt
from minfer.lifecycle.seat import growth_mark
from minfer.planning.spread import deferrable_blocks
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Reason
from minfer.records.plan import Grow
from minfer.records.sequence import Table, edited
from minfer.records.state import EngineState
from minfer.values import thresholds
from minfer.values.record import evolve

Grown = dict[int, Grow]  # generation -> the blocks added to its table


def grow(
    config: EngineConfig, state: EngineState, due: tuple[int, ...], skipped: set[int]
) -> tuple[EngineState, Grown, tuple[Reason, ...]]:
    """Grow the tables that end soon: of the positions `due`, those that are not skipped.

    Adds to `skipped` the generations that must wait for blocks.
    """
    run = state.running
    ends = {
        i: len(run.tables[i]) * config.block_size
        for i in due
        if run.gens[i] not in skipped
    }
    ends = {i: end for i, end in ends.items() if end < run.last[i]}
    if not ends:
        return state, {}, ()
    now = [i for i, end in ends.items() if run.scheduled[i] >= end]
    if len(now) > state.blocks.available:
        return _grow_or_preempt(config, state, now, skipped)
    soon = [i for i, end in ends.items() if run.scheduled[i] < end]
    soon = soon[: deferrable_blocks(config, len(run))]
    if len(now) + len(soon) + len(run) > state.blocks.available:
        soon = []
    state, grown = _extend(config, state, dict.fromkeys(sorted(now + soon), 1))
    return state, grown, ()


def grow_for_drafts(
    config: EngineConfig, state: EngineState, upto: Mapping[int, int], grown: Grown
) -> tuple[EngineState, Grown]:
    """Grow tables so that they hold the inputs below `upto`: position among the running
    -> position of an input.

    Takes blocks only while there are plenty. Merges with what this step has `grown`
    already.
    """
    run = state.running
    wants: dict[int, int] = {}
    for i, end in upto.items():
        more = -(-end // config.block_size) - len(run.tables[i])
        if more > 0:
            wants[i] = more
    if wants and sum(wants.values()) + len(run) <= state.blocks.available:
        state, more_grown = _extend(config, state, wants)
        grown = {**grown, **_merge_growth(grown, more_grown)}
    return state, grown


def _merge_growth(grown: Grown, more_grown: Grown) -> Grown:
    """The growth of tables that had grown in this step already, merged with that."""
    return {
        gen: evolve(more, at=had.at, blocks=(*had.blocks, *more.blocks))
        if (had := grown.get(gen))
        else more
        for gen, more in more_grown.items()
    }


def _extend(
    config: EngineConfig, state: EngineState, wants: dict[int, int]
) -> tuple[EngineState, Grown]:
    """Give each position its blocks; the caller has checked that there are enough."""
    if not wants:
        return state, {}
    change = Transaction(state.blocks)
    taken = change.take(sum(wants.values()))
    new = iter(taken.blocks if taken else ())  # never None: the caller counted
    each = {i: (*islice(new, count),) for i, count in wants.items()}
    return _extend_tables(config, state, change, each)


def _extend_tables(
    config: EngineConfig,
    state: EngineState,
    change: Transaction,
    new: dict[int, tuple[int, ...]],
) -> tuple[EngineState, Grown]:
    """Extend the tables with their `new` blocks, which were taken in `change`."""
    run = state.running
    tables: dict[int, Table] = {}
    grow_at: dict[int, int] = {}
    grown: Grown = {}
    for i, some in new.items():
        table = run.tables[i]
        tables[i] = table.extended(some, thresholds.RECENT_ENTRIES)
        grow_at[i] = growth_mark(config, len(table) + len(some), run.last[i])
        # else the row's `Open`, still to be sent, has the whole table
        if run.scheduled[i] > run.starts[i]:
            grown[run.gens[i]] = Grow(run.rows[i], len(table), some)
    run = edited(run, tables=tables, grow_at=grow_at)
    return evolve(state, blocks=change.done(), running=run), grown


def _grow_or_preempt(
    config: EngineConfig, state: EngineState, needy: list[int], skipped: set[int]
) -> tuple[EngineState, Grown, tuple[Reason, ...]]:
    """Serve the positions `needy` in rank order when blocks are short, and preempt the
    policy's victims.
    """
    grown: Grown = {}
    reasons: tuple[Reason, ...] = ()
    while needy:
        served = needy[: state.blocks.available]
        if served:
            change = Transaction(state.blocks)
            each = {i: _take_block(change) for i in served}
            state, some = _extend_tables(config, state, change, each)
            grown.update(some)
        needy = needy[len(served) :]
        run = state.running
        if needy and (state.fences or len(run) == 1):
            # Blocks become free when a plan in flight ends.
            skipped.update(run.gens[i] for i in needy)
            break
        if needy:
            victim, state = consult.victim(config, state)
            if victim == needy[0] and _has_results_in_flight(state, run.gens[victim]):
                skipped.update(run.gens[i] for i in needy)
                break
            grown.pop(run.gens[victim], None)
            skipped.discard(run.gens[victim])
            state, reason = preempt(config, state, victim, run.ids[needy[0]])
            reasons += (reason,)
            needy = [i - (i > victim) for i in needy if i != victim]
    return state, grown, reasons


def _has_results_in_flight(state: EngineState, gen: int) -> bool:
    """Whether the sequence should wait for its results in flight instead of being
    preempted: while those before it in rank may be paused, it could otherwise be
    preempted forever before its results arrive.
    """
    return bool(state.paused) and any(gen in plan.gens for plan in state.inflight)


def _take_block(change: Transaction) -> tuple[int, ...]:
    """One block; the caller has checked that there is one."""
    taken = change.take(1)
    return taken.blocks if taken else ()
