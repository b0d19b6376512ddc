"""How a sequence takes a seat, publishes what it computed, and leaves."""

from collections.abc import Iterable
from itertools import compress

from minfer.blocks import Draft, outside
from minfer.config import EngineConfig
from minfer.keys import Key, block_key, extend_keys
from minfer.log import Log
from minfer.messages import Preempted, Reason
from minfer.record import evolve
from minfer.sequence import Chain, Running, SampleId, Sequence, edited, tail_of, tokens_of, without
from minfer.state import EngineState, Fence


def last_index(config: EngineConfig, seq: Sequence) -> int:
    """The index of the last token that the sequence may have."""
    request = seq.request
    return min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1


def spread(config: EngineConfig, tokens: int) -> int:
    """How many blocks a turn of `tokens` new tokens handles, of those that can wait.

    Four times what fills in a turn on average: a crowd is served within a quarter of a block's
    time, and a turn stays near its usual cost.
    """
    return max(2, 4 * tokens // config.block_size)


def mark_of(config: EngineConfig, entries: int, last: int) -> int:
    """The position from which a table of `entries` blocks should grow, or the last one of all.

    A quarter block early: growth that may come at any of several steps can be spread over them
    when many tables end at once.
    """
    return min(last, entries * config.block_size - config.block_size // 4)


def ripe_at(config: EngineConfig, blocks: int, last: int) -> int:
    """How many tokens must be known to fill more than `blocks` blocks, or to have the last one."""
    return min(last, (blocks + 1) * config.block_size) + 1


def seated(
    config: EngineConfig,
    seq: Sequence,
    gen: int,
    row: int,
    table: Log[int],
    chain: Chain,
    start: int,
) -> Running:
    """A new generation of `seq` as columns of one entry; KV below `start` is there or copied."""
    base, size = len(seq.history), config.block_size
    last = last_index(config, seq)
    whole = base // size
    return Running(
        (seq,), (seq.id,), (gen,), (row,), (start,), (base,), (base,), (start,), (last,),
        (ripe_at(config, whole, last),), (mark_of(config, len(table), last),), (table,), (chain,),
        (seq.history[whole * size :],), ((),),
    )  # fmt: skip


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


def named(
    chain: Chain, tail: tuple[int, ...], root: Key, upto: int, block_size: int
) -> tuple[Chain, tuple[int, ...]]:
    """Give the sequence's full blocks below `upto` their keys; their tokens leave the tail."""
    if upto <= len(chain.keys):
        return chain, tail
    keys, chunks = chain.keys, chain.chunks
    while len(keys) < upto:
        tokens, tail = tail[:block_size], tail[block_size:]
        keys += (block_key(keys[len(keys) - 1] if keys else root, tokens),)
        chunks += (tokens,)
    return evolve(chain, keys=keys, chunks=chunks), tail


def sealed(config: EngineConfig, state: EngineState, upto: dict[int, int]) -> EngineState:
    """Publish full blocks of running sequences: position -> the number of blocks with KV.

    A block whose content is cached already, by somebody who computed the same at the same time,
    stays private, and so does what follows it, until the sequence leaves: standing on the cached
    twin as well would cost the pool more than the sequence's own table, which is all that
    admission has promised to fit.
    """
    run, size = state.running, config.block_size
    upto = {i: count for i, count in upto.items() if count > run.chains[i].sealed}
    if not upto:
        return state
    draft = Draft(state.blocks)
    chains: dict[int, Chain] = {}
    tails, ripe = {}, {}
    for i, count in upto.items():
        root = run.seqs[i].request.root
        chain, tails[i] = named(run.chains[i], tail_of(run, i), root, count, size)
        new = slice(chain.sealed, count)
        if config.window:
            chain = _slid(config, draft, chain, run.tables[i], count, committed(config, state, i))
        elif chain.keys[chain.sealed] not in draft.index:
            leaf, _ = draft.publish(chain.leaf, chain.keys[new], run.tables[i][new])
            chain = evolve(chain, sealed=count, leaf=leaf)
        chains[i] = chain
        ripe[i] = ripe_at(config, max(count, run.base[i] // size), run.last[i])
    run = edited(run, chains=chains, tails=tails, fresh=dict.fromkeys(tails, ()), ripe=ripe)
    return evolve(state, blocks=draft.done(), running=run)


def _slid(
    config: EngineConfig, draft: Draft, chain: Chain, table: Log[int], count: int, position: int
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


def held(chain: Chain, table: Log[int], window: int) -> tuple[int, ...]:
    """The published blocks on which a sequence stands."""
    return table[chain.low : chain.sealed] if window else (chain.leaf,)


def _parted(
    config: EngineConfig, draft: Draft, chain: Chain, table: Log[int], upto: int
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
    gone = sorted(gone)
    run, draft, size = state.running, Draft(state.blocks), config.block_size
    fences = []
    until = state.inflight[-1].step if state.inflight else None
    for i in gone:
        upto = committed(config, state, i) // size
        root, table = run.seqs[i].request.root, run.tables[i]
        chain, _ = named(run.chains[i], tail_of(run, i), root, upto, size)
        fence = Fence(-1 if until is None else until, *_parted(config, draft, chain, table, upto))
        if until is None:
            _open(draft, fence)
        else:
            fences.append(fence)
    return evolve(
        state,
        blocks=draft.done(),
        running=without(run, gone),
        fences=(*state.fences, *fences),
        free_rows=(*state.free_rows, *(run.rows[i] for i in gone)),
    )


def _open(draft: Draft, fence: Fence) -> None:
    """Give back what a fence held off."""
    for block in reversed(fence.held):  # the last ones are evicted first: they are used the least
        draft.release(block)
    draft.give(fence.private)


def open_fences(state: EngineState, step: int | None) -> EngineState:
    """Free what was fenced off until `step` or before; all of it if `step` is None."""
    if not state.fences:
        return state
    draft, kept = Draft(state.blocks), []
    for fence in state.fences:
        if step is None or fence.until <= step:
            _open(draft, fence)
        else:
            kept.append(fence)
    return evolve(state, blocks=draft.done(), fences=tuple(kept))


def preempt(
    config: EngineConfig, state: EngineState, i: int, by: SampleId
) -> tuple[EngineState, Reason]:
    """Send a running sequence back in line, at its place or before it, with all it knows."""
    run = state.running
    seq, tokens = run.seqs[i], tokens_of(run, i, config.block_size)
    keys = extend_keys(tuple(run.chains[i].keys), seq.request.root, tokens, config.block_size)
    rank, arrival, sample = seq.place
    done = len(tokens) - len(seq.request.prompt)
    again = config.policy.again(state.policy, rank, seq.request, seq.arrived, done)
    place = (min(rank, again), arrival, sample)
    back = evolve(seq, history=tokens, keys=keys, preempted=seq.preempted + 1, place=place)
    reason = Preempted(*seq.id, by, len(tokens), committed(config, state, i))
    state = retire(config, state, (i,))
    return evolve(state, waiting=state.waiting.insert(back), held=None), reason


def restart(config: EngineConfig, state: EngineState, spots: Iterable[int]) -> EngineState:
    """Begin new generations in place, from committed KV: what was in flight never happened."""
    run, size, gen = state.running, config.block_size, state.next_gen
    cells: dict[str, dict[int, object]] = {}
    for i in sorted(spots):
        seq, tokens, chain = run.seqs[i], tokens_of(run, i, size), run.chains[i]
        keys = extend_keys(tuple(chain.keys), seq.request.root, tokens, size)
        one = seated(
            config,
            evolve(seq, history=tokens, keys=keys),
            gen,
            run.rows[i],
            run.tables[i],
            Chain(Log(keys), chain.sealed, chain.leaf, low=chain.low),
            committed(config, state, i),
        )
        gen += 1
        for name in ("seqs", "gens", "starts", "base", "sched", "ripe", "chains", "tails", "fresh"):
            cells.setdefault(name, {})[i] = getattr(one, name)[0]
    return evolve(state, running=edited(run, **cells), next_gen=gen)
