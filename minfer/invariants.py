"""The specification, executable: what must hold of a state, and of a turn.

`check` looks at one state and costs what exists; `check_turn` looks at what one turn did. Both
raise `InvariantError`, which names the law that broke. Tests call them after every step; the swarm
in tests/core does so by the hundred thousand. Laws of whole runs (every request ends, tokens equal
the oracle's reference) are the tests' own.
"""

from collections import Counter
from collections.abc import Iterable

from minfer.blocks import ROOT, outside
from minfer.config import EngineConfig
from minfer.keys import extend_keys
from minfer.lifecycle import committed, held
from minfer.messages import Admitted, Cancel, Emit, Event, Execute, Preempted, Submit, WakeAt
from minfer.plan import Plan
from minfer.sequence import COLUMNS, Running, tokens_of
from minfer.state import EngineState, Transition


class InvariantError(AssertionError):
    """A law of the engine does not hold."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


def _require(holds: object, law: str, detail: object = "") -> None:
    if not holds:
        raise InvariantError(law, str(detail))


def check(config: EngineConfig, state: EngineState) -> None:
    """Raise InvariantError unless the state is one that the engine may be in."""
    _partition(state)
    _forest(state, config.window)
    _columns(config, state)
    for i in range(len(state.running)):
        _sequence(config, state, i)
    _plans(config, state)
    _requests(state)
    if not state.requests and not state.inflight:
        idle = not (len(state.running) or state.waiting or state.fences or state.faults)
        _require(idle and not state.blocks.live, "quiescence", "something is left over")


def free_blocks(state: EngineState) -> list[int]:
    """All free blocks, as the pool lists them."""
    blocks = state.blocks
    runs = [b for run in blocks.freed.values() for b in run]
    return [*range(blocks.fresh, blocks.total), *blocks.spare, *runs]


def private_blocks(run: Running, i: int) -> tuple[int, ...]:
    """Blocks that only the sequence at `i` knows."""
    return run.tables[i][run.chains[i].sealed :]


def _partition(state: EngineState) -> None:
    """Every block is free, private to one owner, or published; and in one place only."""
    blocks, run = state.blocks, state.running
    free = free_blocks(state)
    held = [b for i in range(len(run)) for b in private_blocks(run, i)]
    held += [b for fence in state.fences for b in fence.private]
    places = Counter([*free, *held, *blocks.nodes])
    _require(max(places.values(), default=1) == 1, "partition", "a block is in two places")
    _require(set(places) == set(range(blocks.total)), "partition", "a block is lost or invented")
    _require(len(free) == blocks.free, "partition", f"{len(free)} free, counted {blocks.free}")


def _forest(state: EngineState, window: int) -> None:
    """Published blocks form a forest, counted truly, of which idle leaves can be evicted."""
    blocks, nodes = state.blocks, state.blocks.nodes
    index = {node[0]: block for block, node in nodes.items()}
    _require(index == dict(blocks.index), "cache truth", "index and blocks disagree")
    parents = Counter(node[1] for node in nodes.values() if node[1] != ROOT)
    _require(all(p in nodes for p in parents), "cache truth", "an ancestor was evicted")
    users: Counter[int] = Counter()
    run = state.running
    stands = [b for c, t in zip(run.chains, run.tables, strict=True) for b in held(c, t, window)]
    for leaf in stands + [b for fence in state.fences for b in fence.held]:
        block = leaf
        while block != ROOT:
            _require(block in nodes, "refcount", f"block {block} is held but not cached")
            users[block] += 1
            if users[block] > 1:
                break
            block = nodes[block][1]
    for block, (_, _, used, kids, ticket) in nodes.items():
        _require(kids == parents[block], "cache truth", "children are miscounted")
        _require(used == users[block], "refcount", "users are miscounted")
        listed = blocks.idle.get(ticket) == block
        _require(listed == (not used and not kids), "evictable", "idle leaves are not as listed")
    _require(blocks.live == len(users), "refcount", "live blocks are miscounted")
    leaves = sum(not node[2] and not node[3] for node in nodes.values())
    _require(len(blocks.idle) == leaves, "evictable", "more is listed than is idle")
    tickets = all(blocks.low <= t < blocks.high for t in blocks.idle)
    _require(tickets, "evictable", "a ticket is out of range")


def _columns(config: EngineConfig, state: EngineState) -> None:
    run = state.running
    lengths = {len(getattr(run, name)) for name in COLUMNS}
    _require(len(lengths) == 1, "columns", f"lengths {lengths}")
    places = [seq.place for seq in run.seqs]
    _require(places == sorted(set(places)), "order", "running sequences are not in rank order")
    rows = sorted([*run.rows, *state.free_rows])
    _require(rows == list(range(config.max_num_seqs)), "rows", "a device row is lost or shared")
    _require(len(set(run.gens)) == len(run), "generations", "a generation is not unique")
    _require(all(gen < state.next_gen for gen in run.gens), "generations", "from the future")
    stops = frozenset().union(*(seq.request.stop_ids for seq in run.seqs))
    _require(stops <= state.stops, "stops", "a stop id is not looked for")


def _sequence(config: EngineConfig, state: EngineState, i: int) -> None:
    run, size = state.running, config.block_size
    seq, chain, table = run.seqs[i], run.chains[i], run.tables[i]
    tokens, done = tokens_of(run, i, size), committed(config, state, i)
    _require(run.ids[i] == seq.id, "columns", "ids and records disagree")
    _require(len(tokens) == run.known[i] >= run.base[i], "coverage", "known tokens are miscounted")
    _require(tokens[: run.base[i]] == seq.history, "history", "known tokens were rewritten")
    _require(0 <= done < run.known[i] <= run.last[i] + 1, "coverage", f"{done} of {run.known[i]}")
    _require(done <= run.sched[i] <= run.last[i], "coverage", "more is planned than may be")
    _require(
        len(table) * size >= run.sched[i], "coverage", "positions are planned beyond the table"
    )
    low = outside(done, config.window, size)
    _require(chain.low <= min(low, chain.sealed), "window", f"{chain.low} given back at {done}")
    _require(len(set(table[chain.low :])) == len(table) - chain.low, "self-alias", table)
    _require(chain.sealed * size <= done, "publish after write", f"{chain.sealed} blocks at {done}")
    keys = extend_keys((), seq.request.root, tokens, size)
    _require(keys[: len(chain.keys)] == chain.keys, "keys", "a key is not of its tokens")
    _require(len(chain.keys) >= run.base[i] // size, "keys", "a key of the history is missing")
    nodes = state.blocks.nodes
    for block, key in zip(
        table[chain.low : chain.sealed], chain.keys[chain.low : chain.sealed], strict=True
    ):
        right = block in nodes and nodes[block][0] == key
        _require(right, "aliasing", f"block {block} is of another prefix")
    leaf = nodes[chain.leaf][0] if chain.leaf != ROOT else None
    stands = chain.keys[chain.sealed - 1] if chain.sealed and not config.window else None
    _require(leaf == stands, "leaf", chain.leaf)
    ahead = sum(p.most[p.gens.index(run.gens[i])] for p in state.inflight if run.gens[i] in p.gens)
    if run.sched[i] >= run.base[i]:
        _require(run.sched[i] == run.known[i] - 1 + ahead, "coverage", "tokens ahead miscounted")
    else:
        _require(
            not ahead and run.known[i] == run.base[i], "coverage", "sampled while being filled"
        )


def _plans(config: EngineConfig, state: EngineState) -> None:
    _require(len(state.inflight) <= config.depth, "depth", len(state.inflight))
    steps = [plan.step for plan in state.inflight]
    _require(steps == sorted(set(steps)), "depth", "plans in flight are out of order")
    _require(all(f.until in steps for f in state.fences), "fence", "a fence outlived its plan")
    for plan in state.inflight:
        columns = {len(c) for c in (plan.gens, plan.rows, plan.starts, plan.counts, plan.most)}
        _require(columns == {len(plan.gens)}, "plan", "columns of different lengths")
        _require(0 < len(plan.gens) <= config.max_num_seqs, "budget", "rows")
        _require(sum(plan.counts) <= config.max_num_batched_tokens, "budget", sum(plan.counts))
        _require(min(plan.counts) > 0, "budget", "a row without input")
        _require(len(set(plan.rows)) == len(plan.rows), "plan", "a row is planned twice")


def _requests(state: EngineState) -> None:
    """Every sample waits, runs or has ended: exactly one of these."""
    here = [seq.id for seq in state.waiting] + list(state.running.ids)
    _require(len(set(here)) == len(here), "conservation", "a sample is in two places")
    _require(len(state.waiting) == sum(1 for _ in state.waiting), "conservation", "line miscounted")
    counts = Counter(name for name, _ in here)
    _require(set(counts) == set(state.requests), "conservation", "a request is lost")
    for name, live in state.requests.items():
        _require(counts[name] + live.ended == live.samples, "conservation", name)
    places = [seq.place for seq in state.waiting]
    _require(places == sorted(places), "order", "the line is not in order")


def check_turn(
    config: EngineConfig, before: EngineState, events: Iterable[Event], turn: Transition
) -> None:
    """Raise InvariantError unless the engine may go from `before` to `turn` on these events."""
    after, events = turn.state, tuple(events)
    for i, gen in enumerate(before.running.gens):
        if gen in after.running.gens:
            j = after.running.gens.index(gen)
            old = tokens_of(before.running, i, config.block_size)
            new = tokens_of(after.running, j, config.block_size)
            _require(new[: len(old)] == old, "monotonicity", "known tokens changed")
            table = after.running.tables[j][: len(before.running.tables[i])]
            _require(table == before.running.tables[i], "monotonicity", "a table was rewritten")
    _fence(config, before, after)
    _unwritten(config, before, after)
    _ranks(before, events, after)
    _cancels(events, after)
    _shortage(before, turn)
    _work(turn)
    _order(before, turn)
    gone = {(r.id, r.sample) for r in turn.reasons if isinstance(r, Preempted)}
    for command in turn.commands:
        match command:
            case Execute(plan):
                _new_plan(config, after, plan, may_miss=len(gone))
            case Emit():
                _emit(before, events, turn, command)
            case WakeAt(time):
                _require(time > after.time, "wake", "a wait that is over")


def _fence(config: EngineConfig, before: EngineState, after: EngineState) -> None:
    """Blocks of a plan in flight are neither free nor anybody else's."""
    owners = {gen: i for i, gen in enumerate(before.running.gens)}
    flying: dict[int, int] = {}  # generation -> where it starts at the earliest
    for plan in reversed(after.inflight):
        starts = zip(plan.gens, plan.starts, strict=True)
        flying.update((gen, start) for gen, start in starts if gen in owners)
    if not flying:
        return
    free = set(free_blocks(after))
    others: dict[int, int] = {}
    for i, gen in enumerate(after.running.gens):
        others.update(dict.fromkeys(private_blocks(after.running, i), gen))
    for gen, start in flying.items():
        low = outside(start, config.window, config.block_size)
        for block in before.running.tables[owners[gen]][low:]:
            _require(block not in free, "fence", f"block {block} is free and in a plan in flight")
            taken = others.get(block, gen)
            _require(taken == gen, "fence", f"block {block} has a new owner while in flight")


def _unwritten(config: EngineConfig, before: EngineState, after: EngineState) -> None:
    """What a plan in flight is still to write cannot be found, its sequence ended or not."""
    owners, size = {gen: i for i, gen in enumerate(before.running.gens)}, config.block_size
    for plan in after.inflight:
        for at, gen in enumerate(plan.gens):
            if gen in owners:
                start, span = plan.starts[at], max(plan.counts[at], plan.most[at])
                table = before.running.tables[owners[gen]]
                for block in table[start // size : (start + span - 1) // size + 1]:
                    unseen = block not in after.blocks.nodes
                    _require(unseen, "publish after write", f"block {block} is being written")


def _ranks(before: EngineState, events: tuple[Event, ...], after: EngineState) -> None:
    """A place in line is for life, whoever is preempted or restarted; it may only get better."""
    anew = {event.request.id for event in events if isinstance(event, Submit)}
    places = {seq.id: seq.place for seq in (*before.waiting, *before.running.seqs)}
    for seq in (*after.waiting, *after.running.seqs):
        kept = seq.id[0] in anew or seq.place <= places.get(seq.id, seq.place)
        _require(kept, "order", f"{seq.id} lost its rank")


def _cancels(events: tuple[Event, ...], after: EngineState) -> None:
    """Nothing of a cancelled request waits or runs: all its samples have ended."""
    gone: set[str] = set()
    for event in events:
        match event:
            case Cancel(name):
                gone.add(name)
            case Submit(request):
                gone.discard(request.id)
    left = [name for name in gone if name in after.requests]
    _require(not left, "cancel", f"{left} was cancelled and goes on")


def _shortage(before: EngineState, turn: Transition) -> None:
    """One shortage, one victim: while blocks behind a fence are coming, nobody is preempted."""
    after = turn.state
    preempted = any(isinstance(r, Preempted) for r in turn.reasons)
    closed = any(fence in before.fences for fence in after.fences)
    _require(not (preempted and closed), "preemption", "one more, though blocks were coming")
    ended = sum(len(c.finished) for c in turn.commands if isinstance(c, Emit))
    new = sum(fence not in before.fences for fence in after.fences)
    _require(new <= ended + 1, "preemption", f"{new - ended} for one shortage")


def _work(turn: Transition) -> None:
    """Work that can be done is done, or it is said what is waited for."""
    after = turn.state
    wakes = any(isinstance(c, WakeAt) for c in turn.commands)
    stuck = after.requests and not after.inflight
    _require(not stuck or wakes, "work conservation", "requests, but nothing in flight")


def _order(before: EngineState, turn: Transition) -> None:
    """Whoever was let in ranks before all who still wait, save those that had to go back."""
    after = turn.state
    admitted = {(r.id, r.sample) for r in turn.reasons if isinstance(r, Admitted)}
    back = {(r.id, r.sample) for r in turn.reasons if isinstance(r, Preempted)}
    line = [seq.place for seq in after.waiting if seq.id not in back]
    inside = [s.place for s in after.running.seqs if s.id in admitted and s.id not in back]
    if line and inside:
        _require(max(inside) < min(line), "order", "somebody was overtaken")
    if before.running.seqs and back:
        others = (s for s in (*after.running.seqs, *after.waiting) if s.id not in back)
        first = min((s.place, s.id) for s in (*before.running.seqs, *others))
        _require(first[1] not in back, "order", "the first in rank was preempted")


def _new_plan(config: EngineConfig, after: EngineState, plan: Plan, may_miss: int) -> None:
    """What a new plan writes belongs to one sequence; what it carries is right.

    A later plan of the same turn may have preempted up to `may_miss` of its sequences.
    """
    run, size = after.running, config.block_size
    fills = {fill.index: fill.tokens for fill in plan.fills}
    missing = {gen for gen in plan.gens if gen not in run.gens}
    _require(len(missing) <= may_miss, "plan", "a row without a sequence")
    for at, gen in enumerate(plan.gens):
        if gen in missing:
            continue
        i = run.gens.index(gen)
        start, span = plan.starts[at], max(plan.counts[at], plan.most[at])
        _require(plan.rows[at] == run.rows[i], "plan", "a sequence in the wrong row")
        for block in run.tables[i][start // size : (start + span - 1) // size + 1]:
            mine = block in private_blocks(run, i)
            _require(mine, "exclusive tail", f"block {block} is written, but others may read it")
        filled = fills.get(at)
        _require((filled is not None) == (start < run.base[i]), "feed", "host or device, not both")
        if filled is not None:
            right = run.seqs[i].history[start : start + plan.counts[at]]
            _require(filled == right, "feed", "inputs are not the history's")
            ends = start + len(filled) == run.base[i]
            _require(plan.most[at] == int(ends), "feed", "only the end of a prompt yields")
    opened = [plan.gens[o.index] for o in plan.opens if plan.gens[o.index] not in missing]
    here = [(g, s) for g, s in zip(plan.gens, plan.starts, strict=True) if g not in missing]
    firsts = [g for g, s in here if s == run.starts[run.gens.index(g)]]
    _require(opened == firsts, "open", "a generation is opened by its first plan, and only there")


def _emit(before: EngineState, events: tuple[Event, ...], turn: Transition, emit: Emit) -> None:
    _require(len(emit.ids) == len(emit.tokens), "emit", "columns of different lengths")
    arrived = {e.request.id for e in events if isinstance(e, Submit)}
    ended = [(f.id, f.sample) for f in emit.finished]
    _require(len(set(ended)) == len(ended), "lifecycle", "a sample ended twice")
    running = set(turn.state.running.ids)
    for done in emit.finished:
        known = done.id in before.requests or done.id in arrived
        _require(known, "lifecycle", f"{done.id} ended, but had not begun")
        name = (done.id, done.sample)
        again = done.id in arrived  # an id may be used anew in the turn in which it ends
        _require(again or name not in running, "lifecycle", f"{name} ended and runs")
