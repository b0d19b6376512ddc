"""How a sequence takes a seat, publishes what it computed, and leaves."""

from collections.abc import Iterable
from itertools import compress

from minfer import consult
from minfer.blocks import Draft, outside
from minfer.config import EngineConfig
from minfer.keys import block_key, extend_keys
from minfer.log import Log
from minfer.messages import Finished, Preempted, Reason
from minfer.record import evolve
from minfer.sequence import Chain, Running, SampleId, Sequence, Table, edited, without
from minfer.state import EngineState, Fence

Why = tuple[str, str]  # the reason of an end, and the error if there is one


def spread(config: EngineConfig, tokens: int) -> int:
    """Blocks, of those that can wait, that a turn handles: four times what `tokens` fill."""
    return max(2, 4 * tokens // config.block_size)


def mark_of(config: EngineConfig, entries: int, last: int) -> int:
    """The position from which a table of `entries` blocks should grow: a quarter block early.

    So growth can be spread over steps when many tables end at once. At most the last position.
    """
    return min(last, entries * config.block_size - config.block_size // 4)


def ripe_at(config: EngineConfig, blocks: int, last: int) -> int:
    """How many tokens must be known to fill more than `blocks` blocks, or to have the last one."""
    return min(last, (blocks + 1) * config.block_size) + 1


def seated(
    config: EngineConfig, seq: Sequence, gen: int, row: int, table: Table, chain: Chain, start: int
) -> Running:
    """A new generation of `seq` as columns of one entry; KV below `start` is there or copied."""
    request, base, size = seq.request, len(seq.history), config.block_size
    last = min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1
    whole = base // size
    return Running(
        (seq,), (seq.id,), (gen,), (row,), (start,), (base,), (base,), (start,), (last,),
        (ripe_at(config, whole, last),), (mark_of(config, len(table), last),), (table,), (chain,),
        (seq.history[whole * size :],), ((),))  # fmt: skip


def committed(config: EngineConfig, state: EngineState, i: int) -> int:
    """Positions of KV that the sequence at `i` has for certain, plans in flight left out."""
    run = state.running
    if run.known[i] > run.base[i]:
        return run.known[i] - 1
    gen = run.gens[i]
    for plan in state.inflight:
        if gen in plan.gens:
            start = plan.starts[plan.gens.index(gen)]
            # A copied tail is KV only once the plan that copies it is committed.
            into = run.tables[i][start // config.block_size]
            copied = any(copy.target == into for copy in plan.copies)
            return run.chains[i].sealed * config.block_size if copied else start
    return run.sched[i]


def named(config: EngineConfig, run: Running, i: int, upto: int) -> tuple[Chain, tuple[int, ...]]:
    """Give keys to the full blocks of `i` below `upto`; their tokens leave the tail."""
    chain, tail, root = run.chains[i], run.tails[i] + run.fresh[i], run.seqs[i].request.root
    if upto <= len(chain.keys):
        return chain, tail
    block_size, recent = config.block_size, config.thresholds.recent_entries
    keys, chunks = chain.keys, chain.chunks
    while len(keys) < upto:
        tokens, tail = tail[:block_size], tail[block_size:]
        key = block_key(keys[len(keys) - 1] if keys else root, tokens)
        keys, chunks = keys.extended((key,), recent), chunks.extended((tokens,), recent)
    return evolve(chain, keys=keys, chunks=chunks), tail


def sealed(config: EngineConfig, state: EngineState, upto: dict[int, int]) -> EngineState:
    """Publish full blocks of running sequences: position -> the number of blocks with KV.

    A block whose content is cached already, by somebody who computed the same at the same time,
    stays private, as does what follows it, until the sequence leaves: admission promised its own
    table a place, not the twin as well.
    """
    run = state.running
    upto = {i: count for i, count in upto.items() if count > run.chains[i].sealed}
    if not upto:
        return state
    draft, chains, tails, ripe = Draft(state.blocks), {}, {}, {}
    for i, count in upto.items():
        chain, tails[i] = named(config, run, i, count)
        new = slice(chain.sealed, count)
        if config.window:
            chain = _slid(config, draft, chain, run.tables[i], count, committed(config, state, i))
        elif chain.keys[chain.sealed] not in draft.index:
            leaf, _ = draft.publish(chain.leaf, chain.keys[new], run.tables[i][new])
            chain = evolve(chain, sealed=count, leaf=leaf)
        chains[i] = chain
        ripe[i] = ripe_at(config, max(count, run.base[i] // config.block_size), run.last[i])
    run = edited(run, chains=chains, tails=tails, fresh=dict.fromkeys(tails, ()), ripe=ripe)
    return evolve(state, blocks=draft.done(), running=run)


def _slid(
    config: EngineConfig, draft: Draft, chain: Chain, table: Table, count: int, position: int
) -> Chain:
    """Publish a sequence's full blocks below `count`; give back what is behind its window."""
    low = outside(position, config.window, config.block_size)
    sealed = chain.sealed
    while sealed < count and draft.publish_alone(chain.keys[sealed], table[sealed]):
        sealed += 1
    for block in table[chain.low : min(low, sealed)]:
        draft.release(block)
    draft.give(table[max(chain.low, sealed) : low])
    return evolve(chain, sealed=max(sealed, low), low=max(chain.low, low))


def held(chain: Chain, table: Table, window: int) -> tuple[int, ...]:
    """The published blocks on which a sequence stands."""
    return table[chain.low : chain.sealed] if window else (chain.leaf,)


def _parted(
    config: EngineConfig, draft: Draft, chain: Chain, table: Table, upto: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Publish what a leaving sequence computed; returns the blocks it holds, and its private."""
    new = slice(chain.sealed, max(upto, chain.sealed))
    if not config.window:
        leaf, twins = draft.publish(chain.leaf, chain.keys[new], table[new])
        return (leaf,), twins + table[new.stop :]
    named = tuple(map(draft.publish_alone, chain.keys[new], table[new]))
    twins = tuple(block for block, is_new in zip(table[new], named, strict=True) if not is_new)
    mine = tuple(compress(table[new], named))
    return held(chain, table, config.window) + mine, twins + table[new.stop :]


def retire(config: EngineConfig, state: EngineState, gone: Iterable[int]) -> EngineState:
    """Take sequences out of the running ones: publish what is committed, give back the rest.

    What a plan in flight may still write to stays behind a fence until that plan is over.
    """
    run, draft, fences, gone = state.running, Draft(state.blocks), [*state.fences], sorted(gone)
    until = state.inflight[-1].step if state.inflight else None
    for i in gone:
        upto = committed(config, state, i) // config.block_size
        chain, _ = named(config, run, i, upto)
        blocks = _parted(config, draft, chain, run.tables[i], upto)
        if until is None:
            _give_back(draft, *blocks)
        else:
            fences.append(Fence(until, *blocks))
    rows = (*state.free_rows, *(run.rows[i] for i in gone))
    run, fenced = without(run, gone), tuple(fences)
    return evolve(state, blocks=draft.done(), running=run, fences=fenced, free_rows=rows)


def _give_back(draft: Draft, held: tuple[int, ...], private: tuple[int, ...]) -> None:
    for block in reversed(held):  # the last ones are evicted first: they are used the least
        draft.release(block)
    draft.give(private)


def open_fences(state: EngineState, step: int | None) -> EngineState:
    """Free what was fenced off until `step` or before; all of it if `step` is None."""
    if not state.fences:
        return state
    draft, kept = Draft(state.blocks), []
    for fence in state.fences:
        if step is None or fence.until <= step:
            _give_back(draft, fence.held, fence.private)
        else:
            kept.append(fence)
    return evolve(state, blocks=draft.done(), fences=tuple(kept))


def end(
    config: EngineConfig, state: EngineState, ended: dict[int, Why]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """End running sequences: position -> why. Their blocks stay cached."""
    run, finished = state.running, []
    for i, why in sorted(ended.items()):
        state, done = count_out(config, state, run.seqs[i], run.known[i], why, ran=True)
        finished.append(done)
    return retire(config, state, ended), tuple(finished)


def count_out(
    config: EngineConfig, state: EngineState, seq: Sequence, known: int, why: Why, *, ran: bool
) -> tuple[EngineState, Finished]:
    """Count a sample as ended, with `known` tokens; its request goes with the last one."""
    request, live = seq.request, state.requests[seq.request.id]
    output = known - len(request.prompt)
    if live.ended + 1 == live.samples:
        requests = state.requests.delete(request.id)
    else:
        requests = state.requests.set(request.id, evolve(live, ended=live.ended + 1))
    state = consult.ended(config, state, request, output, ran=ran)
    faults = tuple(fault for fault in state.faults if fault[0] != seq.id)
    state = evolve(state, requests=requests, faults=faults)
    return state, Finished(*seq.id, why[0], output, why[1], seq.cached)


def _anew(config: EngineConfig, run: Running, i: int) -> Sequence:
    """The sequence at `i`, all that it knows as its history."""
    seq, tokens = run.seqs[i], run.tokens(i, config.block_size)
    keys = extend_keys(tuple(run.chains[i].keys), seq.request.root, tokens, config.block_size)
    return evolve(seq, history=tokens, keys=keys)


def preempt(
    config: EngineConfig, state: EngineState, i: int, by: SampleId
) -> tuple[EngineState, Reason]:
    """Send a running sequence back in line, at its place or before it, with all it knows."""
    seq = _anew(config, state.running, i)
    rank, arrival, sample = seq.place
    done = len(seq.history) - len(seq.request.prompt)
    rank, state = consult.again(config, state, rank, seq.request, seq.arrived, done)
    back = evolve(seq, preempted=seq.preempted + 1, place=(rank, arrival, sample))
    reason = Preempted(*seq.id, by, len(seq.history), committed(config, state, i))
    state = retire(config, state, (i,))
    return evolve(state, waiting=state.waiting.insert(back), held=None), reason


def restart(config: EngineConfig, state: EngineState, spots: list[int]) -> EngineState:
    """Begin new generations in place, from committed KV: what was in flight never happened."""
    run = state.running
    cells: dict[str, dict[int, object]] = {}
    for gen, i in enumerate(spots, state.next_gen):
        seq, old, start = _anew(config, run, i), run.chains[i], committed(config, state, i)
        chain = Chain(Log(seq.keys), old.sealed, old.leaf, low=old.low)
        one = seated(config, seq, gen, run.rows[i], run.tables[i], chain, start)
        for name in ("seqs", "gens", "starts", "base", "sched", "ripe", "chains", "tails", "fresh"):
            cells.setdefault(name, {})[i] = getattr(one, name)[0]
    return evolve(state, running=edited(run, **cells), next_gen=state.next_gen + len(spots))
