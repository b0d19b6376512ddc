"""The specification, executable: what must hold of a state, and of a turn.

Tests call both checks after every step. Laws of whole runs (every request ends, tokens equal the
oracle's reference) are the tests' own.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from minfer.blocks import ROOT, outside
from minfer.config import EngineConfig
from minfer.keys import extend_keys
from minfer.lifecycle import committed, held
from minfer.log import Log
from minfer.messages import Admitted, Cancel, Emit, Event, Execute, Preempted, Submit, WakeAt
from minfer.plan import Plan
from minfer.sequence import COLUMNS, Running, SampleId
from minfer.state import EngineState, Transition


class InvariantError(AssertionError):
    """A law of the engine does not hold: `law` names it."""

    def __init__(self, law: str, detail: object) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


def _require(holds: object, law: str, detail: object) -> None:
    if not holds:
        raise InvariantError(law, detail)


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
    return [*range(blocks.fresh, blocks.total), *blocks.spare, *chain(*blocks.freed.values())]


def private_blocks(run: Running, i: int) -> tuple[int, ...]:
    """Blocks that only the sequence at `i` knows."""
    return run.tables[i][run.chains[i].sealed :]


def _partition(state: EngineState) -> None:
    """Every block is free, private to one owner, or published; and in one place only."""
    blocks, run, free = state.blocks, state.running, free_blocks(state)
    private = [private_blocks(run, i) for i in range(len(run))] + [f.private for f in state.fences]
    places = Counter([*free, *chain(*private), *blocks.nodes])
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
    users, run = Counter[int](), state.running
    stands = [held(own, table, window) for own, table in zip(run.chains, run.tables, strict=True)]
    for block in chain(*stands, *(fence.held for fence in state.fences)):
        while block != ROOT:
            _require(block in nodes, "refcount", f"block {block} is held but not cached")
            users[block] += 1
            if users[block] > 1:
                break
            block = nodes[block][1]
    for block, (_, _, used, kids, ticket) in nodes.items():
        _require(kids == parents[block], "cache truth", "children are miscounted")
        _require(used == users[block], "refcount", "users are miscounted")
        idle = blocks.idle.get(ticket) == block
        _require(idle == (not used and not kids), "evictable", "idle leaves are not as listed")
    _require(blocks.live == len(users), "refcount", "live blocks are miscounted")
    leaves = sum(not node[2] and not node[3] for node in nodes.values())
    _require(len(blocks.idle) == leaves, "evictable", "more is listed than is idle")
    for ticket in blocks.idle:
        _require(blocks.low <= ticket < blocks.high, "evictable", "a ticket is out of range")


def _columns(config: EngineConfig, state: EngineState) -> None:
    run = state.running
    lengths = {len(getattr(run, name)) for name in COLUMNS}
    _require(len(lengths) == 1, "columns", lengths)
    places = [seq.place for seq in run.seqs]
    _require(places == sorted(set(places)), "order", "running sequences are not in rank order")
    rows = sorted([*run.rows, *state.free_rows])
    _require(rows == list(range(config.max_num_seqs)), "rows", "a device row is lost or shared")
    past = {gen for gen in run.gens if gen < state.next_gen}
    _require(len(past) == len(run), "generations", "not unique, or from the future")
    stops = frozenset().union(*(seq.request.stop_ids for seq in run.seqs))
    _require(stops <= state.stops, "stops", "a stop id is not looked for")


def _sequence(config: EngineConfig, state: EngineState, i: int) -> None:
    run, size = state.running, config.block_size
    seq, own, table = run.seqs[i], run.chains[i], run.tables[i]
    tokens, done = run.tokens(i, size), committed(config, state, i)
    _require(run.ids[i] == seq.id, "columns", "ids and records disagree")
    _require(len(tokens) == run.known[i] >= run.base[i], "coverage", "known tokens are miscounted")
    past = len(seq.history)
    _require(past <= run.base[i], "coverage", "a generation began before its history")
    _require(tokens[:past] == seq.history, "history", "known tokens were rewritten")
    _require(0 <= done < run.known[i] <= run.last[i] + 1, "coverage", f"{done} of {run.known[i]}")
    _require(done <= run.sched[i] <= run.last[i], "coverage", "more is planned than may be")
    _require(run.sched[i] <= len(table) * size, "coverage", "more is planned than the table holds")
    low = outside(done, config.window, size)
    _require(own.low <= min(low, own.sealed), "window", f"{own.low} given back at {done}")
    _require(len(set(table[own.low :])) == len(table) - own.low, "self-alias", table)
    _require(own.sealed * size <= done, "publish after write", f"{own.sealed} blocks at {done}")
    keys = extend_keys((), seq.request.root, tokens, size)
    _require(keys[: len(own.keys)] == own.keys, "keys", "a key is not of its tokens")
    _require(len(own.keys) >= past // size, "keys", "a key of the history is missing")
    nodes, cached = state.blocks.nodes, slice(own.low, own.sealed)
    for block, key in zip(table[cached], own.keys[cached], strict=True):
        _require(nodes.get(block, (None,))[0] == key, "aliasing", f"{block} is of another prefix")
    leaf = nodes[own.leaf][0] if own.leaf != ROOT else None
    stands = own.keys[own.sealed - 1] if own.sealed and not config.window else None
    _require(leaf == stands, "leaf", own.leaf)
    ahead = sum(p.most[p.gens.index(run.gens[i])] for p in state.inflight if run.gens[i] in p.gens)
    if run.sched[i] >= run.base[i]:
        _require(run.sched[i] == run.known[i] - 1 + ahead, "coverage", "tokens ahead miscounted")
    else:
        _require(not ahead and run.known[i] == run.base[i], "coverage", "sampled while filled")


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
    due = {name: live.samples - live.ended for name, live in state.requests.items()}
    _require(counts == due, "conservation", "a sample is lost")
    places = [seq.place for seq in state.waiting]
    _require(places == sorted(places), "order", "the line is not in order")


def check_turn(
    config: EngineConfig, before: EngineState, events: Iterable[Event], turn: Transition
) -> None:
    """Raise InvariantError unless the engine may go from `before` to `turn` on these events."""
    after, events = turn.state, tuple(events)
    arrived = {event.request.id for event in events if isinstance(event, Submit)}
    was, now = before.running, after.running
    for i, gen in enumerate(was.gens):
        if gen in now.gens:
            j, old = now.gens.index(gen), was.tokens(i, config.block_size)
            kept = now.tokens(j, config.block_size)[: len(old)] == old
            _require(kept, "monotonicity", "known tokens changed")
            kept = now.tables[j][: len(was.tables[i])] == was.tables[i]
            _require(kept, "monotonicity", "a table was rewritten")
    _flying(config, before, after)
    _ranks(before, arrived, after)
    _cancels(events, after)
    back = {(r.id, r.sample) for r in turn.reasons if isinstance(r, Preempted)}
    _shortage(before, turn, back)
    _order(before, turn, back)
    waits = any(isinstance(command, WakeAt) for command in turn.commands)
    busy = waits or after.inflight or not after.requests
    _require(busy, "work conservation", "requests, but nothing in flight")
    for command in turn.commands:
        match command:
            case Execute(plan):
                _new_plan(config, after, plan, may_miss=len(back))
            case Emit():
                _emit(before, arrived, turn, command)
            case WakeAt(time):
                _require(time > after.time, "wake", "a wait that is over")


def _written(config: EngineConfig, plan: Plan, at: int, table: Log[int]) -> set[int]:
    """Blocks that a row of a plan may write to."""
    start, size = plan.starts[at], config.block_size
    end = start + max(plan.counts[at], plan.most[at])
    return set(table[start // size : -(-end // size)])


def _flying(config: EngineConfig, before: EngineState, after: EngineState) -> None:
    """Blocks of a plan in flight are nobody else's; what it is to write cannot be found yet."""
    tables = dict(zip(before.running.gens, before.running.tables, strict=True))
    run, free = after.running, set(free_blocks(after))
    owner = {b: gen for i, gen in enumerate(run.gens) for b in private_blocks(run, i)}
    for plan in after.inflight:
        for at, gen in enumerate(plan.gens):
            table = tables.get(gen, Log())
            low = outside(plan.starts[at], config.window, config.block_size)
            for block in table[low:]:
                _require(block not in free, "fence", f"{block} is free and in a plan in flight")
                _require(owner.get(block, gen) == gen, "fence", f"{block} in flight changed hands")
            seen = {b for b in _written(config, plan, at, table) if b in after.blocks.nodes}
            _require(not seen, "publish after write", f"blocks {seen} are being written")


def _ranks(before: EngineState, arrived: set[str], after: EngineState) -> None:
    """A place in line is for life, whoever is preempted or restarted; it may only get better."""
    places = {seq.id: seq.place for seq in (*before.waiting, *before.running.seqs)}
    for seq in (*after.waiting, *after.running.seqs):
        kept = seq.id[0] in arrived or seq.place <= places.get(seq.id, seq.place)
        _require(kept, "order", f"{seq.id} lost its rank")


def _cancels(events: tuple[Event, ...], after: EngineState) -> None:
    """Nothing of a cancelled request waits or runs: all its samples have ended."""
    for at, event in enumerate(events):
        if isinstance(event, Cancel) and event.id in after.requests:
            new = any(isinstance(e, Submit) and e.request.id == event.id for e in events[at:])
            _require(new, "cancel", f"{event.id} goes on")


def _shortage(before: EngineState, turn: Transition, back: set[SampleId]) -> None:
    """One shortage, one victim: while blocks behind a fence are coming, nobody is preempted."""
    old = [fence in before.fences for fence in turn.state.fences]
    _require(not (back and any(old)), "preemption", "one more, though blocks were coming")
    ended = sum(len(c.finished) for c in turn.commands if isinstance(c, Emit))
    _require(old.count(False) <= ended + 1, "preemption", "several for one shortage")


def _order(before: EngineState, turn: Transition, back: set[SampleId]) -> None:
    """Whoever was let in ranks before all who still wait, save those that had to go back."""
    after = turn.state
    admitted = {(r.id, r.sample) for r in turn.reasons if isinstance(r, Admitted)} - back
    line = [seq.place for seq in after.waiting if seq.id not in back]
    inside = [seq.place for seq in after.running.seqs if seq.id in admitted]
    _require(not line or not inside or max(inside) < min(line), "order", "somebody was overtaken")
    if before.running.seqs and back:
        others = (s for s in (*after.running.seqs, *after.waiting) if s.id not in back)
        first = min((s.place, s.id) for s in (*before.running.seqs, *others))
        _require(first[1] not in back, "order", "the first in rank was preempted")


def _new_plan(config: EngineConfig, after: EngineState, plan: Plan, may_miss: int) -> None:
    """What a new plan writes belongs to one sequence; what it carries is right."""
    run, fills = after.running, {fill.index: fill.tokens for fill in plan.fills}
    here = {at: run.gens.index(gen) for at, gen in enumerate(plan.gens) if gen in run.gens}
    # A later plan of the same turn may have preempted up to `may_miss` of its sequences.
    _require(len(plan.gens) - len(here) <= may_miss, "plan", "a row without a sequence")
    for at, i in here.items():
        start, filled = plan.starts[at], fills.get(at)
        _require(plan.rows[at] == run.rows[i], "plan", "a sequence in the wrong row")
        shared = _written(config, plan, at, run.tables[i]).difference(private_blocks(run, i))
        _require(not shared, "exclusive tail", f"{shared} are written, but others may read them")
        _require((filled is not None) == (start < run.base[i]), "feed", "host or device, not both")
        if filled is not None:
            end = start + plan.counts[at]
            known = run.tokens(i, config.block_size)[start:end]
            _require(filled == known, "feed", "not the inputs at these positions")
            yields = plan.most[at] == (end == run.base[i])
            _require(yields, "feed", "only the end of a prompt yields")
    opened = [one.index for one in plan.opens if one.index in here]
    firsts = [at for at, i in here.items() if plan.starts[at] == run.starts[i]]
    _require(opened == firsts, "open", "a generation is opened by its first plan, and only there")


def _emit(before: EngineState, arrived: set[str], turn: Transition, emit: Emit) -> None:
    _require(len(emit.ids) == len(emit.tokens), "emit", "columns of different lengths")
    ended = [(f.id, f.sample) for f in emit.finished]
    _require(len(set(ended)) == len(ended), "lifecycle", "a sample ended twice")
    for name in ended:
        if name[0] not in arrived:  # an id may be used anew in the turn in which it ends
            _require(name[0] in before.requests, "lifecycle", f"{name} ended, but had not begun")
            _require(name not in turn.state.running.ids, "lifecycle", f"{name} ended and runs")
