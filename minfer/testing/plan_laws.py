"""The specification of plans: which plan may be made of the running sequences.

A plan takes every row that can run, and no other; each exactly at its position, with the
inputs that only the host knows; within the budget; and its tables and copies are all that
a device needs to know.
"""

from collections.abc import Collection, Mapping
from typing import Final

from attrs import define, field

from minfer.blocks.prefix import every_node
from minfer.policies.consult import has_default_budget
from minfer.records.adapters import NO_SLOT
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted
from minfer.records.plan import Plan
from minfer.records.request import row_sampling
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.records.step_times import MAX_GROWTH
from minfer.testing.accounts import Seat, capacity
from minfer.testing.books import Books
from minfer.testing.copy_laws import check_copies
from minfer.testing.draft_laws import check_drafts, row_cost, token_cost
from minfer.testing.invariants import InvariantError, free_pages, require
from minfer.testing.kept_state_laws import check_plan_states, is_save_point
from minfer.testing.skipped_rows import (
    is_paused,
    max_ahead,
    max_in_flight,
    skips_step,
    suspects,
)

_ROUNDING: Final = 1e-9  # of floating point numbers


@define
class Planning:
    """The decisions in the planning half of one turn."""

    # the policy's answers, one for each plan, if they are known
    budgets: list[int] | None
    deferred: Collection[str] | None = None  # clients deferred in this turn
    preempts: bool = False  # whether the turn preempts any sample, in any of its plans
    # admitted, by the next plan
    newcomers: dict[SampleId, Admitted] = field(factory=dict)
    last_admitted: set[SampleId] = field(factory=set)  # admitted by the last plan
    admitted: list[SampleId] = field(factory=list)  # in this turn
    # of them those that no plan opens: the plan that admitted them is unknown
    unopened: set[SampleId] = field(factory=set)
    # (victim, for which sample)
    preempted: list[tuple[SampleId, SampleId]] = field(factory=list)
    requeued: set[SampleId] = field(factory=set)  # their step failed
    last_victims: set[SampleId] = field(factory=set)  # victims that were the last running
    # whether a first admission happened, or a new sample caused a preemption
    has_new: bool = False
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

    def record(self, plan: Plan | None) -> None:
        """Record a plan that has been read, or that none was made; the next one has
        newcomers of its own.
        """
        self.plans.append(plan)
        self.last_admitted = set(self.newcomers)
        self.newcomers.clear()


def check_plan(books: Books, plan: Plan, after: EngineState, planning: Planning) -> None:
    """Raise InvariantError unless `plan` may be made now; learn what devices know."""
    config = books.config
    seats = _seats_of(books, plan, after)
    _check_opens(plan, seats)
    _check_adapter_slots(books, plan, seats)
    _check_grows(plan, books.seats)
    _check_rows(config, plan, seats)
    _check_decodes(plan, seats)
    _check_deferred(config, plan, seats)
    _check_paused(config, plan, seats)
    budget = planning.budget(config, len(planning.plans))
    preempted = bool(planning.preempted)
    planning.used = row_cost(config, plan, seats)
    check_drafts(books, plan, seats, after, budget, preempted=preempted)
    copies = check_plan_states(books, plan, seats, after)
    check_copies(books, plan, seats, planning.newcomers, after, copies)
    _check_members(books, plan, seats, after, planning)
    _check_budget(config, plan, seats, planning, after)
    _check_target(config, plan, planning, after)


def _seats_of(books: Books, plan: Plan, after: EngineState) -> dict[int, Seat]:
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
    is_valid = {len(column) for column in columns} == {len(plan.run_ids)}
    require(is_valid and plan.run_ids, "plan", "columns of different lengths")
    by_run_id = books.seats
    seats = {
        index: by_run_id[run_id]
        for index, run_id in enumerate(plan.run_ids)
        if run_id in by_run_id
    }
    require(len(seats) == len(plan.run_ids), "plan", "a row without a sequence")
    in_flight = [flight.plan.step for flight in books.flights]
    is_new = plan.step < after.next_step and plan.step not in in_flight
    require(is_new, "plan", "its number")
    require(
        len(set(plan.run_ids)) == len(plan.run_ids), "plan", "a sequence is planned twice"
    )
    for index, seat in seats.items():
        require(plan.rows[index] == seat.row, "plan", "a sequence in the wrong row")
    return seats


def _check_opens(plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that a generation is opened by its first plan, and only there, with all that
    the device keeps.
    """
    opens = {new_row.index: new_row for new_row in plan.opens}
    require(len(opens) == len(plan.opens), "open", "a row is opened twice")
    firsts = [index for index, seat in seats.items() if not seat.opened]
    require(sorted(opens) == sorted(firsts), "open", f"{sorted(opens)}, not {firsts}")
    for index, new_row in opens.items():
        seat = seats[index]
        account = seat.account
        sampling = row_sampling(account.request, account.sample)
        same = new_row.name == account.id and new_row.sampling == sampling
        require(same, "open", f"row {plan.rows[index]} is opened for another sample")
        same_tokens = new_row.known == tuple(account.tokens)
        same_tokens = same_tokens and new_row.prompt == account.request.num_prompt_tokens
        same_tokens = same_tokens and new_row.last_index == account.last_index
        require(
            same_tokens, "open", f"row {plan.rows[index]} is opened with other tokens"
        )
        same_pooling = new_row.pooling == account.request.pooling
        require(
            same_pooling,
            "open",
            f"row {plan.rows[index]} is pooled as {new_row.pooling!r}",
        )
        from_start = not account.request.recomputes_prompt or plan.starts[index] == 0
        require(
            from_start,
            "open",
            f"row {plan.rows[index]} does not compute its whole prompt",
        )
        for table, known_table in zip(new_row.tables, seat.tables, strict=True):
            keeps_blocks = table[: len(known_table)] == known_table
            require(
                keeps_blocks,
                "device table",
                "a row is opened with a table that lost blocks",
            )
        seat.tables, seat.opened = new_row.tables, True
        seat.adapter_slot = new_row.adapter_slot


def _check_adapter_slots(books: Books, plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that each row reads the slot in which its adapter is, or none."""
    for index, seat in seats.items():
        adapter, slot = seat.account.request.adapter, seat.adapter_slot
        is_right = slot == NO_SLOT if not adapter else books.slots.get(slot) == adapter
        detail = f"row {plan.rows[index]} reads slot {slot} for adapter {adapter!r}"
        require(is_right, "adapters", detail)


def _check_grows(plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that tables grow at their ends; an opened row gets its whole table."""
    opened = {plan.rows[new_row.index] for new_row in plan.opens}
    by_row = {seat.row: seat for seat in seats.values()}
    for grow in plan.grows:
        seat = by_row.get(grow.row)
        if seat is None or grow.row in opened or not grow.blocks:
            detail = "of a row that is not there, or of nothing"
            raise InvariantError("grow", f"{grow}: {detail}")
        tables = [*seat.tables]
        at_end = grow.at == len(tables[grow.group])
        require(at_end, "grow", f"{grow}: not at the end of {tables[grow.group]}")
        tables[grow.group] += grow.blocks
        seat.tables = tuple(tables)


def _check_rows(config: EngineConfig, plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that each row continues at its position, with the inputs that only the host
    knows.
    """
    fills = {fill.index: fill.tokens for fill in plan.fills}
    drafting = {draft.index for draft in plan.drafts}
    require(len(fills) == len(plan.fills), "feed", "a row is filled twice")
    for index, seat in seats.items():
        start = plan.starts[index]
        count = plan.num_scheduled_tokens[index]
        max_sampled = plan.max_sampled_tokens[index]
        filled = fills.get(index)
        require(
            start == seat.scheduled,
            "plan",
            f"a row starts at {start}, not {seat.scheduled}",
        )
        by_host = start < seat.num_known_at_admission
        is_valid = (filled is not None) == by_host
        require(is_valid, "feed", "host or device, not both")
        if filled is not None:
            _check_prefill(seat, filled, start, count)
            ends = (
                start + count == seat.num_known_at_admission
                and seat.account.request.max_tokens > 0
            )
            require(max_sampled == ends, "feed", "only the end of a prompt yields")
        elif index in drafting:
            require(
                1 < count == max_sampled, "feed", f"{count} inputs, {max_sampled} tokens"
            )
        else:
            require(
                count == 1 <= max_sampled, "feed", f"{count} inputs, {max_sampled} tokens"
            )
        end = start + max(count, max_sampled)
        fits = end <= min(seat.account.last_index, capacity(config, seat.tables))
        require(fits, "coverage", f"a row goes on to {end}, past its end or its table's")


def _check_prefill(seat: Seat, filled: tuple[int, ...], start: int, count: int) -> None:
    """Check that prefill tokens are those of the sample's history."""
    end = start + count
    is_valid = (
        filled == seat.account.tokens[start:end]
        and count > 0
        and end <= seat.num_known_at_admission
    )
    require(is_valid, "feed", "not the history's inputs")


def _check_deferred(config: EngineConfig, plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that rows that need a mask from the host run ahead of their known tokens at
    most as far as allowed, and that their sampling is deferred.
    """
    with_mask = {
        index: seat
        for index, seat in seats.items()
        if seat.account.request.needs_host_mask
    }
    for index, seat in with_mask.items():
        start = plan.starts[index]
        num_known = len(seat.account.tokens)
        limit = num_known + max_ahead(config)
        require(
            start < limit, "ahead", f"a row starts at {start}, knows {num_known} tokens"
        )
    expected = tuple(
        index for index in sorted(with_mask) if plan.max_sampled_tokens[index]
    )
    require(
        plan.deferred == expected,
        "apart",
        f"{plan.deferred} have deferred sampling, not {expected}",
    )


def _check_paused(config: EngineConfig, plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that a paused sample is only prefilled, and yields nothing."""
    for index, seat in seats.items():
        account = seat.account
        is_valid = not account.paused or not (
            plan.max_sampled_tokens[index] or is_paused(config, account, seat)
        )
        require(is_valid, "paused", f"{account.id} is in step {plan.step}")


def _check_decodes(plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Check that a decode row without drafts yields one token."""
    drafting = {draft.index for draft in plan.drafts}
    for index, seat in seats.items():
        if plan.starts[index] >= seat.num_known_at_admission and index not in drafting:
            max_sampled = plan.max_sampled_tokens[index]
            require(
                max_sampled == 1,
                "decode",
                f"{seat.account.id} may yield {max_sampled} tokens",
            )


def _check_members(
    books: Books,
    plan: Plan,
    seats: Mapping[int, Seat],
    after: EngineState,
    planning: Planning,
) -> None:
    """Check that every sample that can run is in the plan."""
    running = books.running
    members = {seat.account.id for seat in seats.values()}
    # A suspect admitted by this plan runs alone from the next one on.
    suspect_ids = {
        account.id for account in suspects(books.config, running)
    } - planning.unopened
    if suspect_ids:
        is_valid = len(members) == 1 and members <= suspect_ids and not books.flights
        require(
            is_valid, "fault", f"{members} run, though {suspect_ids} should run alone"
        )
        return
    for account in running:
        if account.id not in members | planning.unopened:
            reason = skips_step(books.config, account, after)
            detail = f"{account.id} could run, but is not in step {plan.step}"
            require(reason, "left out", detail)
            if reason == "blocks":
                planning.starved.append(account.id)


def held_for_copies(plan: Plan, after: EngineState) -> int:
    """How many pages were not available while a plan was made, as it copies from them."""
    if not plan.copies:
        return 0
    available = {*free_pages(after.blocks.pool)}
    nodes = every_node(after.blocks.prefix).values()
    available.update(*[node.pages for node in nodes if not node.users])
    available.update(*[save.pages for save in plan.saves])  # they were taken after that
    return len(available & {copy.source for copy in plan.copies})


def _is_bounded(
    config: EngineConfig,
    plan: Plan,
    seat: Seat,
    end: int,
    after: EngineState,
    *,
    preempts: bool,
) -> bool:
    """Whether a prefill chunk could not go on after `end`: it has as many tokens in
    flight as it may, or its state is saved there, or its tables end, and pages are not
    plenty, or were not before the turn `preempts`.
    """
    if end >= max_in_flight(config, seat) or is_save_point(config, seat, end):
        return True
    num_others = len(after.running) - 1
    pairs = zip(seat.tables, config.block_groups, strict=False)
    blocks = end // config.block_size
    missing = sum(
        group.pages for table, group in pairs if len(table) <= blocks * group.pages
    )
    block_pages = sum(group.pages for group in config.block_groups)
    available = after.blocks.available - held_for_copies(plan, after)
    short = preempts or available < missing + num_others * block_pages
    return config.by_chunk and end == capacity(config, seat.tables) and short


def _check_budget(
    config: EngineConfig,
    plan: Plan,
    seats: Mapping[int, Seat],
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
    min_tokens = 1 if planning.newcomers else len(plan.run_ids)
    allowed = total <= max(budget, min_tokens)
    require(allowed, "budget", f"{total} tokens; the policy allows {budget}")
    # A prefill continues in the next step, for which too little of the budget is left.
    short = [
        token_cost(config, seat)
        for index, seat in seats.items()
        if plan.starts[index] + plan.num_scheduled_tokens[index]
        < seat.num_known_at_admission - seat.account.paused
        and not _is_bounded(
            config,
            plan,
            seat,
            plan.starts[index] + plan.num_scheduled_tokens[index],
            after,
            preempts=planning.preempts,
        )
    ]
    if short and not planning.preempted:
        drafts = sum(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)
        left = budget - planning.used + drafts
        require(left < min(short), "budget", f"{left} is left, and a prompt waits")


def _check_target(
    config: EngineConfig, plan: Plan, planning: Planning, after: EngineState
) -> None:
    """Check that a step of decode rows and prefill keeps to the target for the time
    between tokens, by the known durations of steps, and that prompts make progress.
    """
    decoding, num_chunks = len(plan.rows) - len(plan.fills), len(plan.fills)
    if config.itl_target is None or not (decoding and num_chunks):
        return
    if not has_default_budget(config) or planning.preempted:
        return
    least = config.min_prefill_tokens
    budget = planning.budget(config, len(planning.plans))
    if budget is not None:
        progresses = budget >= min(config.max_num_batched_tokens, decoding + least)
        require(progresses, "itl", f"{budget} tokens of budget beside {decoding} rows")
    tokens, times = sum(len(fill.tokens) for fill in plan.fills), after.step_times
    if not config.itl_target or tokens <= max(least, num_chunks):
        return
    seconds = times.decode + times.token * tokens
    fits = times.decode > 0 and seconds <= config.itl_target * (1 + _ROUNDING)
    fits &= tokens <= MAX_GROWTH * times.tokens
    require(fits, "itl", f"{tokens} prefill tokens are expected to take {seconds} s")
