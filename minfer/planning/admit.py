"""Admission: the head of the queue gets a device row, its cached prefix, and blocks for
all its known tokens.

Blocks for the whole history are allocated at once, so an admitted sequence never stops in
the middle of its prompt for want of blocks, and half-admitted sequences cannot block each
other. Samples of one request are forks: the second finds the full blocks of the first in
the cache and copies the partial tail of its prompt, so it computes one token.
"""

from collections.abc import Iterable

from attrs import frozen

from minfer.blocks.keys import Key
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.prefix import ROOT, PrefixChange, node_of
from minfer.lifecycle.committed import committed
from minfer.lifecycle.pausing import all_paused, skips_as_suspect
from minfer.lifecycle.preempt import preempt
from minfer.lifecycle.publish import publish_blocks
from minfer.lifecycle.seat import new_columns
from minfer.planning.prefix_hit import (
    blocks_if_uncached,
    blocks_needed,
    readable_blocks,
    take_hit,
)
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Missed, QueueBlocked, Reason
from minfer.records.plan import Copy
from minfer.records.policy import Load
from minfer.records.sequence import Chain, Running, Sequence
from minfer.records.state import EngineState
from minfer.values.log import Log
from minfer.values.record import evolve


@frozen
class Admission:
    """An admitted sequence: its columns, not yet joined to the running ones."""

    seat: Running
    copy: Copy | None
    reasons: tuple[Reason, ...]
    # Key of the published block that is copied: it is held until the plan is complete.
    source: Key = ROOT


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
    config: EngineConfig, state: EngineState, seq: Sequence, others: list[Admission]
) -> tuple[EngineState, Admission | QueueBlocked]:
    """Admit `seq`, the head of the queue, if possible; this plan has admitted `others`
    already. The caller joins a newcomer to `state.running`.
    """
    if not state.free_rows:
        return state, QueueBlocked(*seq.id, "rows")
    sibling = None
    if seq.request.n > 1 and len(seq.history) == len(seq.request.prompt):
        # of running samples, whose prompt it can share
        owners = enumerate(state.running.ids)
        sibling = next((i for i, (owner, _) in owners if owner == seq.request.id), None)
        if sibling is None and any(
            o.seat.seqs[0].request.id == seq.request.id for o in others
        ):
            return state, QueueBlocked(*seq.id, "sibling")
    if sibling is not None:
        shared = len(seq.history) - 1
        if committed(config, state, sibling) < shared:
            return state, QueueBlocked(*seq.id, "sibling")
        state = publish_blocks(config, state, {sibling: shared // config.block_size})
    return _allocate(config, state, seq, sibling, len(others))


def preempt_last(
    config: EngineConfig, state: EngineState, seq: Sequence
) -> tuple[EngineState, Reason | None]:
    """Preempt the last running sequence for `seq`, the head of the queue, if the policy
    agrees.

    Returns the reason if it did.
    """
    if not len(state.running):
        return state, None
    agreed, state = consult.displaces(config, state, seq.place)
    if not agreed:
        return state, None
    return preempt(config, state, len(state.running) - 1, seq.id)


def _allocate(
    config: EngineConfig,
    state: EngineState,
    seq: Sequence,
    sibling: int | None,
    others: int,
) -> tuple[EngineState, Admission | QueueBlocked]:
    """Give `seq` a row and blocks, if there are enough; `sibling` is the position of a
    running sample with its prompt; this plan has admitted `others` already.
    """
    size = config.block_size
    known = len(seq.history)
    # at least one token is computed, or there would be no logits
    full = (known - 1) // size
    held = _shortage(config, state, seq, alone=not len(state.running) and not others)
    if held is not None:
        return state, held
    change = Transaction(state.blocks)
    hit = take_hit(config, state, change, seq.keys, readable_blocks(seq, full))
    taken = change.take(-(-known // size) - hit.blocks)
    table = Log(hit.table, taken.blocks if taken else ())  # never None: they were counted
    copy, source = None, ROOT
    # A copy goes with the plan that opens the row, which may not be the next one.
    at_once = seq.id not in state.paused and not skips_as_suspect(config, state, seq.id)
    if sibling is not None and hit.blocks == full and at_once:
        copy = _sibling_tail(config, state.running, sibling, table, known)
    elif seq.request.tails is not None and hit.blocks == full and at_once:
        copy, source = _cached_tail(config, change.prefix, seq, table)
    start = known - 1 if copy else hit.blocks * size
    if not seq.ran_before:  # its first admission: what counts for hit shares and usage
        cached = min(hit.blocks * size, len(seq.request.prompt))
        seq = evolve(seq, cached=cached) if cached else seq
    seat = new_columns(
        config,
        seq,
        gen=state.next_gen,
        row=state.free_rows[-1],
        table=table,
        chain=Chain(Log(seq.keys), hit.blocks, hit.leaf, low=hit.low),
        start=start,
    )
    reasons = _reasons(state, seq, hit.blocks, full, size, copy)
    if not seq.preempted:
        now = current_load(config, state, others)
        state = consult.admitted(config, state, seq.place[0], seq.request, now)
    return _leave_queue(state, seq, change.done()), Admission(seat, copy, reasons, source)


def _shortage(
    config: EngineConfig, state: EngineState, seq: Sequence, *, alone: bool
) -> QueueBlocked | None:
    """Why there are not enough blocks to admit `seq`, if so; `alone`: no other sequence
    runs.
    """
    room = state.blocks.available
    if blocks_if_uncached(config, seq, alone=alone) <= room:
        return None
    needs = blocks_needed(config, state.blocks, seq, alone=alone)
    return QueueBlocked(*seq.id, "blocks", needs, room) if needs > room else None


def _sibling_tail(
    config: EngineConfig, run: Running, sibling: int, table: Log[int], known: int
) -> Copy | None:
    """The copy of a sibling's partial block, if there is one to be copied."""
    full, count = divmod(known - 1, config.block_size)
    if not count or run.chains[sibling].low > full:
        return None
    return Copy(run.tables[sibling][full], table[full], count)


def _cached_tail(
    config: EngineConfig, prefix: PrefixChange, seq: Sequence, table: Log[int]
) -> tuple[Copy | None, Key]:
    """The copy of a kept partial block, in which all but the last known token of `seq`
    end, and the key of that block, which is now held; (None, ROOT) if there is nothing to
    be copied.
    """
    size, known = config.block_size, len(seq.history)
    full, count = divmod(known - 1, size)
    key, _ = seq.request.tails or (ROOT, ROOT)
    node = node_of(prefix, key)
    if node is None or not count or not seq.reads_cache:
        return None, ROOT
    prefix.hold(key)
    return Copy(node.block, table[full], count), key


def release_sources(state: EngineState, newcomers: Iterable[Admission]) -> EngineState:
    """Release the published blocks copied for newcomers: their plan is complete."""
    sources = [one.source for one in newcomers if one.source != ROOT]
    if not sources:
        return state
    change = Transaction(state.blocks)
    for key in sources:
        change.prefix.release(key)
    return evolve(state, blocks=change.done())


def _reasons(
    state: EngineState, seq: Sequence, hit: int, full: int, size: int, copy: Copy | None
) -> tuple[Reason, ...]:
    """The reasons that report the admission of `seq` and its prefix miss, if any: `hit`
    of `full` blocks were cached.
    """
    first = not seq.ran_before
    admitted = Admitted(
        *seq.id,
        waited=state.time - seq.arrived,
        hit=hit * size,
        known=len(seq.history),
        copied=copy.count if copy else 0,
        cached=seq.cached if first else 0,
        prompt=len(seq.request.prompt) if first else 0,
    )
    return (admitted, Missed(*seq.id, hit, full)) if hit < full else (admitted,)


def _leave_queue(state: EngineState, seq: Sequence, blocks: Blocks) -> EngineState:
    return evolve(
        state,
        blocks=blocks,
        waiting=state.waiting.remove(seq.place),
        free_rows=state.free_rows[:-1],
        next_gen=state.next_gen + 1,
        stops=state.stops | seq.request.stop_ids,
    )
