"""The specification of the state after a turn: it follows from the events and reasons."""

from collections import Counter
from collections.abc import Iterable

from minfer.lifecycle.committed import committed
from minfer.lifecycle.transitions import Stage, waiting_stage
from minfer.records.config import EngineConfig
from minfer.records.state import EngineState
from minfer.testing.accounts import PlanInFlight, SampleAccount, Seat, tables_of
from minfer.testing.books import NEVER, Books, FencedBlocks
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
    _check_queue(books, after)
    num_samples = len(after.waiting) + len(after.running)
    require(num_samples == len(books.accounts), "lifetime", "a sample too many")
    for i in range(len(after.running)):
        _check_running(books, after, i)
    faults = {
        name: account.faults for name, account in books.accounts.items() if account.faults
    }
    require(dict(after.faults) == faults, "faults", f"{after.faults}, not {faults}")
    paused = {name for name, account in books.accounts.items() if account.paused}
    require(after.paused == paused, "paused", f"{set(after.paused)}, not {paused}")
    accounts, drafting = books.accounts, after.drafting
    proposed = {
        name: account.proposed for name, account in accounts.items() if account.proposed
    }
    require(dict(drafting.proposals) == proposed, "drafts", "what was proposed")
    ended = set(drafting.learnt) - accounts.keys()
    require(not ended, "drafts", f"{ended} are remembered, and have ended")
    spec_config = books.config.speculation
    needless = drafting.learnt and not (spec_config is not None and spec_config.adaptive)
    require(not needless, "drafts", "records that no number of drafts depends on")
    books.fenced = _check_fences(books.fenced, [fence.until for fence in after.fences])
    check_flights(books.config, books.flights, after)


def _check_queue(books: Books, after: EngineState) -> None:
    """Check that every sample that does not run is in the queue, as it arrived or was
    preempted.
    """
    waiting = {seq.id: seq for seq in after.waiting}
    for name, account in books.accounts.items():
        if account.stage is Stage.RUNNING:
            continue
        seq = waiting.get(name)
        if seq is None:
            raise InvariantError(
                "lifetime", f"{name} is {account.stage}, but not in the queue"
            )
        stage = waiting_stage(seq)
        require(
            stage is account.stage, "lifetime", f"{name} is {account.stage}, not {stage}"
        )
        require(seq.history == account.tokens, "known", f"{name} knows {seq.history}")
        arrived = seq.arrived
        require(arrived == account.arrived, "time", f"{name} arrived at {arrived}")


def _check_running(books: Books, after: EngineState, i: int) -> None:
    """Check that the sequence at `i` has the tokens, blocks and positions of the
    books.
    """
    run, config = after.running, books.config
    account = books.accounts.get(run.ids[i])
    if account is None or account.stage is not Stage.RUNNING or account.seat is None:
        stage = None if account is None else account.stage
        raise InvariantError("lifetime", f"{run.ids[i]} runs; it is {stage}")
    _check_tokens(account, after, i, config.block_size)
    seat, run_id = account.seat, run.run_ids[i]
    books.set_run_id(seat, run_id)
    require(
        run_id == seat.run_id, "generations", f"{account.id}: {run_id}, not {seat.run_id}"
    )
    require(run.rows[i] == seat.row, "rows", f"{account.id} is in row {run.rows[i]}")
    scheduled = run.scheduled[i]
    is_valid = (run.num_known_at_admission[i], scheduled) == (
        seat.num_known_at_admission,
        seat.scheduled,
    )
    require(
        is_valid,
        "coverage",
        f"{account.id} is scheduled to {scheduled}, not {seat.scheduled}",
    )
    kv = committed(config, after, i)
    require(kv == seat.kv, "committed", f"{account.id} has KV of {seat.kv}, not of {kv}")
    for table, expected in zip(tables_of(run, i), seat.tables, strict=True):
        if seat.opened:
            require(
                table == expected,
                "device table",
                f"{account.id}: {expected}, not {table}",
            )
        else:
            keeps_blocks = table[: len(expected)] == expected
            require(keeps_blocks, "device table", f"{account.id} lost blocks")


def _check_tokens(
    account: SampleAccount, after: EngineState, i: int, block_size: int
) -> None:
    """Check that the sequence at `i` has its sample's tokens, and may have as many."""
    tokens, last = after.running.tokens(i, block_size), after.running.last_index[i]
    require(
        tokens == account.tokens,
        "known",
        f"{account.id} knows {tokens}, not {account.tokens}",
    )
    require(
        last == account.last_index, "known", f"{account.id} may have {last} + 1 tokens"
    )


def check_publication(books: Books, before: EngineState, after: EngineState) -> None:
    """Raise InvariantError unless full blocks of prompts can be found as soon as the step
    that computed them is over; or their content can be found in other blocks, or could be
    until a sequence left in this turn. With a window they may be released at any time.
    """
    groups = books.config.block_groups
    if any(group.window for group in groups) or books.released_seats:
        return
    run, size = after.running, books.config.block_size
    cached = before.blocks.prefix.nodes, after.blocks.prefix.nodes
    old = dict(zip(before.running.run_ids, before.running.chains, strict=True))
    for i, run_id in enumerate(run.run_ids):
        chain, num_due = run.chains[i], books.filled.get(run_id, 0) // size
        (sealed,) = chain.sealed
        if sealed >= num_due or run.seqs[i].request.recomputes_prompt:
            continue
        twin = [*chain.keys[sealed : sealed + 1]]
        is_cached = any(key in nodes for key in twin for nodes in cached)
        # Once their twins were evicted, some may have been published for a sibling.
        first = min(old[run_id].sealed) if run_id in old else sealed
        is_cached = is_cached or (first < sealed and chain.keys[first] in cached[0])
        detail = f"{run.ids[i]} has published {sealed} of {num_due} blocks"
        require(is_cached, "publish in time", detail)


def _check_fences(
    fenced_blocks: list[FencedBlocks], untils: list[int]
) -> list[FencedBlocks]:
    """Check that there is a fence for each sample that left with plans in flight, and no
    other.
    """
    unmatched, fenced = Counter(untils), []
    for blocks in sorted(fenced_blocks, key=lambda blocks: len(blocks.steps)):
        until = next((step for step in sorted(blocks.steps) if unmatched[step]), None)
        if until is not None:
            unmatched[until] -= 1
            fenced.append(FencedBlocks(blocks.account, frozenset((until,))))
        elif NEVER not in blocks.steps:
            steps = sorted(blocks.steps)
            raise InvariantError("fence", f"none until {steps}; there are {untils}")
    require(not any(unmatched.values()), "fence", f"without a plan: {untils}")
    return fenced


def check_flights(
    config: EngineConfig, flights: Iterable[PlanInFlight], after: EngineState
) -> None:
    """Raise InvariantError if pages of a plan in flight belong to another sample, or
    those to be written can be found already.
    """
    run, free = after.running, set(free_pages(after.blocks.pool))
    owner: dict[int, int] = {}  # page -> the generation that has it as its own
    for i, run_id in enumerate(run.run_ids):
        owner.update(dict.fromkeys(private_pages(config, run, i), run_id))
    for flight in flights:
        plan = flight.plan
        saved = {page for save in plan.saves for page in save.pages}
        if not saved.isdisjoint((*free, *owner)):
            raise InvariantError("fence", f"{saved} are written by step {plan.step}")
        for index, seat in enumerate(flight.seats):
            run_id, pages = plan.run_ids[index], flight.pages[index]
            if not free.isdisjoint(pages):
                raise InvariantError("fence", f"{pages & free} are free, and in flight")
            if not all(owner.get(page, run_id) == run_id for page in pages):
                raise InvariantError("fence", f"blocks of step {plan.step} changed hands")
            if seat.account.seat is seat:
                start = plan.starts[index]
                written = _written(
                    config,
                    seat,
                    start,
                    start
                    + max(
                        plan.num_scheduled_tokens[index], plan.max_sampled_tokens[index]
                    ),
                )
                if not all(owner.get(page) == run_id for page in written):
                    raise InvariantError("exclusive tail", f"others may read {written}")


def _written(config: EngineConfig, seat: Seat, start: int, end: int) -> list[int]:
    """The pages of a row that hold positions from `start` to `end`."""
    first, last = start // config.block_size, -(-end // config.block_size)
    pairs = zip(seat.tables, config.block_groups, strict=False)
    pages = [
        page
        for table, group in pairs
        for page in table[first * group.pages : last * group.pages]
    ]
    return [*pages, *seat.tables[-1]] if config.state_group else pages
