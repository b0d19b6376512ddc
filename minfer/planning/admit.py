"""Admission: the head of the queue gets a device row, its cached prefix, and blocks for
all its known tokens.

Blocks for the whole history are allocated at once, so an admitted sequence never stops in
the middle of its prompt for want of blocks, and half-admitted sequences cannot block each
other. But in groups of layers with a window, blocks are taken chunk by chunk and released
behind it: a sequence is admitted if as many pages are available as it must hold at once,
and it has at least the block of its first input; if others take the rest, it waits or is
preempted as any row that lacks a block.

Samples of one request are forks: the second finds the full blocks of the first in the
cache and copies the partial tail of its prompt, so it computes one token.
"""

from collections.abc import Iterable
from itertools import islice

from attrs import frozen

from minfer.blocks.keys import Keys, group_key
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import ROOT, Pages, PrefixChange, flattened, pages_of
from minfer.lifecycle.adapter_use import begin_use
from minfer.lifecycle.committed import committed
from minfer.lifecycle.pausing import all_paused, skips_as_suspect
from minfer.lifecycle.preempt import preempt
from minfer.lifecycle.publish import publish_blocks, release_if_short
from minfer.lifecycle.seat import new_columns
from minfer.planning.prefix_hit import (
    Found,
    Hit,
    pages_if_uncached,
    pages_needed,
    readable_blocks,
    take_hit,
)
from minfer.planning.start_state import take_working_state, with_states
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Missed,
    QueueBlocked,
    Reason,
    StateMissed,
    WindowMissed,
)
from minfer.records.plan import Copy
from minfer.records.policy import Load
from minfer.records.sequence import Chain, Running, Sequence, Tables
from minfer.records.state import EngineState
from minfer.values.log import Log
from minfer.values.record import evolve


@frozen
class Admission:
    """An admitted sequence: its columns, not yet joined to the running ones."""

    seat: Running
    copies: tuple[Copy, ...]
    reasons: tuple[Reason, ...]
    # Keys of the published blocks that are copied: held until the plan is complete.
    sources: Keys = ()


def current_load(config: EngineConfig, state: EngineState, newcomers: int = 0) -> Load:
    """The load that a policy may look at; this plan has admitted `newcomers` already."""
    waiting, running = len(state.waiting), len(state.running) + newcomers
    first = state.waiting.first().arrived if waiting else state.time
    available, budget = state.blocks.available, config.max_num_batched_tokens
    seats, step = config.max_num_seqs, state.next_step
    paused = all_paused(config, state)
    return Load(
        state.time, waiting, running, available, first, budget, seats, step, paused
    )


def admit(
    config: EngineConfig,
    state: EngineState,
    seq: Sequence,
    newcomers: list[Admission],
    max_tokens: int,
) -> tuple[EngineState, Admission | QueueBlocked]:
    """Admit `seq`, the head of the queue, if possible; this plan has admitted `newcomers`
    already, and has room for `max_tokens` of it. The caller joins a newcomer to
    `state.running`.
    """
    if not state.free_rows:
        return state, QueueBlocked(*seq.id, "rows")
    sibling = None
    if seq.request.n > 1 and len(seq.history) == len(seq.request.prompt):
        # of running samples, whose prompt it can share
        owners = enumerate(state.running.ids)
        sibling = next((i for i, (owner, _) in owners if owner == seq.request.id), None)
        if sibling is None and any(
            o.seat.seqs[0].request.id == seq.request.id for o in newcomers
        ):
            return state, QueueBlocked(*seq.id, "sibling")
    if sibling is not None:
        shared = len(seq.history) - 1
        if committed(config, state, sibling) < shared:
            return state, QueueBlocked(*seq.id, "sibling")
        state = publish_blocks(config, state, {sibling: shared // config.block_size})
    return _allocate(config, state, seq, sibling, len(newcomers), max_tokens)


def shortage(
    config: EngineConfig, state: EngineState, seq: Sequence, newcomers: list[Admission]
) -> QueueBlocked | None:
    """Why there is no row for `seq`, the head of the queue, or not enough pages, if so;
    this plan has admitted `newcomers` already.
    """
    if not state.free_rows:
        return QueueBlocked(*seq.id, "rows")
    return _shortage(
        config, state, seq, runs_alone=not len(state.running) and not newcomers
    )


def preempt_last(
    config: EngineConfig, state: EngineState, seq: Sequence
) -> tuple[EngineState, Reason | None]:
    """Preempt the last running sequence for `seq`, the head of the queue, if the policy
    agrees.

    Returns the reason if it did.
    """
    if not len(state.running):
        return state, None
    agreed, state = consult.may_preempt(config, state, seq.place)
    if not agreed:
        return state, None
    return preempt(config, state, len(state.running) - 1, seq.id)


def _allocate(
    config: EngineConfig,
    state: EngineState,
    seq: Sequence,
    sibling: int | None,
    num_newcomers: int,
    max_tokens: int,
) -> tuple[EngineState, Admission | QueueBlocked]:
    """Give `seq` a row and blocks, if there are enough; `sibling` is the position of a
    running sample with its prompt; this plan has admitted `num_newcomers` already, and
    has room for `max_tokens` of it.
    """
    size = config.block_size
    num_known = len(seq.history)
    # at least one token is computed, or there would be no logits
    full = (num_known - 1) // size
    blocked = _shortage(
        config, state, seq, runs_alone=not len(state.running) and not num_newcomers
    )
    if blocked is not None:
        return state, blocked
    others = len(state.running) + num_newcomers
    most_pages = (-(-num_known // size) + others) * config.block_pages
    state = release_if_short(config, state, most_pages + 2 * config.state_pages)
    change = Transaction(state.blocks)
    hit = take_hit(config, state, change, seq.keys, readable_blocks(seq, full))
    working: Pages = ()
    origin = ROOT
    if config.state_group:
        working, origin = take_working_state(config, change, hit, num_known)
    tables = _take_tables(
        config, change, hit, num_known, max_tokens, len(state.running) + num_newcomers
    )
    copies: tuple[Copy, ...] = ()
    sources: Keys = ()
    has_tail = sibling is not None or seq.request.continuation.tail_keys is not None
    # The state of recurrent layers is never of a partial block.
    if has_tail and hit.blocks == full and not config.state_group:
        copies, sources = _copied_tail(config, state, change, seq, sibling, tables)
    start = num_known - 1 if copies else hit.blocks * size
    if not seq.ran_before:  # its first admission: what counts for hit shares and usage
        cached = min(hit.blocks * size, len(seq.request.prompt))
        seq = evolve(seq, cached=cached) if cached else seq
    sealed = (hit.blocks,) * len(tables)
    seat = new_columns(
        config,
        seq,
        run_id=state.next_run_id,
        row=state.free_rows[-1],
        tables=tables,
        chain=Chain(Log(seq.keys), sealed, hit.leaf, low=hit.low),
        start=start,
    )
    if config.state_group:
        seat = with_states(config, change, seat, hit, working, origin)
    reasons = _reasons(state, seq, hit.found, full, size, copies)
    if not seq.preempted:
        now = current_load(config, state, num_newcomers)
        state = consult.admitted(config, state, seq.place[0], seq.request, now)
    admission = Admission(seat, copies, reasons, sources)
    return _leave_queue(state, seq, change.done()), admission


def _take_tables(
    config: EngineConfig,
    change: Transaction,
    hit: Hit,
    num_known: int,
    max_tokens: int,
    other_rows: int,
) -> Tables:
    """The tables of a newcomer with `num_known` tokens: its hit, and new blocks for the
    rest.

    Where windows are filled chunk by chunk, those for its first chunk of up to
    `max_tokens`, as far as a block of each group is left for each of the `other_rows`.
    """
    size = config.block_size
    num_blocks = end = -(-num_known // size)
    windows = 0  # pages of a block in groups that take blocks chunk by chunk
    if config.by_chunk:
        windows = sum(group.pages for group in config.block_groups if group.window)
        needed = (num_blocks - hit.blocks) * (config.block_pages - windows)
        plenty = change.available - needed - other_rows * config.block_pages
        chunk = -(-min(num_known, hit.blocks * size + max_tokens) // size)
        end = max(hit.blocks + 1, min(chunk, hit.blocks + plenty // windows))
    new = [
        ((end if windows and group.window else num_blocks) - hit.blocks) * group.pages
        for group in config.block_groups
    ]
    allocated = change.take(sum(new))
    pages = iter(allocated.pages if allocated else ())  # never None: they were counted
    counts = zip(hit.tables, new, strict=True)
    return tuple([Log(table, (*islice(pages, count),)) for table, count in counts])


def _shortage(
    config: EngineConfig, state: EngineState, seq: Sequence, *, runs_alone: bool
) -> QueueBlocked | None:
    """Why there are not enough pages to admit `seq`, if so; `runs_alone`: no other
    sequence runs.
    """
    room = state.blocks.available
    if pages_if_uncached(config, seq, runs_alone=runs_alone) <= room:
        return None
    needs = pages_needed(config, state.blocks, seq, runs_alone=runs_alone)
    return QueueBlocked(*seq.id, "blocks", needs, room) if needs > room else None


def _copied_tail(
    config: EngineConfig,
    state: EngineState,
    change: Transaction,
    seq: Sequence,
    sibling: int | None,
    tables: Tables,
) -> tuple[tuple[Copy, ...], Keys]:
    """The copies of the partial block with which the prompt of `seq` ends, from its
    sibling or from the cache, and the keys of cached ones, which are now held.

    There are none if the next plan does not open the row, as copies go with that.
    """
    at_once = seq.id not in state.paused and not skips_as_suspect(config, state, seq.id)
    if not at_once:
        return (), ()
    if sibling is None:
        return _cached_tail(config, change.prefix, seq, tables)
    copies = _sibling_tail(config, state.running, sibling, tables, len(seq.history))
    return copies, ()


def _sibling_tail(
    config: EngineConfig, run: Running, sibling: int, tables: Tables, num_known: int
) -> tuple[Copy, ...]:
    """The copies of a sibling's partial block in all groups, if there is one to be
    copied.
    """
    full, count = divmod(num_known - 1, config.block_size)
    if not count or max(run.chains[sibling].low) > full:
        return ()
    sources = _block_pages(config, run.tables[sibling], full)
    targets = _block_pages(config, tables, full)
    return tuple([Copy(*pages, count) for pages in zip(sources, targets, strict=True)])


def _block_pages(config: EngineConfig, tables: Tables, block: int) -> Pages:
    """The pages of one block of a sequence in all groups."""
    tables_and_groups = zip(tables, config.block_groups, strict=False)
    return flattened(
        [
            table[block * group.pages : (block + 1) * group.pages]
            for table, group in tables_and_groups
        ]
    )


def _cached_tail(
    config: EngineConfig, prefix: PrefixChange, seq: Sequence, tables: Tables
) -> tuple[tuple[Copy, ...], Keys]:
    """The copies of a kept partial block, in which all but the last known token of `seq`
    end, and the keys of that block in all groups, which are now held; nothing if there is
    nothing to be copied.
    """
    size, num_known = config.block_size, len(seq.history)
    full, count = divmod(num_known - 1, size)
    key, _ = seq.request.continuation.tail_keys or (ROOT, ROOT)
    keys = tuple([group_key(key, g) for g in range(len(tables))])
    missing = any(key_of_group not in prefix.nodes for key_of_group in keys)
    if missing or not count or not seq.reads_cache:
        return (), ()
    for key_of_group in keys:
        prefix.hold(key_of_group)
    pages = zip(pages_of(prefix, keys), _block_pages(config, tables, full), strict=True)
    return tuple([Copy(source, target, count) for source, target in pages]), keys


def release_sources(state: EngineState, newcomers: Iterable[Admission]) -> EngineState:
    """Release the published blocks copied for newcomers: their plan is complete."""
    sources = [key for newcomer in newcomers for key in newcomer.sources]
    if not sources:
        return state
    change = Transaction(state.blocks)
    for key in sources:
        change.prefix.release(key)
    return evolve(state, blocks=change.done())


def _reasons(
    state: EngineState,
    seq: Sequence,
    prefix_hit: Found,
    full: int,
    size: int,
    copies: tuple[Copy, ...],
) -> tuple[Reason, ...]:
    """The reasons that report the admission of `seq` and its prefix miss, if any: of
    `full` blocks those of `prefix_hit` count as hit.
    """
    hit = prefix_hit.blocks
    first = not seq.ran_before
    admitted = Admitted(
        *seq.id,
        waited=state.time - seq.arrived,
        hit=hit * size,
        known=len(seq.history),
        copied=copies[0].count if copies else 0,
        cached=seq.cached if first else 0,
        prompt=len(seq.request.prompt) if first else 0,
    )
    if hit == full:
        return (admitted,)
    reasons: list[Reason] = [admitted, Missed(*seq.id, hit, full)]
    shared, cached = prefix_hit.shared, prefix_hit.cached
    if prefix_hit.missed is not None:
        reasons.append(WindowMissed(*seq.id, prefix_hit.missed, shared, cached))
    if hit < shared:
        reasons.append(StateMissed(*seq.id, hit, shared))
    return tuple(reasons)


def _leave_queue(state: EngineState, seq: Sequence, blocks: Blocks) -> EngineState:
    return evolve(
        state,
        blocks=blocks,
        waiting=state.waiting.remove(seq.place),
        free_rows=state.free_rows[:-1],
        next_run_id=state.next_run_id + 1,
        stops=state.stops | seq.request.stop_ids,
        adapters=begin_use(state.adapters, seq.request.adapter)
        if seq.request.adapter
        else state.adapters,
    )
