"""How a sequence takes a seat, publishes what it computed, and leaves."""

from collections.abc import Collection, Iterable
from itertools import compress

from attrs import frozen

from minfer import consult
from minfer.blocks import Draft, outside
from minfer.config import EngineConfig
from minfer.keys import Key, block_key, extend_keys
from minfer.messages import Finished, Preempted, Reason
from minfer.pmap import Map
from minfer.policy import Rank
from minfer.record import evolve
from minfer.sequence import Chain, Running, SampleId, Sequence, Table, edited, without
from minfer.state import EngineState, Fence, Live


def spread(config: EngineConfig, tokens: int) -> int:
    """Blocks, of those that can wait, that a turn handles: four times what
    `tokens` fill.
    """
    return max(2, 4 * tokens // config.block_size)


def mark_of(config: EngineConfig, entries: int, last: int) -> int:
    """The position from which a table of `entries` blocks should grow: a quarter block
    early.

    So growth can be spread over steps when many tables end at once. At most the last
    position.
    """
    return min(last, entries * config.block_size - config.block_size // 4)


def ripe_at(config: EngineConfig, blocks: int, last: int) -> int:
    """How many tokens must be known to fill more than `blocks` blocks, or to have the
    last one.
    """
    return min(last, (blocks + 1) * config.block_size) + 1


def seated(
    config: EngineConfig,
    seq: Sequence,
    gen: int,
    row: int,
    table: Table,
    chain: Chain,
    start: int,
) -> Running:
    """A new generation of `seq` as columns of one entry; KV below `start` is there or
    copied.
    """
    request, base, size = seq.request, len(seq.history), config.block_size
    last = min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1
    whole = base // size
    return Running(
        (seq,),
        (seq.id,),
        (gen,),
        (row,),
        (start,),
        (base,),
        (base,),
        (start,),
        (last,),
        (ripe_at(config, whole, last),),
        (mark_of(config, len(table), last),),
        (table,),
        (chain,),
        (seq.history[whole * size :],),
        ((),),
    )


def committed(config: EngineConfig, state: EngineState, i: int) -> int:
    """Positions of KV that the sequence at `i` has for certain, plans in
    flight left out.
    """
    return all_committed(config, state, (i,))[i]


def all_committed(
    config: EngineConfig, state: EngineState, spots: Collection[int]
) -> dict[int, int]:
    """Positions of KV that each of the sequences at `spots` has for certain."""
    run = state.running
    sure = {i: run.known[i] - 1 for i in spots}
    # What has not yielded since its generation began has what its first plan in flight
    # starts from.
    rest = {run.gens[i]: i for i in spots if run.known[i] == run.base[i]}
    for i in rest.values():
        sure[i] = run.sched[i]
    for plan in reversed(state.inflight) if rest else ():
        copied = {copy.target for copy in plan.copies}
        for gen, start in zip(plan.gens, plan.starts, strict=True):
            if gen in rest:
                i = rest[gen]
                # A copied tail is KV only once the plan that copies it is committed.
                into = copied and run.tables[i][start // config.block_size] in copied
                sure[i] = run.chains[i].sealed * config.block_size if into else start
    return sure


def named(
    config: EngineConfig, run: Running, i: int, upto: int
) -> tuple[Chain, tuple[int, ...]]:
    """Give keys to the full blocks of `i` below `upto`; their tokens leave the tail."""
    chain, tail = run.chains[i], run.tails[i] + run.fresh[i]
    have, size, recent = (
        len(chain.keys),
        config.block_size,
        config.thresholds.recent_entries,
    )
    if upto <= have:
        return chain, tail
    parent = chain.keys[have - 1] if have else run.seqs[i].request.root
    keys, chunks, end = list[Key](), list[tuple[int, ...]](), (upto - have) * size
    for start in range(0, end, size):
        chunks.append(tail[start : start + size])
        parent = block_key(parent, chunks[-1])
        keys.append(parent)
    every, told = (
        chain.keys.extended((*keys,), recent),
        chain.chunks.extended((*chunks,), recent),
    )
    return Chain(every, chain.sealed, chain.leaf, told, chain.low), tail[end:]


def sealed(config: EngineConfig, state: EngineState, upto: dict[int, int]) -> EngineState:
    """Publish full blocks of running sequences: position -> the number of blocks with KV.

    A block whose content is cached already, by somebody who computed the same at the same
    time, stays private, as does what follows it, until the sequence leaves: admission
    promised its own table a place, not the twin as well.
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
            chain = _slid(
                config, draft, chain, run.tables[i], count, committed(config, state, i)
            )
        elif (keys := chain.keys[new])[0] not in draft.index:
            leaf, _ = draft.publish(chain.leaf, keys, run.tables[i][new])
            chain = Chain(chain.keys, count, leaf, chain.chunks, chain.low)
        chains[i] = chain
        ripe[i] = ripe_at(
            config, max(count, run.base[i] // config.block_size), run.last[i]
        )
    run = edited(
        run, chains=chains, tails=tails, fresh=dict.fromkeys(tails, ()), ripe=ripe
    )
    return evolve(state, blocks=draft.done(), running=run)


def _slid(
    config: EngineConfig,
    draft: Draft,
    chain: Chain,
    table: Table,
    count: int,
    position: int,
) -> Chain:
    """Publish a sequence's full blocks below `count`; give back what is behind its
    window.
    """
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
    """Publish what a leaving sequence computed; returns the blocks it holds, and its
    private.
    """
    new = slice(chain.sealed, upto)
    if not config.window:
        leaf, twins = draft.publish(chain.leaf, chain.keys[new], table[new])
        return (leaf,), twins + table[new.stop :]
    named = tuple(map(draft.publish_alone, chain.keys[new], table[new]))
    twins = tuple(
        block for block, is_new in zip(table[new], named, strict=True) if not is_new
    )
    mine = tuple(compress(table[new], named))
    return held(chain, table, config.window) + mine, twins + table[new.stop :]


def retire(
    config: EngineConfig, state: EngineState, gone: Collection[int]
) -> EngineState:
    """Take sequences out of the running ones: publish what is committed, give back the
    rest.

    In the order of `gone`. What a plan in flight may still write to stays behind a fence
    until that plan is over.
    """
    if not gone:
        return state
    run, draft, fences = state.running, Draft(state.blocks), [*state.fences]
    until = state.inflight[-1].step if state.inflight else None
    for i, sure in all_committed(config, state, gone).items():
        upto, chain = sure // config.block_size, run.chains[i]
        if upto > chain.sealed:
            chain, _ = named(config, run, i, upto)
            blocks = _parted(config, draft, chain, run.tables[i], upto)
        else:  # all that it computed is published
            table = run.tables[i]
            blocks = held(chain, table, config.window), table[chain.sealed :]
        if until is None:
            _give_back(draft, *blocks)
        else:
            fences.append(Fence(until, *blocks))
    rows = (*state.free_rows, *(run.rows[i] for i in gone))
    run, fenced = without(run, sorted(gone)), tuple(fences)
    return evolve(state, blocks=draft.done(), running=run, fences=fenced, free_rows=rows)


def _give_back(draft: Draft, held: tuple[int, ...], private: tuple[int, ...]) -> None:
    for block in reversed(
        held
    ):  # the last ones are evicted first: they are used the least
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


@frozen
class Leaver:
    """A sample that ends, where it is."""

    seq: Sequence
    known: int  # tokens, up to where it is to end
    reason: str
    error: str = ""
    at: int | None = None  # position among the running, if it runs


def leaver(run: Running, i: int, reason: str, error: str = "") -> Leaver:
    """The running sample at `i`, to end with all that it knows."""
    return Leaver(run.seqs[i], run.known[i], reason, error, i)


def end(
    config: EngineConfig, state: EngineState, leavers: Iterable[Leaver]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """End samples, in this order, wherever they are; the blocks of those that run stay
    cached.

    The line, the columns and the requests are changed once for all of them.
    """
    leavers = tuple(leavers)
    state, finished = _counted_out(config, state, leavers)
    waiting = [one.seq.place for one in leavers if one.at is None]
    if waiting:
        state = evolve(state, waiting=state.waiting.remove_many(waiting))
    return retire(
        config, state, [one.at for one in leavers if one.at is not None]
    ), finished


def _counted_out(
    config: EngineConfig, state: EngineState, leavers: Iterable[Leaver]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """Count samples as ended; a request goes with its last one."""
    requests, finished, gone = state.requests.mutate(), list[Finished](), set[SampleId]()
    for one in leavers:
        seq, request = one.seq, one.seq.request
        live, output = requests[request.id], one.known - len(request.prompt)
        if live.ended + 1 == live.samples:
            del requests[request.id]
        else:
            requests[request.id] = evolve(live, ended=live.ended + 1)
        ran = one.at is not None or seq.preempted > 0
        state = consult.ended(config, state, request, output, ran=ran)
        finished.append(Finished(*seq.id, one.reason, output, one.error, seq.cached))
        gone.add(seq.id)
    faults = tuple(fault for fault in state.faults if fault[0] not in gone)
    return evolve(state, requests=requests.finish(), faults=faults), tuple(finished)


def _anew(config: EngineConfig, run: Running, i: int) -> Sequence:
    """The sequence at `i`, all that it knows as its history."""
    seq, tokens = run.seqs[i], run.tokens(i, config.block_size)
    keys = extend_keys(
        tuple(run.chains[i].keys), seq.request.root, tokens, config.block_size
    )
    return evolve(seq, history=tokens, keys=keys)


def preempt(
    config: EngineConfig, state: EngineState, i: int, by: SampleId
) -> tuple[EngineState, Reason]:
    """Send a running sequence back in line, at its place or before it, with
    all it knows.
    """
    seq = _anew(config, state.running, i)
    rank, arrival, sample = seq.place
    done = len(seq.history) - len(seq.request.prompt)
    rank, state = consult.again(config, state, rank, seq.request, seq.arrived, done)
    back = evolve(seq, preempted=seq.preempted + 1, place=(rank, arrival, sample))
    reason = Preempted(*seq.id, by, len(seq.history), committed(config, state, i))
    if rank != seq.place[0]:
        state = evolve(state, requests=_moved(state.requests, seq, rank))
    state = retire(config, state, (i,))
    return evolve(state, waiting=state.waiting.insert(back), held=None), reason


def _moved(requests: Map[str, Live], seq: Sequence, rank: Rank) -> Map[str, Live]:
    """Remember the rank that a sample has got, so that it can be found in line."""
    live = requests[seq.request.id]
    moved = {**dict(live.moved), seq.sample: rank}
    return requests.set(seq.request.id, evolve(live, moved=tuple(moved.items())))


def restart(config: EngineConfig, state: EngineState, spots: list[int]) -> EngineState:
    """Begin new generations in place, from committed KV: what was in flight never
    happened.

    What they know stays where it is; the next plans carry what is not yet computed of it.
    """
    run, size = state.running, config.block_size
    starts = all_committed(config, state, spots)
    run = edited(
        run,
        gens={i: gen for gen, i in enumerate(spots, state.next_gen)},
        starts=starts,
        base={i: run.known[i] for i in spots},
        sched=starts,
        ripe={i: ripe_at(config, run.known[i] // size, run.last[i]) for i in spots},
    )
    return evolve(state, running=run, next_gen=state.next_gen + len(spots), filling=True)
