"""Builds the plan of a step from the decisions about it: columns, inputs, and changes for
the device.
"""

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, compress
from operator import add

from attrs import frozen

from minfer.planning.saves import add_saves
from minfer.planning.step_builder import StepBuilder
from minfer.records.config import EngineConfig
from minfer.records.plan import Draft, NewRow, Plan, PrefillTokens
from minfer.records.request import row_sampling
from minfer.records.sequence import Running, is_bound, less, positions
from minfer.records.state import EngineState
from minfer.values.record import evolve


@lru_cache(maxsize=64)
def ones(count: int) -> tuple[int, ...]:
    """A column of ones: the same object for the same length."""
    return (1,) * count


@frozen
class Chunk:
    """Prefill tokens for one row."""

    i: int  # its position among the running sequences
    at: int  # its place in the plan
    start: int  # position of the first input
    stop: int  # the position after the last input


def build_plan(builder: StepBuilder) -> Plan:
    """Build the plan, and add it to the state's plans in flight."""
    config, state = builder.config, builder.state
    run = state.running
    special = positions(run, builder.skipped.union(builder.shares))
    out = [i for i in special if run.run_ids[i] in builder.skipped]
    chunks = [*_chunks(builder, run, special, out)]
    ahead = builder.max_sampled_tokens or ones(
        len(run)
    )  # how far the step advances each sequence
    run_ids = less(run.run_ids, out)
    max_sampled = less(ahead, out)
    counts = max_sampled if builder.drafts else ones(len(run_ids))
    if out or chunks:
        ahead, counts, max_sampled = _with_chunks(
            run, out, chunks, ahead, counts, max_sampled
        )
    plan = Plan(
        step=state.next_step,
        run_ids=run_ids,
        rows=less(run.rows, out),
        starts=less(run.scheduled, out),
        num_scheduled_tokens=counts,
        max_sampled_tokens=max_sampled,
        fills=tuple([_fill(config, run, chunk) for chunk in chunks]),
        opens=tuple(
            [_open(config, state, c) for c in chunks if c.start == run.starts[c.i]]
        ),
        grows=tuple(builder.grown.values()),
        copies=builder.copies
        + tuple(chain.from_iterable([newcomer.copies for newcomer in builder.newcomers])),
        drafts=_drafts(builder, run_ids) if builder.drafts else (),
        deferred=_deferred_rows(run, run_ids, max_sampled)
        if state.needs_host_mask
        else (),
    )
    if config.itl_target is not None and not state.inflight:  # this step begins now
        state = evolve(state, step_times=evolve(state.step_times, began=state.time))
    builder.state = evolve(
        state,
        running=evolve(run, scheduled=tuple(map(add, run.scheduled, ahead))),
        inflight=(*state.inflight, plan),
        next_step=plan.step + 1,
    )
    return add_saves(builder, plan, out) if config.state_group else plan


def _chunks(
    builder: StepBuilder, run: Running, special: list[int], out: list[int]
) -> Iterator[Chunk]:
    """The inputs of the rows in prefill: of the positions `special`, those that do not
    skip the step (`out`).
    """
    for i in special:
        share = builder.shares.get(run.run_ids[i])
        if share is not None:
            start = run.scheduled[i]
            yield Chunk(i, i - bisect_left(out, i), start, start + share)


def _with_chunks(
    run: Running, out: list[int], chunks: list[Chunk], *steady: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The columns ahead, counts and most of a steady step, changed for skipped rows and
    prefill chunks.
    """
    ahead, counts, max_sampled = map(list, steady)
    for i in out:
        ahead[i] = 0
    for chunk in chunks:
        inputs = chunk.stop - chunk.start
        ahead[chunk.i] = counts[chunk.at] = inputs
        ends = chunk.stop == run.num_known_at_admission[chunk.i]
        max_sampled[chunk.at] = int(
            ends and run.seqs[chunk.i].request.prompt_only is None
        )
    return tuple(ahead), tuple(counts), tuple(max_sampled)


def _fill(config: EngineConfig, run: Running, chunk: Chunk) -> PrefillTokens:
    inputs = run.inputs(chunk.i, chunk.start, chunk.stop, config.block_size)
    return PrefillTokens(chunk.at, inputs)


def _open(config: EngineConfig, state: EngineState, chunk: Chunk) -> NewRow:
    """A generation's first plan entry: what the device keeps of it from then on."""
    run, i = state.running, chunk.i
    seq = run.seqs[i]
    return NewRow(
        index=chunk.at,
        name=seq.id,
        known=run.inputs(i, 0, run.known[i], config.block_size),
        prompt=seq.request.num_prompt_tokens,
        last_index=run.last_index[i],
        sampling=row_sampling(seq.request, seq.sample),
        tables=tuple([table[:] for table in run.tables[i]]),
        pooling=seq.request.pooling,
        adapter_slot=state.adapters.slot_of(seq.request.adapter),
    )


def _drafts(builder: StepBuilder, run_ids: tuple[int, ...]) -> tuple[Draft, ...]:
    """The drafts of the plan's rows."""
    drafts = builder.drafts
    if len(drafts) < len(run_ids):
        places = [i for i, run_id in enumerate(run_ids) if run_id in drafts]
        return tuple([Draft(i, drafts[run_ids[i]]) for i in places])
    if not any(drafts.values()):
        return _drafts_of_device(len(run_ids))
    return tuple(map(Draft, range(len(run_ids)), map(drafts.__getitem__, run_ids)))


@lru_cache(maxsize=64)
def _drafts_of_device(count: int) -> tuple[Draft, ...]:
    """Drafts of the executor's drafter for each of `count` rows."""
    return tuple(map(Draft, range(count)))


def _deferred_rows(
    run: Running, run_ids: tuple[int, ...], max_sampled: tuple[int, ...]
) -> tuple[int, ...]:
    """The places of rows with deferred sampling: those that yield and need a mask
    from the host.
    """
    bound = tuple(compress(range(len(run)), map(is_bound, run.seqs)))
    if run_ids is run.run_ids:  # no row skips the step
        return tuple([i for i in bound if max_sampled[i]])
    bound_ids = {run.run_ids[i] for i in bound}
    return tuple(
        [
            index
            for index, run_id in enumerate(run_ids)
            if run_id in bound_ids and max_sampled[index]
        ]
    )
