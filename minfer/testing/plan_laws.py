"""The specification of plans: which plan may be made of the running sequences.

A plan takes every row that can run, and no other; each exactly at its position, with the
inputs that only the host knows; within the budget; and its tables and copies are all that
a device needs to know.
"""

from collections.abc import Collection, Mapping

from attrs import define, field

from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted
from minfer.records.plan import Plan
from minfer.records.request import row_sampling
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.testing.accounts import Seat, capacity
from minfer.testing.books import Books
from minfer.testing.copy_laws import check_copies
from minfer.testing.draft_laws import check_drafts, row_cost, token_cost
from minfer.testing.invariants import InvariantError, require
from minfer.testing.skipped_rows import (
    is_paused,
    most_ahead,
    most_in_flight,
    skips_step,
    suspects,
)


@define
class Planning:
    """The decisions in the planning half of one turn."""

    # the policy's answers, one for each plan, if they are known
    budgets: list[int] | None
    held_back: Collection[str] | None = None  # clients deferred in this turn
    preempts: bool = False  # whether the turn preempts any sample, in any of its plans
    # admitted, by the next plan
    newcomers: dict[SampleId, Admitted] = field(factory=dict)
    lately: set[SampleId] = field(factory=set)  # admitted by the last plan
    admitted: list[SampleId] = field(factory=list)  # in this turn
    # of them those that no plan opens: the plan that admitted them is unknown
    sitting: set[SampleId] = field(factory=set)
    # (victim, for which sample)
    preempted: list[tuple[SampleId, SampleId]] = field(factory=list)
    last_victims: set[SampleId] = field(factory=set)  # victims that were the last running
    # whether a first admission happened, or a new sample caused a preemption
    fresh: bool = False
    plans: list[Plan | None] = field(factory=list)  # None: the last try made none
    used: int = 0  # what the last of them takes of its budget
    # samples left out of a plan for want of a block
    starved: list[SampleId] = field(factory=list)

    def budget(self, config: EngineConfig, number: int) -> int | None:
        """The tokens that plan `number` of this turn may take; None: unknown."""
        if self.budgets is None or number >= len(self.budgets):
            return None
        answer: object = self.budgets[number]
        return min(answer, config.max_num_batched_tokens) if type(answer) is int else None

    def launched(self, plan: Plan | None) -> None:
        """Record a plan that has been read, or that none was made; the next one has
        newcomers of its own.
        """
        self.plans.append(plan)
        self.lately = set(self.newcomers)
        self.newcomers.clear()


def check_plan(books: Books, plan: Plan, after: EngineState, planning: Planning) -> None:
    """Raise InvariantError unless `plan` may be made now; learn what devices know."""
    config = books.config
    here = _seated(books, plan, after)
    _opens(plan, here)
    _grows(plan, books.seats)
    _rows(config, plan, here)
    _decodes(plan, here)
    _apart(config, plan, here)
    _paused(config, plan, here)
    budget = planning.budget(config, len(planning.plans))
    preempted = bool(planning.preempted)
    planning.used = row_cost(config, plan, here)
    check_drafts(books, plan, here, after, budget, preempted=preempted)
    check_copies(books, plan, here, planning.newcomers, after)
    _members(books, plan, here, after, planning)
    _budget(config, plan, here, planning, after)


def _seated(books: Books, plan: Plan, after: EngineState) -> dict[int, Seat]:
    """The seats of a plan's rows by place, each once and at its position; checks that the
    plan's number is that of a plan of this turn.
    """
    columns = (
        plan.run_ids,
        plan.rows,
        plan.starts,
        plan.num_scheduled_tokens,
        plan.max_sampled_tokens,
    )
    right = {len(column) for column in columns} == {len(plan.run_ids)}
    require(right and plan.run_ids, "plan", "columns of different lengths")
    seats = books.seats
    here = {at: seats[gen] for at, gen in enumerate(plan.run_ids) if gen in seats}
    require(len(here) == len(plan.run_ids), "plan", "a row without a sequence")
    flying = [flight.plan.step for flight in books.flights]
    new = plan.step < after.next_step and plan.step not in flying
    require(new, "plan", "its number")
    require(
        len(set(plan.run_ids)) == len(plan.run_ids), "plan", "a sequence is planned twice"
    )
    for at, seat in here.items():
        require(plan.rows[at] == seat.row, "plan", "a sequence in the wrong row")
    return here


def _opens(plan: Plan, here: Mapping[int, Seat]) -> None:
    """Check that a generation is opened by its first plan, and only there, with all that
    the device keeps.
    """
    opens = {one.index: one for one in plan.opens}
    require(len(opens) == len(plan.opens), "open", "a row is opened twice")
    firsts = [at for at, seat in here.items() if not seat.opened]
    require(sorted(opens) == sorted(firsts), "open", f"{sorted(opens)}, not {firsts}")
    for at, one in opens.items():
        seat = here[at]
        account = seat.account
        right = row_sampling(account.request, account.sample)
        same = one.name == account.id and one.sampling == right
        require(same, "open", f"row {plan.rows[at]} is opened for another sample")
        known = one.known == tuple(account.known)
        known = known and one.prompt == account.request.num_prompt_tokens
        known = known and one.last_index == account.last
        require(known, "open", f"row {plan.rows[at]} is opened with other tokens")
        pooled = one.pooling == account.request.pooling
        require(pooled, "open", f"row {plan.rows[at]} is pooled as {one.pooling!r}")
        anew = not account.request.recomputes_prompt or plan.starts[at] == 0
        require(anew, "open", f"row {plan.rows[at]} does not compute its whole prompt")
        for table, mine in zip(one.tables, seat.tables, strict=True):
            kept = table[: len(mine)] == mine
            require(kept, "device table", "a row is opened with a table that lost blocks")
        seat.tables, seat.opened = one.tables, True


def _grows(plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that tables grow at their ends; an opened row gets its whole table."""
    opened = {plan.rows[one.index] for one in plan.opens}
    by_row = {seat.row: seat for seat in seats.values()}
    for grow in plan.grows:
        seat = by_row.get(grow.row)
        if seat is None or grow.row in opened or not grow.blocks:
            why = "of a row that is not there, or of nothing"
            raise InvariantError("grow", f"{grow}: {why}")
        tables = [*seat.tables]
        ends = grow.at == len(tables[grow.group])
        require(ends, "grow", f"{grow}: not at the end of {tables[grow.group]}")
        tables[grow.group] += grow.blocks
        seat.tables = tuple(tables)


def _rows(config: EngineConfig, plan: Plan, here: Mapping[int, Seat]) -> None:
    """Check that each row continues at its position, with the inputs that only the host
    knows.
    """
    fills = {fill.index: fill.tokens for fill in plan.fills}
    drafting = {draft.index for draft in plan.drafts}
    require(len(fills) == len(plan.fills), "feed", "a row is filled twice")
    for at, seat in here.items():
        start = plan.starts[at]
        count = plan.num_scheduled_tokens[at]
        most = plan.max_sampled_tokens[at]
        filled = fills.get(at)
        require(
            start == seat.scheduled,
            "plan",
            f"a row starts at {start}, not {seat.scheduled}",
        )
        by_host = start < seat.base
        right = (filled is not None) == by_host
        require(right, "feed", "host or device, not both")
        if filled is not None:
            _filled(seat, filled, start, count)
            ends = start + count == seat.base and seat.account.request.max_tokens > 0
            require(most == ends, "feed", "only the end of a prompt yields")
        elif at in drafting:
            require(1 < count == most, "feed", f"{count} inputs, {most} tokens")
        else:
            require(count == 1 <= most, "feed", f"{count} inputs, {most} tokens")
        end = start + max(count, most)
        fits = end <= min(seat.account.last, capacity(config, seat.tables))
        require(fits, "coverage", f"a row goes on to {end}, past its end or its table's")


def _filled(seat: Seat, filled: tuple[int, ...], start: int, count: int) -> None:
    """Check that prefill tokens are those of the sample's history."""
    end = start + count
    right = filled == seat.account.known[start:end] and count > 0 and end <= seat.base
    require(right, "feed", "not the history's inputs")


def _apart(config: EngineConfig, plan: Plan, here: Mapping[int, Seat]) -> None:
    """Check that rows in lockstep with the host run ahead of their known tokens at most
    as far as allowed, and that their sampling is deferred.
    """
    bound = {
        at: seat for at, seat in here.items() if seat.account.request.needs_host_mask
    }
    for at, seat in bound.items():
        start = plan.starts[at]
        known = len(seat.account.known)
        most = known + most_ahead(config)
        require(start < most, "ahead", f"a row starts at {start}, knows {known} tokens")
    due = tuple(at for at in sorted(bound) if plan.max_sampled_tokens[at])
    require(
        plan.deferred == due, "apart", f"{plan.deferred} are sampled apart, not {due}"
    )


def _paused(config: EngineConfig, plan: Plan, here: Mapping[int, Seat]) -> None:
    """Check that a paused sample is only prefilled, and yields nothing."""
    for at, seat in here.items():
        one = seat.account
        right = not one.paused or not (
            plan.max_sampled_tokens[at] or is_paused(config, one, seat)
        )
        require(right, "paused", f"{one.id} is in step {plan.step}")


def _decodes(plan: Plan, here: Mapping[int, Seat]) -> None:
    """Check that a decode row without drafts yields one token."""
    drafting = {draft.index for draft in plan.drafts}
    for at, seat in here.items():
        if plan.starts[at] >= seat.base and at not in drafting:
            most = plan.max_sampled_tokens[at]
            require(most == 1, "decode", f"{seat.account.id} may yield {most} tokens")


def _members(
    books: Books,
    plan: Plan,
    here: Mapping[int, Seat],
    after: EngineState,
    planning: Planning,
) -> None:
    """Check that every sample that can run is in the plan."""
    running = books.running
    members = {seat.account.id for seat in here.values()}
    # A suspect admitted by this plan runs alone from the next one on.
    accused = {one.id for one in suspects(books.config, running)} - planning.sitting
    if accused:
        right = len(members) == 1 and members <= accused and not books.flights
        require(right, "fault", f"{members} run, though {accused} should run alone")
        return
    for one in running:
        if one.id not in members | planning.sitting:
            why = skips_step(books.config, one, after)
            could = f"{one.id} could run, but is not in step {plan.step}"
            require(why, "left out", could)
            if why == "blocks":
                planning.starved.append(one.id)


def _is_bounded(
    config: EngineConfig, seat: Seat, end: int, after: EngineState, *, preempts: bool
) -> bool:
    """Whether a prefill chunk could not go on after `end`: it has as many tokens in
    flight as it may, or its tables end, and pages are not plenty, or were not before the
    turn `preempts`.
    """
    if end >= most_in_flight(config, seat):
        return True
    others = len(after.running) - 1
    each = zip(seat.tables, config.groups, strict=True)
    blocks = end // config.block_size
    lacks = sum(
        group.pages for table, group in each if len(table) <= blocks * group.pages
    )
    block_pages = sum(group.pages for group in config.groups)
    short = preempts or after.blocks.available < lacks + others * block_pages
    return config.by_chunk and end == capacity(config, seat.tables) and short


def _budget(
    config: EngineConfig,
    plan: Plan,
    here: Mapping[int, Seat],
    planning: Planning,
    after: EngineState,
) -> None:
    """Check that a forward takes no more tokens than the policy allows, except one for
    each running row.
    """
    total = sum(plan.num_scheduled_tokens)
    require(
        len(plan.run_ids) <= config.max_num_seqs, "budget", f"{len(plan.run_ids)} rows"
    )
    require(total <= config.max_num_batched_tokens, "budget", f"{total} tokens")
    budget = planning.budget(config, len(planning.plans))
    if budget is None:
        return
    few = 1 if planning.newcomers else len(plan.run_ids)
    allowed = total <= max(budget, few)
    require(allowed, "budget", f"{total} tokens; the policy allows {budget}")
    # A prefill continues in the next step, for which too little of the budget is left.
    short = [
        token_cost(config, one)
        for at, one in here.items()
        if plan.starts[at] + plan.num_scheduled_tokens[at] < one.base - one.account.paused
        and not _is_bounded(
            config,
            one,
            plan.starts[at] + plan.num_scheduled_tokens[at],
            after,
            preempts=planning.preempts,
        )
    ]
    if short and not planning.preempted:
        drafts = sum(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)
        left = budget - planning.used + drafts
        require(left < min(short), "budget", f"{left} is left, and a prompt waits")
