"""The committed KV of a running sequence: what neither a failing step nor a plan in
flight can still change.
"""

from collections.abc import Collection

from minfer.records.config import EngineConfig
from minfer.records.state import EngineState


def committed(config: EngineConfig, state: EngineState, i: int) -> int:
    """Committed KV positions of the sequence at `i`, without plans in flight."""
    return all_committed(config, state, (i,))[i]


def all_committed(
    config: EngineConfig, state: EngineState, spots: Collection[int]
) -> dict[int, int]:
    """Committed KV positions of each of the sequences at `spots`."""
    run, size, pages = state.running, config.block_size, config.groups[0].pages
    sure = {i: run.known[i] - 1 for i in spots}
    # A sequence that has not yielded since its generation began has the KV below the
    # start of its first plan in flight.
    not_yielded = {
        run.run_ids[i]: i for i in spots if run.known[i] == run.num_known_at_admission[i]
    }
    for i in not_yielded.values():
        sure[i] = run.scheduled[i]
    for plan in reversed(state.inflight) if not_yielded else ():
        copied = {copy.target for copy in plan.copies}
        for run_id, start in zip(plan.run_ids, plan.starts, strict=True):
            if run_id in not_yielded:
                i = not_yielded[run_id]
                # A copied partial block has KV only once the plan that copies it is
                # committed.
                block = start // size
                into = copied and run.tables[i][0][block * pages] in copied
                sure[i] = block * size if into else start
    return sure
