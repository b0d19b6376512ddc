"""Preemption and restart: a preempted sequence goes back to the waiting queue; after a
failed step sequences restart in place. Neither loses a token: the known tokens become the
history of the next generation.
"""

from minfer.blocks.keys import extend_keys
from minfer.blocks.ownership import Transaction
from minfer.blocks.window import unreleased
from minfer.lifecycle.committed import all_committed, committed
from minfer.lifecycle.retire import retire
from minfer.lifecycle.seat import growth_mark, publish_mark
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Preempted, Reason
from minfer.records.policy import Rank
from minfer.records.sequence import Running, SampleId, Sequence, edited
from minfer.records.state import EngineState, LiveRequest, place_is_taken
from minfer.values.log import Log
from minfer.values.pmap import Map
from minfer.values.record import evolve


def preempt(
    config: EngineConfig, state: EngineState, i: int, by: SampleId
) -> tuple[EngineState, Reason]:
    """Move a running sequence back to the waiting queue, at its place or before it, with
    all its known tokens.
    """
    seq = _with_history(config, state.running, i)
    rank, arrival, sample = seq.place
    num_output = len(seq.history) - len(seq.request.prompt)
    rank, state = consult.requeue_rank(
        config, state, rank, seq.request, seq.arrived, num_output
    )
    place = rank, arrival, sample
    if rank != seq.place[0] and place_is_taken(state, place):
        rank, place = seq.place[0], seq.place
    back = evolve(seq, preempted=seq.preempted + 1, place=place, chosen=False)
    reason = Preempted(*seq.id, by, len(seq.history), committed(config, state, i))
    if rank != seq.place[0]:
        state = evolve(state, requests=_with_rank(state.requests, seq, rank))
    state = retire(config, state, (i,))
    return evolve(state, waiting=state.waiting.insert(back), blocked=None), reason


def _with_rank(
    requests: Map[str, LiveRequest], seq: Sequence, rank: Rank
) -> Map[str, LiveRequest]:
    """The requests with the new rank of one sample, so that it can be found in the
    queue.
    """
    live = requests[seq.request.id]
    moved = {**dict(live.moved), seq.sample: rank}
    return requests.set(seq.request.id, evolve(live, moved=tuple(moved.items())))


def restart(config: EngineConfig, state: EngineState, spots: list[int]) -> EngineState:
    """Begin new generations in place, from committed KV; plans in flight are discarded.

    Known tokens stay where they are; the next plans carry those whose KV is not computed.
    """
    run = state.running
    size = config.block_size
    starts = all_committed(config, state, spots)
    anew = [i for i in spots if run.seqs[i].request.recomputes_prompt]
    starts |= dict.fromkeys(anew, 0)
    if anew and config.by_chunk:
        state = _without_windows(config, state, anew)
        run = state.running
    run = edited(
        run,
        run_ids={i: run_id for run_id, i in enumerate(spots, state.next_run_id)},
        starts=starts,
        num_known_at_admission={i: run.known[i] for i in spots},
        scheduled=starts,
        publish_at={
            i: publish_mark(config, run.known[i] // size, run.last_index[i])
            for i in spots
        },
    )
    return evolve(
        state, running=run, next_run_id=state.next_run_id + len(spots), filling=True
    )


def _without_windows(
    config: EngineConfig, state: EngineState, spots: list[int]
) -> EngineState:
    """Release all blocks that sequences have in groups with a window: they compute
    everything again, and what is behind the window was released. None is published.
    """
    run, change = state.running, Transaction(state.blocks)
    tables, chains = {}, {}
    for i in spots:
        row_tables, chain = [*run.tables[i]], run.chains[i]
        for g, group in enumerate(config.groups):
            if group.window:
                low, sinks = chain.low[g], group.sink_blocks(config.block_size)
                table, pages = row_tables[g], group.pages
                pages_held = unreleased(table, 0, len(table), low * pages, sinks * pages)
                change.pool.release(pages_held)
                row_tables[g] = Log()
        none = (0,) * len(row_tables)
        tables[i], chains[i] = tuple(row_tables), evolve(chain, sealed=none, low=none)
    grow_at = {i: growth_mark(config, 0, run.last_index[i]) for i in spots}
    run = edited(run, tables=tables, chains=chains, grow_at=grow_at)
    return evolve(state, blocks=change.done(), running=run)


def _with_history(config: EngineConfig, run: Running, i: int) -> Sequence:
    """The sequence at `i`, with all its known tokens as its history."""
    seq = run.seqs[i]
    tokens = run.tokens(i, config.block_size)
    have = tuple(run.chains[i].keys)
    keys = extend_keys(have, seq.request.root, tokens, config.block_size)
    return evolve(seq, history=tokens, keys=keys)
