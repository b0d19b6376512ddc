"""The specification of skipped rows: what a running sample waits for when it is not in a
step.
"""

from collections.abc import Collection
from math import inf

from minfer.records.config import EngineConfig
from minfer.records.state import EngineState
from minfer.testing.accounts import SampleAccount, Seat, capacity


def suspects(
    config: EngineConfig, running: Collection[SampleAccount]
) -> list[SampleAccount]:
    """The samples that may only run alone: one more failure could end them, or the second
    one did not show the cause. Paused ones are left out: they do not run, so none waits
    for them.
    """
    threshold = failures_until_alone(config)
    return [
        account
        for account in running
        if account.faults >= threshold and not account.paused
    ]


def failures_until_alone(config: EngineConfig) -> int:
    """Failed steps after which a sample runs alone."""
    return max(1, min(2, config.max_failures - 1))


def max_ahead(config: EngineConfig) -> int:
    """How many tokens a sample that needs masks from the host may be ahead of its known
    ones.
    """
    return int(config.late_masks)


def is_paused(config: EngineConfig, account: SampleAccount, seat: Seat) -> bool:
    """Whether nothing of a paused sample may be planned: only its yielding inputs are
    left, or it would have to run alone.
    """
    return (
        seat.scheduled >= seat.num_known_at_admission - 1
        or account.faults >= failures_until_alone(config)
    )


def skips_step(config: EngineConfig, account: SampleAccount, after: EngineState) -> str:
    """Why a running sample has no input due: "end", "blocks", "host" (it waits for a
    token in flight, or for its mask), "window" (it has as many prefill tokens in flight
    as it may); nothing if it could run.
    """
    seat = account.seat
    if seat is None or seat.scheduled >= account.last_index:
        return "end"
    limit = len(account.tokens) + max_ahead(config)
    if account.request.needs_host_mask and seat.scheduled >= limit:
        return "host"
    if account.paused and is_paused(config, account, seat):
        return "host"
    in_prefill = seat.scheduled < seat.num_known_at_admission
    if in_prefill and seat.scheduled >= max_in_flight(config, seat):
        return "window"
    run = after.running
    ends = capacity(config, seat.tables)
    if not seat.opened and account.id in run.ids:  # its growth since is in no plan
        ends = capacity(config, run.tables[run.ids.index(account.id)])
    return "blocks" if seat.scheduled >= ends else ""


def max_in_flight(config: EngineConfig, seat: Seat) -> float:
    """How far a prompt may be planned: where blocks of a window are taken chunk by chunk,
    a budget and a quarter further than it has KV.
    """
    budget = config.max_num_batched_tokens
    return seat.kv + budget + budget // 4 if config.by_chunk else inf
