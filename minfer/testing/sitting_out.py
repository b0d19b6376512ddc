"""The specification of who sits a step out, whatever else there is to do: what a running
sample waits for.
"""

from collections.abc import Collection

from minfer.config import EngineConfig
from minfer.speculate.settings import HOST
from minfer.state import EngineState
from minfer.testing.accounts import Account, Seat
from minfer.testing.books import Books


def suspects(config: EngineConfig, running: Collection[Account]) -> list[Account]:
    """Who may run alone only: one more failure could end it, or the second has not told
    enough. Who is paused does not run at all then, so nobody waits for it.
    """
    few = few_failures(config)
    return [one for one in running if one.faults >= few and not one.paused]


def few_failures(config: EngineConfig) -> int:
    """Failed steps after which one runs alone."""
    return max(1, min(2, config.max_failures - 1))


def most_ahead(config: EngineConfig, one: Account) -> int:
    """How many tokens that are not known a sample which is bound to the host may be
    ahead of.
    """
    return int(config.late_masks and one.request.beams is None)


def rests(config: EngineConfig, one: Account, seat: Seat) -> bool:
    """Whether nothing of a paused sample may be planned: it has only what yields left, or
    would have to run alone.
    """
    return seat.sched >= seat.base - 1 or one.faults >= few_failures(config)


def drafts_in_flight(books: Books) -> bool:
    """Whether the host drafts for a step in flight: none is planned behind it."""
    how = books.config.speculation
    by_host = how is not None and how.drafter == HOST
    return by_host and any(flight.plan.drafts for flight in books.flights)


def may_wait_to_draft(books: Books) -> bool:
    """Whether the next step may wait for those in flight: the host has drafted for it."""
    fresh = any(
        one.proposed is not None and one.proposed.known == len(one.known)
        for one in books.running
    )
    return bool(books.flights) and (fresh or drafts_in_flight(books))


def left_out(config: EngineConfig, one: Account, after: EngineState) -> str:
    """Why a running sample has no input due: "end", "blocks", "host" (it awaits a token
    in flight, or its mask), "beams" (it awaits others of its search); nothing if
    it could run.
    """
    seat = one.seat
    if one.offered:
        return "beams"
    if seat is None or seat.sched >= one.last:
        return "end"
    if one.request.lockstep and seat.sched >= len(one.known) + most_ahead(config, one):
        return "host"
    if one.paused and rests(config, one, seat):
        return "host"
    run = after.running
    table = len(seat.table)
    if not seat.opened and one.id in run.ids:  # nobody was told how it grew since
        table = len(run.tables[run.ids.index(one.id)])
    return "blocks" if seat.sched >= table * config.block_size else ""
