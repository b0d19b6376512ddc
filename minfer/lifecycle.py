"""How a sequence takes a seat, publishes what it computed, and leaves."""

from collections.abc import Iterable
from typing import Final

from attrs import evolve

from minfer.blocks import Blocks, give, publish, release
from minfer.config import EngineConfig
from minfer.keys import Key, block_key, extend_keys
from minfer.messages import Preempted, Reason
from minfer.sequence import Chain, Running, SampleId, Sequence, edited, tokens_of, without
from minfer.state import EngineState, Fence

NEVER: Final = 2**62  # a position that no sequence reaches


def last_index(config: EngineConfig, seq: Sequence) -> int:
    """The index of the last token that the sequence may have."""
    request = seq.request
    return min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1


def mark_of(config: EngineConfig, entries: int, last: int) -> int:
    """The position from which a table of `entries` blocks should grow.

    A quarter block early: growth that may come at any of several steps can be spread over them
    when many tables end at once.
    """
    capacity = entries * config.block_size
    return capacity - config.block_size // 4 if capacity < last else NEVER


def seated(
    config: EngineConfig,
    seq: Sequence,
    gen: int,
    row: int,
    table: tuple[int, ...],
    chain: Chain,
    start: int,
) -> Running:
    """A new generation of `seq` as columns of one entry; KV below `start` is there or copied."""
    base, size = len(seq.history), config.block_size
    last = last_index(config, seq)
    whole = base // size
    return Running(
        (seq,), (seq.id,), (gen,), (row,), (start,), (base,), (base,), (start,), (last,),
        ((whole + 1) * size + 1,), (mark_of(config, len(table), last),), (table,), (chain,),
        (seq.history[whole * size :],),
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
            first = start == run.starts[i]
            return run.chains[i].sealed * config.block_size if first else start
    return run.sched[i]


def seal(
    blocks: Blocks,
    chain: Chain,
    table: tuple[int, ...],
    tail: tuple[int, ...],
    root: Key,
    upto: int,
    block_size: int,
) -> tuple[Blocks, Chain, tuple[int, ...]]:
    """Publish the sequence's full blocks below block `upto`, whose KV must be committed."""
    if upto <= chain.sealed:
        return blocks, chain, tail
    keys, chunks = chain.keys, chain.chunks
    while len(keys) < upto:  # blocks of sampled tokens get their keys here
        tokens, tail = tail[:block_size], tail[block_size:]
        keys += (block_key(keys[-1] if keys else root, tokens),)
        chunks += (tokens,)
    new = slice(chain.sealed, upto)
    blocks, leaf, twins = publish(blocks, chain.leaf, keys[new], table[new])
    return blocks, Chain(keys, upto, leaf, chain.twins + twins, chunks), tail


def sealed(config: EngineConfig, state: EngineState, upto: dict[int, int]) -> EngineState:
    """Seal several running sequences: position -> the number of leading blocks to be sealed."""
    run, blocks, size = state.running, state.blocks, config.block_size
    chains, tails, ripe = {}, {}, {}
    for i, count in upto.items():
        root = run.seqs[i].request.root
        blocks, chains[i], tails[i] = seal(
            blocks, run.chains[i], run.tables[i], run.tails[i], root, count, size
        )
        ripe[i] = (max(count, run.base[i] // size) + 1) * size + 1
    run = edited(run, chains=chains, tails=tails, ripe=ripe)
    return evolve(state, blocks=blocks, running=run)


def retire(config: EngineConfig, state: EngineState, gone: Iterable[int]) -> EngineState:
    """Take sequences out of the running ones: publish what is committed, give back the rest.

    What a plan in flight may still write to stays behind a fence until that plan is over.
    """
    gone = sorted(gone)
    size = config.block_size
    state = sealed(config, state, {i: committed(config, state, i) // size for i in gone})
    run, blocks, fences = state.running, state.blocks, []
    until = state.inflight[-1].step if state.inflight else None
    for i in gone:
        chain = run.chains[i]
        private = chain.twins + run.tables[i][chain.sealed :]
        if until is None:
            blocks = give(release(blocks, chain.leaf), private)
        else:
            fences.append(Fence(until, chain.leaf, private))
    return evolve(
        state,
        blocks=blocks,
        running=without(run, gone),
        fences=(*state.fences, *fences),
        free_rows=(*state.free_rows, *(run.rows[i] for i in gone)),
    )


def open_fences(state: EngineState, step: int | None) -> EngineState:
    """Free what was fenced off until `step` or before; all of it if `step` is None."""
    if not state.fences:
        return state
    blocks, kept = state.blocks, []
    for fence in state.fences:
        if step is None or fence.until <= step:
            blocks = give(release(blocks, fence.leaf), fence.private)
        else:
            kept.append(fence)
    return evolve(state, blocks=blocks, fences=tuple(kept))


def preempt(
    config: EngineConfig, state: EngineState, i: int, by: SampleId
) -> tuple[EngineState, Reason]:
    """Send a running sequence back to its place in line, with all it knows."""
    run = state.running
    seq, tokens = run.seqs[i], tokens_of(run, i, config.block_size)
    keys = extend_keys(run.chains[i].keys, seq.request.root, tokens, config.block_size)
    back = evolve(seq, history=tokens, keys=keys, preempted=seq.preempted + 1)
    reason = Preempted(*seq.id, by, len(tokens), committed(config, state, i))
    state = retire(config, state, (i,))
    return evolve(state, waiting=state.waiting.insert(back), held=None), reason


def restart(config: EngineConfig, state: EngineState, spots: Iterable[int]) -> EngineState:
    """Begin new generations in place, from committed KV: what was in flight never happened."""
    run, size, gen = state.running, config.block_size, state.next_gen
    cells: dict[str, dict[int, object]] = {}
    for i in sorted(spots):
        seq, tokens, chain = run.seqs[i], tokens_of(run, i, size), run.chains[i]
        keys = extend_keys(chain.keys, seq.request.root, tokens, size)
        one = seated(
            config,
            evolve(seq, history=tokens, keys=keys),
            gen,
            run.rows[i],
            run.tables[i],
            evolve(chain, keys=keys, chunks=()),
            committed(config, state, i),
        )
        gen += 1
        for name in ("seqs", "gens", "starts", "base", "sched", "ripe", "chains", "tails"):
            cells.setdefault(name, {})[i] = getattr(one, name)[0]
    return evolve(state, running=edited(run, **cells), next_gen=gen)
