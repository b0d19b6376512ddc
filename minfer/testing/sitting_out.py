"""The specification of who sits a step out, whatever else there is to do: what a running
sample waits for.
"""

from collections.abc import Collection

from minfer.config import EngineConfig
from minfer.state import EngineState
from minfer.testing.accounts import Account, Seat


def suspects(config: EngineConfig, running: Collection[Account]) -> list[Account]:
    """Who may run alone only: one more failure could end it, or the second has not told
    enough. Who is paused does not run at all then, so nobody waits for it.
    """
    few = few_failures(config)
    return [one for one in running if one.faults >= few and not one.paused]


def few_failures(config: EngineConfig) -> int:
    """Failed steps after which one runs alone."""
    return max(1, min(2, config.max_failures - 1))


def most_ahead(config: EngineConfig) -> int:
    """How many tokens that are not known a sample which is bound to the host may be
    ahead of.
    """
    return int(config.late_masks)


def rests(config: EngineConfig, one: Account, seat: Seat) -> bool:
    """Whether nothing of a paused sample may be planned: it has only what yields left, or
    would have to run alone.
    """
    return seat.sched >= seat.base - 1 or one.faults >= few_failures(config)


def left_out(config: EngineConfig, one: Account, after: EngineState) -> str:
    """Why a running sample has no input due: "end", "blocks", "host" (it awaits a token
    in flight, or its mask); nothing if it could run.
    """
    seat = one.seat
    if seat is None or seat.sched >= one.last:
        return "end"
    if one.request.lockstep and seat.sched >= len(one.known) + most_ahead(config):
        return "host"
    if one.paused and rests(config, one, seat):
        return "host"
    run = after.running
    table = len(seat.table)
    if not seat.opened and one.id in run.ids:  # nobody was told how it grew since
        table = len(run.tables[run.ids.index(one.id)])
    return "blocks" if seat.sched >= table * config.block_size else ""
