"""Growth of block tables; if blocks run out, preemption.

A table is grown a little before it ends (`grow_at`), for a bounded number of sequences a
step, so that a batch whose blocks end together causes no spike; early growth never takes
the last blocks. Growth that is due now takes the blocks that are available. If there are
none, the sequence waits for blocks behind fences; only if none are behind fences, the
policy's victim is preempted: one victim for one shortage.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from minfer.blocks.ownership import Transaction
from minfer.lifecycle.preempt import preempt
from minfer.lifecycle.publish import (
    release_if_short,
    release_windows,
    window_blocks_coming,
)
from minfer.lifecycle.seat import growth_mark, table_blocks
from minfer.planning.spread import deferrable_blocks
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Reason
from minfer.records.plan import Grow
from minfer.records.sequence import Running, Tables, edited
from minfer.records.state import EngineState, pages_coming
from minfer.values import thresholds
from minfer.values.record import evolve

# generation and group -> the pages added to its table
Grown = dict[tuple[int, int], Grow]


def grow(
    config: EngineConfig, state: EngineState, ending: tuple[int, ...], skipped: set[int]
) -> tuple[EngineState, Grown, tuple[Reason, ...]]:
    """Grow the tables that end soon, by a block of each group: of the positions `ending`,
    those that are not skipped.

    Adds to `skipped` the generations that must wait for blocks.
    """
    run, size = state.running, config.block_size
    early = size // 4  # the mark is so far before the end of the table, or at `last`
    ends = {i: run.grow_at[i] + early for i in ending if run.run_ids[i] not in skipped}
    ends = {i: end for i, end in ends.items() if end < run.last_index[i]}
    if not ends:
        return state, {}, ()
    now = [i for i, end in ends.items() if run.scheduled[i] >= end]
    available, pages = state.blocks.available, config.block_pages
    if len(now) * pages > available:
        upto = {i: ends[i] // size + 1 for i in now}
        return _grow_or_preempt(config, state, upto, skipped)
    soon = [i for i, end in ends.items() if run.scheduled[i] < end]
    soon = soon[: deferrable_blocks(config, len(run))]
    if (len(now) + len(soon) + len(run)) * pages > available:
        soon = []
    upto = {i: ends[i] // size + 1 for i in sorted(now + soon)}
    pages *= len(upto)
    if config.by_chunk:  # else the tables of a row end at the same block
        pages = _pages_of_growth(config, run, upto)
    state, grown = _extend(config, state, upto, pages)
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
        blocks = -(-end // config.block_size)
        if blocks > table_blocks(config, run.tables[i]):
            wants[i] = blocks
    left = state.blocks.available - len(run) * config.block_pages
    pages = _pages_of_growth(config, run, wants)
    if wants and pages <= left:
        state, more_grown = _extend(config, state, wants, pages)
        grown = {**grown, **_merge_growth(grown, more_grown)}
    return state, grown


def grow_for_prefill(
    config: EngineConfig, state: EngineState, i: int, end: int, grown: Grown
) -> tuple[EngineState, Grown]:
    """Grow the tables of the sequence at `i` so that they hold the prefill tokens below
    `end`, or as many as blocks are plenty for: one of each group is left for each other
    row.
    """
    blocks, have = (
        -(-end // config.block_size),
        table_blocks(config, state.running.tables[i]),
    )
    if blocks <= have:
        return state, grown
    reserved = (len(state.running) - 1) * config.block_pages
    pages = _pages_of_growth(config, state.running, {i: blocks})
    state = release_if_short(config, state, pages + reserved)
    # groups that take blocks chunk by chunk end alike
    block_pages = pages // (blocks - have)
    plenty = max(0, state.blocks.available - reserved) // block_pages
    blocks = min(blocks, have + plenty)
    state, more_grown = _extend(config, state, {i: blocks}, block_pages * (blocks - have))
    return state, {**grown, **_merge_growth(grown, more_grown)}


def _merge_growth(grown: Grown, more_grown: Grown) -> Grown:
    """The growth of tables that had grown in this step already, merged with that."""
    return {
        key: evolve(growth, at=had.at, blocks=(*had.blocks, *growth.blocks))
        if (had := grown.get(key))
        else growth
        for key, growth in more_grown.items()
    }


def _pages_of_growth(config: EngineConfig, run: Running, upto: Mapping[int, int]) -> int:
    """How many pages it takes to grow tables to `upto` blocks in each group."""
    return sum(
        [
            max(0, blocks * group.pages - len(table))
            for i, blocks in upto.items()
            for table, group in zip(run.tables[i], config.block_groups, strict=False)
        ]
    )


def _extend(
    config: EngineConfig, state: EngineState, upto: dict[int, int], pages: int
) -> tuple[EngineState, Grown]:
    """Grow the tables at each position to `upto` blocks, which takes `pages` pages; the
    caller has checked that these are free.
    """
    if not pages:
        return state, {}
    change = Transaction(state.blocks)
    new = iter(_take(change, pages))
    return _extend_tables(config, state, change, upto, new)


def _extend_tables(
    config: EngineConfig,
    state: EngineState,
    change: Transaction,
    upto: dict[int, int],
    new: Iterator[int],
) -> tuple[EngineState, Grown]:
    """Extend tables to `upto` blocks, which is more than they have, with the pages
    `new`, which were taken in `change`.
    """
    run = state.running
    tables: dict[int, Tables] = {}
    grow_at: dict[int, int] = {}
    grown: Grown = {}
    for i, blocks in upto.items():
        row_tables = list(run.tables[i])
        for g, group in enumerate(config.block_groups):
            first = len(row_tables[g])
            lacks = blocks * group.pages - first
            if lacks <= 0:
                continue
            pages = (*islice(new, lacks),)
            row_tables[g] = row_tables[g].extended(pages, thresholds.RECENT_ENTRIES)
            # else the row's `Open`, still to be sent, has the whole table
            if run.scheduled[i] > run.starts[i]:
                grown[run.run_ids[i], g] = Grow(run.rows[i], first, pages, g)
        tables[i] = tuple(row_tables)
        grow_at[i] = growth_mark(config, blocks, run.last_index[i])
    run = edited(run, tables=tables, grow_at=grow_at)
    return evolve(state, blocks=change.done(), running=run), grown


def _grow_or_preempt(
    config: EngineConfig, state: EngineState, upto: dict[int, int], skipped: set[int]
) -> tuple[EngineState, Grown, tuple[Reason, ...]]:
    """Grow tables to `upto` blocks in rank order when blocks are short, and preempt the
    policy's victims.
    """
    grown: Grown = {}
    reasons: tuple[Reason, ...] = ()
    if config.by_chunk:
        state = release_windows(config, state)
    while upto:
        state, growth, upto = _grow_first(config, state, upto)
        grown.update(growth)
        run = state.running
        if upto and (
            pages_coming(state) or len(run) == 1 or window_blocks_coming(config, state)
        ):
            # Blocks become free when a plan in flight ends.
            skipped.update(run.run_ids[i] for i in upto)
            break
        if upto:
            first = min(upto)
            victim, state = consult.victim(config, state)
            if victim == first and _has_results_in_flight(state, run.run_ids[victim]):
                skipped.update(run.run_ids[i] for i in upto)
                break
            run_id = run.run_ids[victim]
            grown = {key: change for key, change in grown.items() if key[0] != run_id}
            skipped.discard(run_id)
            state, reason = preempt(config, state, victim, run.ids[first])
            reasons += (reason,)
            upto = {i - (i > victim): n for i, n in upto.items() if i != victim}
    return state, grown, reasons


def _grow_first(
    config: EngineConfig, state: EngineState, upto: dict[int, int]
) -> tuple[EngineState, Grown, dict[int, int]]:
    """Grow the first of these tables, as far as there are pages for them. Returns those
    that are left, too.
    """
    change, served, new = Transaction(state.blocks), dict[int, int](), list[int]()
    for i, blocks in upto.items():
        pages = _pages_of_growth(config, state.running, {i: blocks})
        if pages > change.available:
            break
        new += _take(change, pages)
        served[i] = blocks
    left = {i: blocks for i, blocks in upto.items() if i not in served}
    if not served:
        return state, {}, left
    state, grown = _extend_tables(config, state, change, served, iter(new))
    return state, grown, left


def _has_results_in_flight(state: EngineState, run_id: int) -> bool:
    """Whether the sequence should wait for its results in flight instead of being
    preempted: while those before it in rank may be paused, it could otherwise be
    preempted forever before its results arrive.
    """
    return bool(state.paused) and any(run_id in plan.run_ids for plan in state.inflight)


def _take(change: Transaction, pages: int) -> tuple[int, ...]:
    """Takes `pages` pages; the caller has checked that these are free."""
    allocated = change.take(pages)
    return allocated.pages if allocated else ()
