"""Admission: the first in line gets a device row, blocks for all it knows, and its cached
prefix.

Blocks for the whole history are taken at once, so a sequence that was let in never has to
stop in the middle of its prompt, and half-admitted sequences cannot block each other.
Samples of one request are forks: the second finds the full blocks of the first in the
cache and copies the partial tail of its prompt, so it computes one token.
"""

from bisect import bisect_left
from itertools import islice

from attrs import frozen

from minfer import consult
from minfer.blocks import ROOT, Blocks, Draft, live, lookup, lookup_window, outside
from minfer.config import EngineConfig, Thresholds
from minfer.keys import Keys
from minfer.lifecycle import committed, preempt, sealed, seated
from minfer.log import Log
from minfer.messages import Admitted, Held, Missed, Reason
from minfer.plan import Copy
from minfer.policy import Load
from minfer.record import evolve
from minfer.sequence import Chain, Running, Sequence
from minfer.state import EngineState


@frozen
class Newcomer:
    """A sequence that was let in: its columns, not yet joined to the running ones."""

    seat: Running
    copy: Copy | None
    reasons: tuple[Reason, ...]


def load(config: EngineConfig, state: EngineState, newcomers: int = 0) -> Load:
    """What a policy may look at; `newcomers` were let in by this plan already."""
    waiting, running = len(state.waiting), len(state.running) + newcomers
    first = state.waiting.first().arrived if waiting else state.time
    available, budget = state.blocks.available, config.max_num_batched_tokens
    return Load(state.time, waiting, running, available, first, budget)


def admit(
    config: EngineConfig, state: EngineState, others: list[Newcomer]
) -> tuple[EngineState, Newcomer | Held]:
    """Let the first in line in, if it can be; `others` were let in by this plan already.

    The line must not be empty. A newcomer still has to be joined to `state.running`.
    """
    seq = state.waiting.first()
    if not state.free_rows:
        return state, Held(*seq.id, "rows")
    sibling = None
    if seq.request.n > 1 and len(seq.history) == len(seq.request.prompt):
        owners = enumerate(
            state.running.ids
        )  # of running samples, whose prompt it can share
        sibling = next((i for i, (owner, _) in owners if owner == seq.request.id), None)
        if sibling is None and any(
            o.seat.seqs[0].request.id == seq.request.id for o in others
        ):
            return state, Held(*seq.id, "sibling")
    if sibling is not None:
        shared = len(seq.history) - 1
        if committed(config, state, sibling) < shared:
            return state, Held(*seq.id, "sibling")
        state = sealed(config, state, {sibling: shared // config.block_size})
    return _seat(config, state, seq, sibling, len(others))


def displace(
    config: EngineConfig, state: EngineState
) -> tuple[EngineState, Reason | None]:
    """Make room for the first in line at the cost of the last that runs, if the policy
    says so.

    Returns the reason if it did.
    """
    if not len(state.running):
        return state, None
    agreed, state = consult.displaces(config, state)
    if not agreed:
        return state, None
    return preempt(config, state, len(state.running) - 1, state.waiting.first().id)


def _seat(
    config: EngineConfig,
    state: EngineState,
    seq: Sequence,
    sibling: int | None,
    others: int,
) -> tuple[EngineState, Newcomer | Held]:
    size, known = config.block_size, len(seq.history)
    full = (
        known - 1
    ) // size  # at least one token is computed, or there would be no logits
    alone, room = not len(state.running) and not others, state.blocks.available
    if uncached(config, seq, alone=alone) > room:
        needs = needed(config, state.blocks, seq, alone=alone)
        if needs > room:
            return state, Held(*seq.id, "blocks", needs, room)
    draft = Draft(state.blocks)
    low, hit, prefix, leaf = _hit(config, state, draft, seq.keys, full)
    new = draft.take(-(-known // size) - hit) or ()  # never None: they were counted
    table = Log(prefix, new)
    start, copy, run = hit * size, None, state.running
    if (
        sibling is not None
        and run.chains[sibling].low <= full == hit
        and known - 1 > start
    ):
        copy = Copy(run.tables[sibling][full], table[full], known - 1 - start)
        start = known - 1
    chain = Chain(Log(seq.keys), hit, leaf, low=low)
    cached = prompt = 0
    if not seq.preempted:  # its first admission: what counts for hit shares and usage
        prompt = len(seq.request.prompt)
        cached = min(hit * size, prompt)
        seq = evolve(seq, cached=cached) if cached else seq
    seat = seated(config, seq, state.next_gen, state.free_rows[-1], table, chain, start)
    waited, copied = state.time - seq.arrived, copy.count if copy else 0
    admitted = Admitted(*seq.id, waited, hit * size, known, copied, cached, prompt)
    reasons = (admitted, Missed(*seq.id, hit, full)) if hit < full else (admitted,)
    if not seq.preempted:
        now = load(config, state, others)
        state = consult.admitted(config, state, seq.place[0], seq.request, now)
    return _let_in(state, seq, draft.done()), Newcomer(seat, copy, reasons)


def uncached(config: EngineConfig, seq: Sequence, *, alone: bool) -> int:
    """How many blocks it takes to let `seq` in if nothing of it is cached; `alone`:
    nobody else runs.
    """
    size, known = config.block_size, len(seq.history)
    # If its blocks are full, it needs one more in its second step, or is sent back from
    # its first.
    ends = min(len(seq.request.prompt) + seq.request.max_tokens, config.max_model_len)
    one_more = known % size == 0 and known + 1 < ends
    spare = 0 if alone else max(config.watermark, one_more)
    return -(-known // size) + spare


def needed(config: EngineConfig, blocks: Blocks, seq: Sequence, *, alone: bool) -> int:
    """How many of the available blocks it takes to let `seq` in.

    Its cached blocks on which others stand cost nothing; those that are idle are
    available blocks like any other until it stands on them. So this falls when a
    neighbour publishes the same prefix, without any block being freed. It is O(log n) in
    the length of the prompt: what is live of a path in the forest is its beginning.
    """
    size = config.block_size
    full = (len(seq.history) - 1) // size
    if config.window:
        hit = lookup_window(blocks, seq.keys, full, config.window, size)
        low = outside(hit * size, config.window, size)
        free_of_charge = hit - sum(not live(blocks, key) for key in seq.keys[low:hit])
    else:
        free_of_charge = bisect_left(
            seq.keys, True, hi=full, key=lambda key: not live(blocks, key)
        )
    return uncached(config, seq, alone=alone) - free_of_charge


def _hit(
    config: EngineConfig, state: EngineState, draft: Draft, keys: Keys, full: int
) -> tuple[int, int, tuple[int, ...], int]:
    """Take hold of what is cached of the first `full` blocks.

    Returns how many are out of the window, how many count as hit, the table so far, and
    the leaf.
    """
    if not config.window:
        hit = lookup(state.blocks, keys, full)
        leaf = state.blocks.index[keys[hit - 1]] if hit else ROOT
        draft.hold(leaf)
        return 0, hit, _prefix(config.thresholds, state, keys, hit, leaf), leaf
    size = config.block_size
    hit = lookup_window(state.blocks, keys, full, config.window, size)
    low = outside(hit * size, config.window, size)
    found = tuple(map(state.blocks.index.__getitem__, keys[low:hit]))
    for block in found:
        draft.hold(block)
    return low, hit, (ROOT,) * low + found, ROOT


def _prefix(
    thresholds: Thresholds, state: EngineState, keys: Keys, hit: int, leaf: int
) -> tuple[int, ...]:
    """The blocks of the first `hit` keys, the last of which is `leaf`.

    A path in the forest is unique: if a neighbour stands on `leaf` at that place, its
    table has them all, and requests that share a long prefix tend to come together.
    """
    long = hit >= thresholds.long_prefix
    for table in state.running.tables[-thresholds.neighbours :] if long else ():
        if len(table) > hit and table[hit - 1] == leaf:
            return table[:hit]
    return tuple(map(state.blocks.index.__getitem__, islice(keys, hit)))


def _let_in(state: EngineState, seq: Sequence, blocks: Blocks) -> EngineState:
    line, rows = state.waiting.remove(seq.place), state.free_rows[:-1]
    gen, stops = state.next_gen + 1, state.stops | seq.request.stop_ids
    return evolve(
        state, blocks=blocks, waiting=line, free_rows=rows, next_gen=gen, stops=stops
    )
