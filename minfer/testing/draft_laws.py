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
from minfer.testing.kept_state_laws import next_checkpoint


def host_drafts(config: EngineConfig) -> bool:
    """Whether the host drafts."""
    return config.speculation is not None and config.speculation.drafter == HOST


def drafts_in_flight(books: Books) -> bool:
    """Whether the host drafts for a step in flight: no step is planned after it."""
    has_drafts = any(flight.plan.drafts for flight in books.flights)
    return host_drafts(books.config) and has_drafts


def may_wait_to_draft(books: Books) -> bool:
    """Whether the next step may wait for those in flight: the host has drafted for it."""
    spec_config = books.config.speculation
    if spec_config is None or not books.flights:
        return False
    few_rows = not 0 < spec_config.rows < len(books.running)
    has_proposals = few_rows and any(
        _num_proposed(books.config, spec_config, account) for account in books.running
    )
    return drafts_in_flight(books) or (host_drafts(books.config) and has_proposals)


def check_drafts(
    books: Books,
    plan: Plan,
    seats: Mapping[int, Seat],
    after: EngineState,
    budget: int | None,
    *,
    preempted: bool,
) -> None:
    """Raise InvariantError unless the drafts of a plan are allowed.

    The host's drafts must be those that it proposed after the known tokens, for a step
    with no other in flight. `budget` is the policy's answer, if that is known.
    """
    spec_config = books.config.speculation
    places = [draft.index for draft in plan.drafts]
    require(len(set(places)) == len(places), "drafts", "a row has drafts twice")
    require(not drafts_in_flight(books), "drafts", "a step is planned behind some")
    if spec_config is None:
        require(not places, "drafts", "there is no speculation")
        return
    in_flight = host_drafts(books.config) and bool(books.flights)
    require(not (places and in_flight), "drafts", "a step is in flight before them")
    for draft in plan.drafts:
        _check_row(spec_config, plan, seats[draft.index], draft.index, draft.tokens)
    costs, total = spec_config.costs, sum(plan.num_scheduled_tokens)
    max_measured = costs.verify[-1][0] if spec_config.adaptive and costs else 0
    is_measured = not (places and max_measured) or total <= max_measured
    detail = f"{total} inputs, of at most {max_measured} measured"
    require(is_measured, "drafts", detail)
    allowed = books.config.max_num_batched_tokens if budget is None else budget
    num_inputs = _num_inputs(plan)
    require(
        not places or num_inputs <= allowed,
        "drafts",
        f"{num_inputs} inputs, each row's drafts as many as the deepest's, of {allowed}",
    )
    method = getattr(type(books.config.policy), "drafts", None)
    # A token of samples preempted in this turn may still be counted.
    is_default = method is Policy.drafts and not preempted
    if not spec_config.adaptive and is_default:
        _expected_drafts(books, plan, seats, after, budget)
    if host_drafts(books.config):  # proposals are for one step
        for account in books.accounts.values():
            account.proposed = None


def _check_row(
    spec_config: Speculation, plan: Plan, seat: Seat, index: int, tokens: tuple[int, ...]
) -> None:
    """Check that a row may have drafts, that their number is allowed, and their
    tokens.
    """
    account, count = seat.account, plan.num_scheduled_tokens[index] - 1
    may = (
        _may_draft(spec_config, account)
        and seat.scheduled >= seat.num_known_at_admission
        and not account.paused
    )
    require(may, "drafts", f"{account.id} must not have any")
    if not 0 < count <= spec_config.drafts or 0 < spec_config.rows < len(plan.run_ids):
        raise InvariantError("drafts", f"{account.id} has {count}")
    proposed, num_known = account.proposed, seat.scheduled + 1
    is_allowed = spec_config.drafter != HOST and not tokens
    if spec_config.drafter == HOST and proposed is not None:
        same = proposed.tokens[:count] == tokens and len(tokens) == count
        is_allowed = same and proposed.known == num_known == len(account.tokens)
    require(is_allowed, "drafts", f"{account.id} has {tokens}, of {proposed}")


def token_cost(config: EngineConfig, seat: Seat) -> int:
    """Budget that a prefill token takes, but for the first of its row in a step."""
    scored = seat.account.request.sampling.prompt_logprobs is not None
    return config.scored_cost if scored else 1


def row_cost(config: EngineConfig, plan: Plan, seats: Mapping[int, Seat]) -> int:
    """Budget that a plan takes."""
    filled = {fill.index for fill in plan.fills}
    extra = (
        (plan.num_scheduled_tokens[index] - 1) * (token_cost(config, seats[index]) - 1)
        for index in filled
    )
    return sum(plan.num_scheduled_tokens) + sum(extra)


def _num_inputs(plan: Plan) -> int:
    """Inputs of a plan, if each row with drafts has as many as the deepest of them."""
    drafts = [plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts]
    return (
        sum(plan.num_scheduled_tokens)
        - sum(drafts)
        + len(drafts) * max(drafts, default=0)
    )


def _may_draft(spec_config: Speculation, account: SampleAccount) -> bool:
    """Whether a sample may have drafts: a draft model makes none for one that needs
    masks from the host.
    """
    request = account.request
    bound = request.needs_host_mask and spec_config.drafter != HOST
    return not bound and request.prompt_only is None


def _num_proposed(
    config: EngineConfig, spec_config: Speculation, account: SampleAccount
) -> int:
    """How many drafts the host has for a sample, if nothing of it is in flight. None
    lead to where its state is to be saved.
    """
    proposed = account.proposed
    if proposed is None or proposed.known != len(account.tokens) or account.paused:
        return 0
    if not _may_draft(spec_config, account):
        return 0
    num_known, last = len(account.tokens), account.last_index
    if account.seat is not None:
        save_at = next_checkpoint(config, account.seat, account.seat.scheduled)
        last = min(last, save_at - 1)
    room = last - num_known
    return max(0, min(spec_config.drafts, len(proposed.tokens), room))


def _expected_drafts(
    books: Books,
    plan: Plan,
    seats_by_index: Mapping[int, Seat],
    after: EngineState,
    budget: int | None,
) -> None:
    """Check that every row has all possible drafts; and if the host drafts, that this
    step was not planned before it could use them.
    """
    spec_config, config = books.config.speculation, books.config
    if spec_config is None or 0 < spec_config.rows < len(plan.run_ids):
        return
    if host_drafts(config) and books.flights:
        has_proposals = any(
            _num_proposed(books.config, spec_config, account) for account in books.running
        )
        too_early = has_proposals and _only_decodes(config, books)
        require(not too_early, "drafts", "a step does not wait for what it could use")
        return
    if budget is None:
        return
    drafts = sum(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)
    room, missing = max(0, budget - row_cost(config, plan, seats_by_index) + drafts), 0
    filled = {fill.index for fill in plan.fills}
    seats = {
        index: seats_by_index[index] for index in sorted(seats_by_index.keys() - filled)
    }
    for index, num_possible in _possible_drafts(config, spec_config, seats, room).items():
        seat = seats_by_index[index]
        account = seat.account
        room_in_table = capacity(config, seat.tables) - seat.scheduled - 1
        num_drafts = len(range(1, plan.num_scheduled_tokens[index]))
        require(
            num_drafts == min(num_possible, room_in_table),
            "drafts",
            f"{account.id} has {num_drafts} of {num_possible}, {room_in_table}",
        )
        if room_in_table < num_possible:
            blocks = -(-(seat.scheduled + num_possible + 1) // config.block_size)
            for table, group in zip(seat.tables, config.block_groups, strict=False):
                missing += max(0, blocks * group.pages - len(table))
    reserve = len(after.running) * sum(group.pages for group in config.block_groups)
    plenty = missing and missing + reserve <= after.blocks.available
    require(not plenty, "drafts", f"{missing} pages are not taken, though there are")


def _possible_drafts(
    config: EngineConfig, spec_config: Speculation, seats: Mapping[int, Seat], room: int
) -> dict[int, int]:
    """The number of drafts of each of these, in their order, while there is room; each of
    them takes as much as the deepest.
    """
    counts, left = dict[int, int](), room
    for index, seat in seats.items():
        account = seat.account
        if host_drafts(config):
            max_drafts = _num_proposed(config, spec_config, account)
        else:
            end = _end_of_drafts(config, seat)
            max_drafts = min(spec_config.drafts, end - seat.scheduled - 1)
            max_drafts = max(0, max_drafts) * _may_draft(spec_config, account)
        counts[index] = min(left, max_drafts)
        left -= counts[index]
    deepest = room // max(1, sum(map(bool, counts.values())))
    return {index: min(count, deepest) for index, count in counts.items()}


def _end_of_drafts(config: EngineConfig, seat: Seat) -> int:
    """The last position of a row's drafts: steps without drafts lead to where its state
    is saved, one for each step in flight, so that the position is known.
    """
    last, save_at = seat.account.last_index, next_checkpoint(config, seat, seat.scheduled)
    return last if save_at > last else min(last, save_at - config.depth)


def _only_decodes(config: EngineConfig, books: Books) -> bool:
    """Whether no row is in prefill, and there are tokens for drafts."""
    running, spec_config = books.running, config.speculation
    seats = [account.seat for account in running if account.seat is not None]
    decode = all(seat.scheduled >= seat.num_known_at_admission for seat in seats)
    decode = decode and len(seats) == len(running)
    few_rows = spec_config is not None and not 0 < spec_config.rows < len(running)
    return decode and few_rows and len(running) < config.max_num_batched_tokens
