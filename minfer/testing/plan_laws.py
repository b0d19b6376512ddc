"""The specification of plans: which plan may be made of the sequences that run.

A plan takes every row that can run, and no other; each exactly where it stands, with the
inputs that only the host knows; within the budget; and what it tells a device of tables
and copies is all that the device needs to know.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import index

from attrs import define, field

from minfer.config import EngineConfig
from minfer.messages import Admitted, Executed
from minfer.plan import Copy, Plan
from minfer.sample import row_sampling
from minfer.sequence import SampleId
from minfer.state import EngineState
from minfer.testing.accounts import Account, Flight, Seat, touched
from minfer.testing.invariants import InvariantError, require


@define
class Planning:
    """What was decided in the planning half of one turn."""

    flying: int  # plans in flight before it
    budgets: (
        list[int] | None
    )  # the policy's answers, one for each plan, if they are known
    newcomers: dict[SampleId, Admitted] = field(factory=dict)  # let in, by the next plan
    admitted: list[SampleId] = field(factory=list)  # in this turn
    preempted: list[tuple[SampleId, SampleId]] = field(factory=list)  # who, for whom
    gave_way: set[SampleId] = field(
        factory=set
    )  # of them those who were the last that ran
    plans: list[Plan | None] = field(factory=list)  # None: the last try made none
    lately: set[SampleId] = field(factory=set)  # let in by the last plan
    starved: list[SampleId] = field(
        factory=list
    )  # left out of a plan for want of a block
    alone: bool = False  # one that may be at fault runs alone

    def budget(self, config: EngineConfig, number: int) -> int | None:
        """The tokens that plan `number` of this turn may take; None: it is not known."""
        if self.budgets is None or number >= len(self.budgets):
            return None
        answer: object = self.budgets[number]
        return min(answer, config.max_num_batched_tokens) if type(answer) is int else None

    def launched(self, plan: Plan | None) -> None:
        """A plan has been read, or none was made; the next one has newcomers
        of its own.
        """
        self.plans.append(plan)
        self.lately = set(self.newcomers)
        self.newcomers.clear()


def good(config: EngineConfig, plan: Plan, done: Executed) -> bool:
    """Whether results are what a step of this plan can yield; else it counts
    as failed.
    """
    if done.step != plan.step or not isinstance(done.yields, tuple):
        return False
    if len(done.yields) != len(plan.gens):
        return False
    for tokens, most in zip(done.yields, plan.most, strict=True):
        if type(tokens) is not tuple or not min(1, most) <= len(tokens) <= most:
            return False
        try:
            numbers = [index(token) for token in tokens]
        except Exception:  # an object in a token's place may raise anything
            return False
        if not all(0 <= number < config.vocab_size for number in numbers):
            return False
    return True


def suspects(config: EngineConfig, running: Collection[Account]) -> list[Account]:
    """Who may run alone only: one more failure could end it, or the second has not told
    enough.
    """
    few = max(1, min(2, config.max_failures - 1))
    return [one for one in running if one.faults >= few]


def check_plan(
    config: EngineConfig,
    plan: Plan,
    running: Collection[Account],
    seats: Mapping[int, Seat],
    flights: Sequence[Flight],
    after: EngineState,
    planning: Planning,
) -> None:
    """Raise InvariantError unless `plan` may be made now; updates what the
    device knows.
    """
    columns = {
        len(column)
        for column in (plan.gens, plan.rows, plan.starts, plan.counts, plan.most)
    }
    require(
        columns == {len(plan.gens)} and plan.gens, "plan", "columns of different lengths"
    )
    here = {at: seats[gen] for at, gen in enumerate(plan.gens) if gen in seats}
    require(len(here) == len(plan.gens), "plan", "a row without a sequence")
    later = after.next_step - plan.step - 1
    require(
        later >= 0 and plan.step not in [f.plan.step for f in flights],
        "plan",
        "its number",
    )
    require(len(set(plan.gens)) == len(plan.gens), "plan", "a sequence is planned twice")
    for at, seat in here.items():
        require(plan.rows[at] == seat.row, "plan", "a sequence in the wrong row")
    _opens(plan, here)
    _grows(plan, seats)
    _rows(config, plan, here)
    _repeat(config, plan, here, after)
    _apart(plan, here)
    _copies(config, plan, here, running, planning)
    _members(config, plan, here, running, flights, after, planning)
    _budget(config, plan, planning)


def _opens(plan: Plan, here: Mapping[int, Seat]) -> None:
    """A generation is opened by its first plan, and only there, with all that the device
    keeps.
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
        known = known and one.prompt == len(account.request.prompt)
        known = known and one.last == account.last
        require(known, "open", f"row {plan.rows[at]} is opened with other tokens")
        (table,) = one.tables
        kept = table[: len(seat.table)] == seat.table
        require(kept, "device table", "a row is opened with a table that lost blocks")
        seat.table, seat.opened = table, True


def _grows(plan: Plan, seats: Mapping[int, Seat]) -> None:
    """Tables grow at their ends; a row that is opened gets its table whole."""
    opened = {plan.rows[one.index] for one in plan.opens}
    by_row = {seat.row: seat for seat in seats.values()}
    for grow in plan.grows:
        seat = by_row.get(grow.row)
        if seat is None or grow.row in opened or not grow.blocks:
            raise InvariantError(
                "grow", f"{grow}: of a row that is not there, or of nothing"
            )
        require(
            grow.at == len(seat.table), "grow", f"{grow}: not at the end of {seat.table}"
        )
        seat.table += grow.blocks


def _rows(config: EngineConfig, plan: Plan, here: Mapping[int, Seat]) -> None:
    """Each row goes on where it stands, and the host gives what only the host knows."""
    fills = {fill.index: fill.tokens for fill in plan.fills}
    require(len(fills) == len(plan.fills), "feed", "a row is filled twice")
    for at, seat in here.items():
        start, count, most, filled = (
            plan.starts[at],
            plan.counts[at],
            plan.most[at],
            fills.get(at),
        )
        require(start == seat.sched, "plan", f"a row starts at {start}, not {seat.sched}")
        require(
            (filled is not None) == (start < seat.base),
            "feed",
            "host or device, not both",
        )
        if filled is not None:
            end = start + count
            right = (
                filled == seat.account.known[start:end] and count > 0 and end <= seat.base
            )
            require(right, "feed", "not the history's inputs")
            require(most == (end == seat.base), "feed", "only the end of a prompt yields")
        else:
            require(count == 1 <= most, "feed", f"{count} inputs, {most} tokens")
        end = start + max(count, most)
        fits = end <= min(seat.account.last, len(seat.table) * config.block_size)
        require(fits, "coverage", f"a row goes on to {end}, past its end or its table's")


def _apart(plan: Plan, here: Mapping[int, Seat]) -> None:
    """Who may not run ahead is planned when its last token is known, and
    sampled apart.
    """
    bound = {at: seat for at, seat in here.items() if seat.account.request.lockstep}
    for at, seat in bound.items():
        start = plan.starts[at]
        known = len(seat.account.known)
        require(start < known, "ahead", f"a row starts at {start}, knows {known} tokens")
    due = tuple(at for at in sorted(bound) if plan.most[at])
    require(plan.apart == due, "apart", f"{plan.apart} are sampled apart, not {due}")


def _repeat(
    config: EngineConfig, plan: Plan, here: Mapping[int, Seat], after: EngineState
) -> None:
    """Several forwards in one plan: as many as each row has room for, while nobody is
    filled.
    """
    require(
        plan.repeat == max((1, *plan.most)), "repeat", f"{plan.repeat} for {plan.most}"
    )
    for at, seat in here.items():
        if plan.starts[at] >= seat.base:
            room = (
                min(seat.account.last, len(seat.table) * config.block_size)
                - plan.starts[at]
            )
            single = plan.fills or after.lockstep
            most = 1 if single else max(1, min(config.max_repeat, room))
            require(
                plan.most[at] == most, "repeat", f"{plan.most[at]} tokens, not {most}"
            )


def _copies(
    config: EngineConfig,
    plan: Plan,
    here: Mapping[int, Seat],
    running: Collection[Account],
    planning: Planning,
) -> None:
    """A newcomer's copy is of a sibling's computed tail of the prompt, into a block of
    its own.
    """
    size, copies = config.block_size, list(plan.copies)
    for at, seat in here.items():
        one, start = seat.account, plan.starts[at]
        got = planning.newcomers.get(one.id)
        if got is None or not got.copied:
            continue
        right = (
            start == got.hit + got.copied == len(one.request.prompt) - 1
            and got.copied < size
        )
        require(right, "copy", f"{got}: it starts at {start}")
        table = seat.table
        others = [
            o
            for o in running
            if o.request.id == one.request.id and o.seat not in (None, seat)
        ]
        sources = {
            o.seat.table[start // size]
            for o in others
            if o.seat is not None
            and o.seat.kv >= start
            and len(o.seat.table) > start // size
        }
        mine = next((c for c in copies if c.target == table[start // size]), None)
        if mine is None:
            raise InvariantError(
                "copy", f"{one.id} has KV up to {start}, but from where?"
            )
        copies.remove(mine)
        same = mine.source in sources and mine == Copy(
            mine.source, mine.target, got.copied
        )
        require(same, "copy", f"{mine}: not the tail of a sibling's prompt")
    require(not copies, "copy", f"{copies} of nobody's")
    standing = (touched(config, one.seat, one.seat.kv) for one in running if one.seat)
    targets = Counter(chain.from_iterable(standing))
    for copy in plan.copies:
        require(targets[copy.target] == 1, "copy", f"others have block {copy.target}")


def _members(
    config: EngineConfig,
    plan: Plan,
    here: Mapping[int, Seat],
    running: Collection[Account],
    flights: Sequence[Flight],
    after: EngineState,
    planning: Planning,
) -> None:
    """Everybody who can run is in the plan."""
    members = {seat.account.id for seat in here.values()}
    accused = {one.id for one in suspects(config, running)}
    if accused:
        planning.alone = True
        right = len(members) == 1 and members <= accused and not flights
        require(right, "fault", f"{members} run, though {accused} should run alone")
        return
    for one in running:
        if one.id not in members:
            why = left_out(config, one, after)
            require(
                why, "left out", f"{one.id} could run, but is not in step {plan.step}"
            )
            if why == "blocks":
                planning.starved.append(one.id)


def left_out(config: EngineConfig, one: Account, after: EngineState) -> str:
    """Why a running sample has no input due: "end", "blocks", "host" (it may not run
    ahead of a token in flight); nothing if it could run.
    """
    seat = one.seat
    if seat is None or seat.sched >= one.last:
        return "end"
    if one.request.lockstep and seat.sched >= len(one.known):
        return "host"
    table = len(seat.table)
    if (
        not seat.opened and one.id in after.running.ids
    ):  # nobody was told how it grew since
        table = len(after.running.tables[after.running.ids.index(one.id)])
    return "blocks" if seat.sched >= table * config.block_size else ""


def _budget(config: EngineConfig, plan: Plan, planning: Planning) -> None:
    """A forward takes no more tokens than the policy allows, save one for each row that
    runs.
    """
    total = sum(plan.counts)
    require(len(plan.gens) <= config.max_num_seqs, "budget", f"{len(plan.gens)} rows")
    require(total <= config.max_num_batched_tokens, "budget", f"{total} tokens")
    budget = planning.budget(config, len(planning.plans))
    if budget is None:
        return
    few = 1 if planning.newcomers else len(plan.gens)
    require(
        total <= max(budget, few), "budget", f"{total} tokens; the policy allows {budget}"
    )
    short = any(most == 0 for most in plan.most)  # a prompt goes on in the next step
    if short and not planning.preempted:
        require(
            total >= budget, "budget", f"{total} of {budget} tokens, and a prompt waits"
        )
