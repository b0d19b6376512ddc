"""The specification of the state after a turn: it follows from the events and reasons."""

from collections import Counter
from collections.abc import Iterable

from minfer.lifecycle.committed import committed
from minfer.lifecycle.transitions import Stage, waiting_stage
from minfer.records.config import EngineConfig
from minfer.records.state import EngineState
from minfer.testing.accounts import PlanInFlight, SampleAccount, Seat, tables_of
from minfer.testing.books import NEVER, Books, Leaving
from minfer.testing.invariants import (
    InvariantError,
    free_pages,
    private_pages,
    require,
)


def check_state(books: Books, after: EngineState) -> None:
    """Raise InvariantError unless `after` follows from the books."""
    require(after.time == books.time, "time", f"{after.time}, not {books.time}")
    steps = [flight.plan for flight in books.flights]
    same = list(after.inflight) == steps
    require(same, "in flight", "not the plans that were made")
    _line(books, after)
    here = len(after.waiting) + len(after.running)
    require(here == len(books.accounts), "lifetime", "a sample too many")
    for i in range(len(after.running)):
        _running(books, after, i)
    faults = {name: one.faults for name, one in books.accounts.items() if one.faults}
    require(dict(after.faults) == faults, "faults", f"{after.faults}, not {faults}")
    paused = {name for name, one in books.accounts.items() if one.paused}
    require(after.paused == paused, "paused", f"{set(after.paused)}, not {paused}")
    accounts, drafting = books.accounts, after.drafting
    proposed = {name: one.proposed for name, one in accounts.items() if one.proposed}
    require(dict(drafting.proposals) == proposed, "drafts", "what was proposed")
    strangers = set(drafting.learnt) - accounts.keys()
    require(not strangers, "drafts", f"{strangers} are remembered, and have ended")
    how = books.config.speculation
    needless = drafting.learnt and not (how is not None and how.adaptive)
    require(not needless, "drafts", "records that no number of drafts depends on")
    books.leaving = _fenced(books.leaving, [fence.until for fence in after.fences])
    check_flights(books.config, books.flights, after)


def _line(books: Books, after: EngineState) -> None:
    """Check that every sample that does not run is in the queue, as it arrived or was
    preempted.
    """
    waiting = {seq.id: seq for seq in after.waiting}
    for name, one in books.accounts.items():
        if one.stage is Stage.RUNNING:
            continue
        seq = waiting.get(name)
        if seq is None:
            raise InvariantError("lifetime", f"{name} is {one.stage}, but not in line")
        stage = waiting_stage(seq)
        require(stage is one.stage, "lifetime", f"{name} is {one.stage}, not {stage}")
        require(seq.history == one.known, "known", f"{name} knows {seq.history}")
        arrived = seq.arrived
        require(arrived == one.arrived, "time", f"{name} arrived at {arrived}")


def _running(books: Books, after: EngineState, i: int) -> None:
    """Check that the sequence at `i` has the tokens, blocks and positions of the
    books.
    """
    run, config = after.running, books.config
    one = books.accounts.get(run.ids[i])
    if one is None or one.stage is not Stage.RUNNING or one.seat is None:
        stage = None if one is None else one.stage
        raise InvariantError("lifetime", f"{run.ids[i]} runs; it is {stage}")
    _tokens(one, after, i, config.block_size)
    seat, gen = one.seat, run.run_ids[i]
    books.seen(seat, gen)
    require(gen == seat.gen, "generations", f"{one.id}: {gen}, not {seat.gen}")
    require(run.rows[i] == seat.row, "rows", f"{one.id} is in row {run.rows[i]}")
    scheduled = run.scheduled[i]
    right = (run.num_known_at_admission[i], scheduled) == (seat.base, seat.scheduled)
    require(
        right, "coverage", f"{one.id} is scheduled to {scheduled}, not {seat.scheduled}"
    )
    kv = committed(config, after, i)
    require(kv == seat.kv, "committed", f"{one.id} has KV of {seat.kv}, not of {kv}")
    for table, mine in zip(tables_of(run, i), seat.tables, strict=True):
        if seat.opened:
            require(table == mine, "device table", f"{one.id}: {mine}, not {table}")
        else:
            kept = table[: len(mine)] == mine
            require(kept, "device table", f"{one.id} lost blocks")


def _tokens(one: SampleAccount, after: EngineState, i: int, block_size: int) -> None:
    """Check that the sequence at `i` has its sample's tokens, and may have as many."""
    tokens, last = after.running.tokens(i, block_size), after.running.last_index[i]
    require(tokens == one.known, "known", f"{one.id} knows {tokens}, not {one.known}")
    require(last == one.last, "known", f"{one.id} may have {last} + 1 tokens")


def check_publication(books: Books, before: EngineState, after: EngineState) -> None:
    """Raise InvariantError unless full blocks of prompts can be found as soon as the step
    that computed them is over; or their content can be found in other blocks, or could be
    until a sequence left in this turn. With a window they may be released at any time.
    """
    groups = books.config.groups
    if any(group.window for group in groups) or books.left:
        return
    run, size = after.running, books.config.block_size
    cached = before.blocks.prefix.nodes, after.blocks.prefix.nodes
    for i, gen in enumerate(run.run_ids):
        own, due = run.chains[i], books.filled.get(gen, 0) // size
        (sealed,) = own.sealed
        if sealed >= due or run.seqs[i].request.recomputes_prompt:
            continue
        twin = [*own.keys[sealed : sealed + 1]]
        found = any(key in nodes for key in twin for nodes in cached)
        short = f"{run.ids[i]} has published {sealed} of {due} blocks"
        require(found, "publish in time", short)


def _fenced(leaving: list[Leaving], untils: list[int]) -> list[Leaving]:
    """Check that there is a fence for each sample that left with plans in flight, and no
    other.
    """
    rest, kept = Counter(untils), []
    for left in sorted(leaving, key=lambda each: len(each.steps)):
        found = next((step for step in sorted(left.steps) if rest[step]), None)
        if found is not None:
            rest[found] -= 1
            kept.append(Leaving(left.account, frozenset((found,))))
        elif NEVER not in left.steps:
            steps = sorted(left.steps)
            raise InvariantError("fence", f"none until {steps}; there are {untils}")
    require(not any(rest.values()), "fence", f"without a plan: {untils}")
    return kept


def check_flights(
    config: EngineConfig, flights: Iterable[PlanInFlight], after: EngineState
) -> None:
    """Raise InvariantError if pages of a plan in flight belong to another sample, or
    those to be written can be found already.
    """
    run, free = after.running, set(free_pages(after.blocks.pool))
    owner: dict[int, int] = {}  # page -> the generation that has it as its own
    for i, gen in enumerate(run.run_ids):
        owner.update(dict.fromkeys(private_pages(config, run, i), gen))
    for flight in flights:
        plan = flight.plan
        for at, seat in enumerate(flight.seats):
            gen, pages = plan.run_ids[at], flight.pages[at]
            if not free.isdisjoint(pages):
                raise InvariantError("fence", f"{pages & free} are free, and in flight")
            if not all(owner.get(page, gen) == gen for page in pages):
                raise InvariantError("fence", f"blocks of step {plan.step} changed hands")
            if seat.account.seat is seat:
                start = plan.starts[at]
                written = _written(
                    config,
                    seat,
                    start,
                    start
                    + max(plan.num_scheduled_tokens[at], plan.max_sampled_tokens[at]),
                )
                if not all(owner.get(page) == gen for page in written):
                    raise InvariantError("exclusive tail", f"others may read {written}")


def _written(config: EngineConfig, seat: Seat, start: int, end: int) -> list[int]:
    """The pages of a row that hold positions from `start` to `end`."""
    first, last = start // config.block_size, -(-end // config.block_size)
    each = zip(seat.tables, config.groups, strict=True)
    return [
        page
        for table, group in each
        for page in table[first * group.pages : last * group.pages]
    ]
