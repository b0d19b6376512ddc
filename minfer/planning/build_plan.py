"""Builds the plan of a step from the decisions about it: columns, inputs, and changes for
the device.
"""

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, compress
from operator import add

from attrs import frozen

from minfer.planning.work import StepBuilder
from minfer.records.config import EngineConfig
from minfer.records.plan import Draft, NewRow, Plan, PrefillTokens
from minfer.records.request import row_sampling
from minfer.records.sequence import Running, is_bound, less, positions
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


def build_plan(work: StepBuilder) -> Plan:
    """Build the plan, and add it to the state's plans in flight."""
    config, state = work.config, work.state
    run = state.running
    special = positions(run, work.skipped.union(work.shares))
    out = [i for i in special if run.run_ids[i] in work.skipped]
    chunks = [*_chunks(work, run, special, out)]
    ahead = work.max_sampled_tokens or ones(
        len(run)
    )  # how far the step advances each sequence
    gens = less(run.run_ids, out)
    most = less(ahead, out)
    counts = most if work.drafts else ones(len(gens))
    if out or chunks:
        ahead, counts, most = _with_chunks(run, out, chunks, ahead, counts, most)
    plan = Plan(
        step=state.next_step,
        run_ids=gens,
        rows=less(run.rows, out),
        starts=less(run.scheduled, out),
        num_scheduled_tokens=counts,
        max_sampled_tokens=most,
        fills=tuple([_fill(config, run, chunk) for chunk in chunks]),
        opens=tuple(
            [_open(config, run, c) for c in chunks if c.start == run.starts[c.i]]
        ),
        grows=tuple(work.grown.values()),
        copies=tuple(chain.from_iterable([one.copies for one in work.newcomers])),
        drafts=_drafts(work, gens) if work.drafts else (),
        deferred=_deferred_rows(run, gens, most) if state.needs_host_mask else (),
    )
    work.state = evolve(
        state,
        running=evolve(run, scheduled=tuple(map(add, run.scheduled, ahead))),
        inflight=(*state.inflight, plan),
        next_step=plan.step + 1,
    )
    return plan


def _chunks(
    work: StepBuilder, run: Running, special: list[int], out: list[int]
) -> Iterator[Chunk]:
    """The inputs of the rows in prefill: of the positions `special`, those that do not
    skip the step (`out`).
    """
    for i in special:
        share = work.shares.get(run.run_ids[i])
        if share is not None:
            start = run.scheduled[i]
            yield Chunk(i, i - bisect_left(out, i), start, start + share)


def _with_chunks(
    run: Running, out: list[int], chunks: list[Chunk], *steady: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The columns ahead, counts and most of a steady step, changed for skipped rows and
    prefill chunks.
    """
    ahead, counts, most = map(list, steady)
    for i in out:
        ahead[i] = 0
    for chunk in chunks:
        inputs = chunk.stop - chunk.start
        ahead[chunk.i] = counts[chunk.at] = inputs
        ends = chunk.stop == run.num_known_at_admission[chunk.i]
        most[chunk.at] = int(ends and run.seqs[chunk.i].request.prompt_only is None)
    return tuple(ahead), tuple(counts), tuple(most)


def _fill(config: EngineConfig, run: Running, chunk: Chunk) -> PrefillTokens:
    inputs = run.inputs(chunk.i, chunk.start, chunk.stop, config.block_size)
    return PrefillTokens(chunk.at, inputs)


def _open(config: EngineConfig, run: Running, chunk: Chunk) -> NewRow:
    """A generation's first plan entry: what the device keeps of it from then on."""
    i = chunk.i
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
    )


def _drafts(work: StepBuilder, gens: tuple[int, ...]) -> tuple[Draft, ...]:
    """The drafts of the plan's rows."""
    drafts = work.drafts
    if len(drafts) < len(gens):
        places = [i for i, gen in enumerate(gens) if gen in drafts]
        return tuple([Draft(i, drafts[gens[i]]) for i in places])
    if not any(drafts.values()):
        return _drafts_of_device(len(gens))
    return tuple(map(Draft, range(len(gens)), map(drafts.__getitem__, gens)))


@lru_cache(maxsize=64)
def _drafts_of_device(count: int) -> tuple[Draft, ...]:
    """Drafts of the executor's draft model for each of `count` rows."""
    return tuple(map(Draft, range(count)))


def _deferred_rows(
    run: Running, gens: tuple[int, ...], most: tuple[int, ...]
) -> tuple[int, ...]:
    """The places of rows with deferred sampling: those that yield and are in lockstep
    with the host.
    """
    bound = tuple(compress(range(len(run)), map(is_bound, run.seqs)))
    if gens is run.run_ids:  # no row skips the step
        return tuple([i for i in bound if most[i]])
    who = {run.run_ids[i] for i in bound}
    return tuple([at for at, gen in enumerate(gens) if gen in who and most[at]])
