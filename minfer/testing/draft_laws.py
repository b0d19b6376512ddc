"""The specification of drafts: which rows have drafts in a step, how many, and which
steps wait for them.

If as many drafts as possible are wanted, each row's number follows from the proposals,
the sample's last token, the budget left (of which each row with drafts takes as much as
the deepest), and the end of its table. If the number is adaptive, only its bounds are
checked here.
"""

from collections.abc import Mapping

from minfer.records.config import EngineConfig
from minfer.records.plan import Plan
from minfer.records.policy import Policy
from minfer.records.speculation import HOST, Speculation
from minfer.records.state import EngineState
from minfer.testing.accounts import SampleAccount, Seat, capacity
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require


def by_host(config: EngineConfig) -> bool:
    """Whether the host drafts."""
    return config.speculation is not None and config.speculation.drafter == HOST


def drafts_in_flight(books: Books) -> bool:
    """Whether the host drafts for a step in flight: no step is planned after it."""
    some = any(flight.plan.drafts for flight in books.flights)
    return by_host(books.config) and some


def may_wait_to_draft(books: Books) -> bool:
    """Whether the next step may wait for those in flight: the host has drafted for it."""
    how = books.config.speculation
    if how is None or not books.flights:
        return False
    few = not 0 < how.rows < len(books.running)
    fresh = few and any(_of_host(how, one) for one in books.running)
    return drafts_in_flight(books) or (by_host(books.config) and fresh)


def check_drafts(
    books: Books,
    plan: Plan,
    here: Mapping[int, Seat],
    after: EngineState,
    budget: int | None,
    *,
    preempted: bool,
) -> None:
    """Raise InvariantError unless the drafts of a plan are allowed.

    The host's drafts must be those that it proposed after the known tokens, for a step
    with no other in flight. `budget` is the policy's answer, if that is known.
    """
    how = books.config.speculation
    places = [draft.index for draft in plan.drafts]
    require(len(set(places)) == len(places), "drafts", "a row has drafts twice")
    require(not drafts_in_flight(books), "drafts", "a step is planned behind some")
    if how is None:
        require(not places, "drafts", "there is no speculation")
        return
    in_flight = by_host(books.config) and bool(books.flights)
    require(not (places and in_flight), "drafts", "a step is in flight before them")
    for draft in plan.drafts:
        _right(how, plan, here[draft.index], draft.index, draft.tokens)
    most = how.costs.verify[-1][0] if how.adaptive and how.costs else 0
    known = not (places and most) or sum(plan.num_scheduled_tokens) <= most
    require(
        known,
        "drafts",
        f"{sum(plan.num_scheduled_tokens)} inputs, of at most {most} measured",
    )
    allowed = books.config.max_num_batched_tokens if budget is None else budget
    lines = _lines(plan)
    require(
        not places or lines <= allowed,
        "drafts",
        f"{lines} inputs, each row's drafts as many as the deepest's, of {allowed}",
    )
    policy = getattr(type(books.config.policy), "drafts", None)
    # A token of samples preempted in this turn may still be counted.
    usual = policy is Policy.drafts and not preempted
    if not how.adaptive and usual:
        _expected_drafts(books, plan, here, after, budget)
    if by_host(books.config):  # proposals are for one step
        for one in books.accounts.values():
            one.proposed = None


def _right(
    how: Speculation, plan: Plan, seat: Seat, at: int, tokens: tuple[int, ...]
) -> None:
    """Check that a row may have drafts, this many, and these."""
    one, count = seat.account, plan.num_scheduled_tokens[at] - 1
    may = _may(how, one) and seat.scheduled >= seat.base and not one.paused
    require(may, "drafts", f"{one.id} must not have any")
    if not 0 < count <= how.drafts or 0 < how.rows < len(plan.run_ids):
        raise InvariantError("drafts", f"{one.id} has {count}")
    said, known = one.proposed, seat.scheduled + 1
    right = how.drafter != HOST and not tokens
    if how.drafter == HOST and said is not None:
        same = said.tokens[:count] == tokens and len(tokens) == count
        right = same and said.known == known == len(one.known)
    require(right, "drafts", f"{one.id} has {tokens}, of {said}")


def token_cost(config: EngineConfig, seat: Seat) -> int:
    """Budget that a prefill token takes, but for the first of its row in a step."""
    scored = seat.account.request.sampling.prompt_logprobs is not None
    return config.scored_cost if scored else 1


def row_cost(config: EngineConfig, plan: Plan, here: Mapping[int, Seat]) -> int:
    """Budget that a plan takes."""
    filled = {fill.index for fill in plan.fills}
    extra = (
        (plan.num_scheduled_tokens[at] - 1) * (token_cost(config, here[at]) - 1)
        for at in filled
    )
    return sum(plan.num_scheduled_tokens) + sum(extra)


def _lines(plan: Plan) -> int:
    """Inputs of a plan, if each row with drafts has as many as the deepest of them."""
    drafts = [plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts]
    return (
        sum(plan.num_scheduled_tokens)
        - sum(drafts)
        + len(drafts) * max(drafts, default=0)
    )


def _may(how: Speculation, one: SampleAccount) -> bool:
    """Whether a sample may have drafts: a draft model makes none in lockstep with the
    host.
    """
    request = one.request
    bound = request.needs_host_mask and how.drafter != HOST
    return not bound and request.prompt_only is None


def _of_host(how: Speculation, one: SampleAccount) -> int:
    """How many drafts the host has for a sample, if nothing of it is in flight."""
    said = one.proposed
    if said is None or said.known != len(one.known) or one.paused:
        return 0
    if not _may(how, one):
        return 0
    return max(0, min(how.drafts, len(said.tokens), one.last - len(one.known)))


def _expected_drafts(
    books: Books,
    plan: Plan,
    here: Mapping[int, Seat],
    after: EngineState,
    budget: int | None,
) -> None:
    """Check that every row has all possible drafts; and if the host drafts, that this
    step was not planned before it could use them.
    """
    how, config = books.config.speculation, books.config
    if how is None or 0 < how.rows < len(plan.run_ids):
        return
    if by_host(config) and books.flights:
        wanted = any(_of_host(how, one) for one in books.running)
        hurried = wanted and _only_decodes(config, books)
        require(not hurried, "drafts", "a step does not wait for what it could use")
        return
    if budget is None:
        return
    drafts = sum(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)
    room, lacks = max(0, budget - row_cost(config, plan, here) + drafts), 0
    filled = {fill.index for fill in plan.fills}
    seats = {at: here[at] for at in sorted(here.keys() - filled)}
    for at, due in _shared(config, how, seats, room).items():
        seat = here[at]
        one = seat.account
        ends = capacity(config, seat.tables) - seat.scheduled - 1
        has = len(range(1, plan.num_scheduled_tokens[at]))
        require(has == min(due, ends), "drafts", f"{one.id} has {has} of {due}, {ends}")
        if ends < due:
            blocks = -(-(seat.scheduled + due + 1) // config.block_size)
            for table, group in zip(seat.tables, config.groups, strict=True):
                lacks += max(0, blocks * group.pages - len(table))
    others = len(after.running) * sum(group.pages for group in config.groups)
    plenty = lacks and lacks + others <= after.blocks.available
    require(not plenty, "drafts", f"{lacks} pages are not taken, though there are")


def _shared(
    config: EngineConfig, how: Speculation, seats: Mapping[int, Seat], room: int
) -> dict[int, int]:
    """The number of drafts of each of these, in their order, while there is room; each of
    them takes as much as the deepest.
    """
    found, left = dict[int, int](), room
    for at, seat in seats.items():
        one = seat.account
        most = min(how.drafts, one.last - seat.scheduled - 1) if _may(how, one) else 0
        found[at] = min(left, _of_host(how, one) if by_host(config) else max(0, most))
        left -= found[at]
    deepest = room // max(1, sum(map(bool, found.values())))
    return {at: min(count, deepest) for at, count in found.items()}


def _only_decodes(config: EngineConfig, books: Books) -> bool:
    """Whether no row is in prefill, and there are tokens for drafts."""
    running, how = books.running, config.speculation
    seats = [one.seat for one in running if one.seat is not None]
    decode = all(seat.scheduled >= seat.base for seat in seats) and len(seats) == len(
        running
    )
    few = how is not None and not 0 < how.rows < len(running)
    return decode and few and len(running) < config.max_num_batched_tokens
