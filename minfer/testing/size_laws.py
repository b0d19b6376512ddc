"""The specification of sizes: no collection of a state grows with the engine's past.

Each has a bound by what is present: blocks, rows, samples that have not ended, or the
size it had before the turn. So the size of a state depends on what is being served,
however long the engine has run. The policies of minfer have a bound for each map of their
own.
"""

from operator import attrgetter
from typing import Any, Final

from minfer.policies.builtin import Shares
from minfer.policies.fair_queue import Accounts
from minfer.policies.fair_seats import Seats
from minfer.records.config import EngineConfig
from minfer.records.sequence import COLUMNS
from minfer.records.state import EngineState
from minfer.testing.invariants import require
from minfer.values import thresholds

TICKET_LEVELS: Final = 4  # words that one ticket may need


def size_limits(
    config: EngineConfig, before: EngineState, after: EngineState
) -> dict[str, int]:
    """The most entries that each collection of the state after a turn may have."""
    blocks, num_waiting = after.blocks, len(after.waiting)
    num_samples, rows = num_waiting + len(after.running), config.max_num_seqs
    host_pages = config.host.pages if config.host is not None else 0
    max_keys = (
        config.external_store.max_known_keys if config.external_store is not None else 0
    )
    return {
        "blocks.pool.spare": blocks.free,
        "blocks.pool.freed": sum(map(bool, blocks.pool.freed.values())),  # none is empty
        "blocks.prefix.nodes": config.num_blocks,
        "blocks.prefix.idle": blocks.idle,
        "blocks.prefix.words": TICKET_LEVELS * len(blocks.prefix.idle),
        "blocks.prefix.pinned": sum(
            len(transfer.held_leaves) for transfer in after.tiers.transfers
        ),
        "free_rows": rows,
        "waiting.buckets": num_waiting,
        "waiting.counts": num_waiting,
        "waiting.adapters": num_waiting,
        "adapters.slots": config.adapter_slots,
        "adapters.unready.passed": config.adapter_slots,
        **{f"running.{name}": rows for name in COLUMNS},
        "stops": _stop_ids(before, after),
        "requests": num_samples,
        "inflight": config.depth,
        "fences": config.num_blocks,
        "faults": num_samples,
        "paused": num_samples,
        "drafting.proposals": num_samples,
        "drafting.learnt": num_samples,
        "deferred_clients": max(len(before.deferred_clients), num_waiting),
        "overrides": 0,
        "tiers.transfers": 2 * config.num_blocks + host_pages,
        "tiers.host_queue.runs": len(after.tiers.host_queue),  # none is empty
        "tiers.external_queue.runs": len(after.tiers.external_queue),
        "tiers.external_keys.young": max_keys // 2,
        "tiers.external_keys.old": max_keys // 2,
        "tiers.push_keys.young": max_keys // 2,
        "tiers.push_keys.old": max_keys // 2,
        **{
            f"policy.{name}": limit
            for name, limit in policy_limits(after, num_samples).items()
        },
    }


def _stop_ids(before: EngineState, after: EngineState) -> int:
    """A fixed number; beyond it, those of sequences that left are removed."""
    limit = max(thresholds.STOP_IDS, len(before.stops))
    if len(after.stops) <= limit:
        return limit
    seqs = (*after.running.seqs, *after.waiting)
    return len(frozenset().union(*(seq.request.stop_ids for seq in seqs)))


def policy_limits(state: EngineState, samples: int) -> dict[str, int]:
    """The limits of the policy's own state, if it is a policy of minfer."""
    policy_state: Any = state.policy
    limits = dict[str, int]()
    if isinstance(policy_state, Shares):
        limits |= {"tags": policy_state.limit}
    if isinstance(policy_state, Accounts):
        limits |= {"by_owner": policy_state.limit, "times": len(policy_state.by_owner)}
    if isinstance(policy_state, Seats):
        limits |= {"held": samples, "taken": samples, "beside": len(policy_state.held)}
    return limits


def check_sizes(config: EngineConfig, before: EngineState, after: EngineState) -> None:
    """Raise InvariantError if a collection of a state is larger than it may be."""
    for name, limit in size_limits(config, before, after).items():
        size = len(attrgetter(name)(after))
        require(size <= limit, "size", f"{name} has {size} entries, of at most {limit}")
    for name, live in after.requests.items():
        size = len(live.moved)
        require(size <= live.samples, "size", f"{name} has {size} places of samples")
    _tables(config, after)


def _tables(config: EngineConfig, after: EngineState) -> None:
    """Check that a sequence has no more blocks and keys than its last token needs."""
    run, size = after.running, config.block_size
    for last_index, tables, chain in zip(
        run.last_index, run.tables, run.chains, strict=True
    ):
        max_blocks = -(-(last_index + 1) // size)
        pairs = zip(tables, config.block_groups, strict=False)
        blocks = max(-(-len(table) // group.pages) for table, group in pairs)
        counts = blocks, len(chain.keys), len(chain.chunks), len(chain.states.kept)
        fits = max(counts) <= max_blocks
        require(
            fits, "size", f"a sequence of {last_index + 1} tokens has {blocks} blocks"
        )
