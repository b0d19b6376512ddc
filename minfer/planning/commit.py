"""Commit: applies the results of a step to the state.

A successful step costs a few passes over the columns in C; only sequences that end, fill
a block or finish a prefill chunk are looked at one by one. Publishing full blocks is
spread over steps (minfer/planning/spread.py), so that a batch whose blocks fill at the
same step does not stall the engine.
"""

from collections.abc import Container, Iterable
from itertools import compress, count, islice, repeat
from operator import add, ge, le, ne, sub

from minfer.lifecycle.ending import end_samples, ending_sample
from minfer.lifecycle.publish import RELEASE, publish_blocks
from minfer.lifecycle.retire import free_fenced_blocks
from minfer.lifecycle.transitions import Cause
from minfer.planning.discard import discard
from minfer.planning.saves import keep_states
from minfer.planning.spread import deferrable_blocks
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Failed, Finished, clip
from minfer.records.plan import Plan, Pooled, Yields, flaw_beside, tokens_of
from minfer.records.sequence import Running, edited, positions
from minfer.records.state import EngineState, Transition, emit, ignore
from minfer.records.token_logprobs import Logprobs
from minfer.speculate.learn import update_acceptance
from minfer.values import thresholds
from minfer.values.record import evolve


def commit(
    config: EngineConfig, state: EngineState, event: Executed | Failed
) -> Transition:
    """Commit the results of the oldest step in flight, or discard a failed one.

    A failed step and all after it are discarded; their sequences restart from committed
    KV.
    """
    kind = "executed" if isinstance(event, Executed) else "failed"
    if type(event.step) is not int:
        return ignore(state, kind, f"{clip(event.step)} is no number of a step")
    if event.step not in [plan.step for plan in state.inflight]:
        return ignore(state, kind, "its step is not in flight")
    if isinstance(event, Failed):
        return discard(config, state, event.step, event.error)
    plan = state.inflight[0]
    if event.step != plan.step:
        return discard(config, state, event.step, f"step {plan.step} was skipped")
    tokens = tokens_of(event.yields)
    if tokens is None:
        return discard(
            config, state, plan.step, "results must be a tuple of tuples of whole numbers"
        )
    sizes = tuple(map(len, event.yields))  # tokens per row
    flaw = _flaw(config, plan, sizes, tokens)
    flaw = flaw or flaw_beside(event.logprobs, event.pooled, sizes)
    if flaw:
        return discard(config, state, plan.step, flaw)
    return _commit_results(config, state, event, tokens, sizes)


def _commit_results(
    config: EngineConfig,
    state: EngineState,
    event: Executed,
    tokens: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Transition:
    """Commit valid results: `sizes` are of all `tokens`."""
    plan = state.inflight[0]
    advanced, new = _advance(state.running, plan, event.yields, sizes)
    state = evolve(state, running=advanced, inflight=state.inflight[1:])
    state = _update_statistics(config, state, plan, sizes)
    ripe = tuple(
        compress(range(len(advanced)), map(ge, advanced.known, advanced.publish_at))
    )
    ends = _endings(state, tokens, new, ripe) | _prompt_only_ends(advanced, plan)
    if ends:
        run, new = _drop_after_ends(advanced, new, ends)
        state = evolve(state, running=run)
    fillings = _publishable(config, state.running, plan, ripe, ends)
    state = publish_blocks(config, state, fillings)
    if plan.saves:
        state = keep_states(config, state, plan)
    finished: tuple[Finished, ...] = ()
    if ends:
        state, finished = _end(config, state, ends)
    return emit(
        free_fenced_blocks(state, plan.step),
        finished,
        ids=advanced.ids,
        tokens=new,
        logprobs=_kept_logprobs(plan, event.logprobs, advanced, new),
        pooled=_kept_pooled(plan, event.pooled, advanced),
    )


def _advance(
    run: Running,
    plan: Plan,
    yields: Yields,
    sizes: tuple[int, ...],
) -> tuple[Running, Yields]:
    """The columns after a step, and its yields as one of them."""
    new = yields
    grown = sizes
    if plan.run_ids != run.run_ids:  # sequences came or left since this was planned
        new = align_yields(plan.run_ids, run.run_ids, yields, thresholds.ALIGNED_WINDOW)
        grown = tuple(map(len, new))
    scheduled = run.scheduled
    # rows yielded fewer: `scheduled` of later plans was an upper bound
    if sizes != plan.max_sampled_tokens:
        short = dict(
            zip(plan.run_ids, map(sub, plan.max_sampled_tokens, sizes), strict=True)
        )
        scheduled = tuple(map(sub, scheduled, map(short.get, run.run_ids, repeat(0))))
    tails = run.tails
    fresh = new
    if plan.step % thresholds.FRESH_STEPS:
        fresh = tuple(map(add, run.fresh, new))
    else:
        tails = tuple(map(add, run.tails, run.fresh))
    advanced = Running(
        seqs=run.seqs,
        ids=run.ids,
        run_ids=run.run_ids,
        rows=run.rows,
        starts=run.starts,
        num_known_at_admission=run.num_known_at_admission,
        known=tuple(map(add, run.known, grown)),
        scheduled=scheduled,
        last_index=run.last_index,
        publish_at=run.publish_at,
        grow_at=run.grow_at,
        tables=run.tables,
        chains=run.chains,
        tails=tails,
        fresh=fresh,
    )
    return advanced, new


def _update_statistics(
    config: EngineConfig, state: EngineState, plan: Plan, sizes: tuple[int, ...]
) -> EngineState:
    """Record how many drafts were accepted, how long the step took, and that its samples
    have no fault.
    """
    if plan.drafts and config.speculation is not None:
        state = update_acceptance(config.speculation, state, plan, sizes)
    if config.itl_target is not None:
        decoding = len(plan.rows) - len(plan.fills)
        tokens = sum([len(fill.tokens) for fill in plan.fills])
        step_times = state.step_times.after(state.time, decoding, tokens)
        state = evolve(state, step_times=step_times)
    if state.faults:
        run = state.running
        ran = {run.ids[i] for i in positions(run, set(plan.run_ids))}
        state = evolve(state, faults=tuple(f for f in state.faults if f[0] not in ran))
    return state


def align_yields(
    before: tuple[int, ...], now: tuple[int, ...], yields: Yields, window: int
) -> Yields:
    """The yields of the generations `before`, reordered for the generations `now`;
    nothing for the others.

    The two are in the same order and mostly differ in few places, so stretches of
    `window` are compared whole; a dictionary of all would cost five times as much. It is
    made if many skipped the step.
    """
    if len(now) - len(before) > thresholds.SKIPPED_ROWS:
        by_run_id = dict(zip(before, yields, strict=True))
        return tuple(map(by_run_id.get, now, repeat(())))
    out: list[tuple[int, ...]] = []
    i = j = 0
    while i < len(before) and j < len(now):
        left, right = before[i : i + window], now[j : j + window]
        same = len(left)
        if left != right:
            same = next(compress(count(), map(ne, left, right)), min(same, len(right)))
        out += yields[i : i + same]
        i, j = i + same, j + same
        if same == len(left) or same == len(right):
            continue
        if before[i] in right or before[i] in now[j:]:
            out.append(())  # now[j] came after the plan, or skipped that step
            j += 1
        else:
            i += 1  # before[i] has left
    out += [()] * (len(now) - j)
    return tuple(out)


def _flaw(
    config: EngineConfig, plan: Plan, sizes: tuple[int, ...], tokens: tuple[int, ...]
) -> str:
    """What is wrong with results, or nothing: the rules are those of module plan."""
    if len(sizes) != len(plan.run_ids):
        return f"{len(sizes)} results for {len(plan.run_ids)} rows"
    min_sampled = map(bool, plan.max_sampled_tokens)
    if sizes != plan.max_sampled_tokens and not (
        all(map(le, sizes, plan.max_sampled_tokens)) and all(map(ge, sizes, min_sampled))
    ):
        return "a row yielded more or less than it may"
    if tokens and not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        return f"token ids must be from 0 to {config.vocab_size - 1}"
    return ""


def _kept_logprobs(plan: Plan, logprobs: Logprobs, run: Running, new: Yields) -> Logprobs:
    """Log-probabilities as a column of `run`, cut to its tokens `new`; or none."""
    if not logprobs:
        return ()
    by_run_id = dict(zip(plan.run_ids, logprobs, strict=True))
    rows = zip(run.run_ids, new, strict=True)
    return tuple(by_run_id.get(run_id, ())[: len(tokens)] for run_id, tokens in rows)


def _kept_pooled(plan: Plan, pooled: Pooled, run: Running) -> Pooled:
    """Pooled results of prompts as a column of `run`; or none."""
    if not pooled:
        return ()
    by_run_id = dict(zip(plan.run_ids, pooled, strict=True))
    return tuple(by_run_id.get(run_id, b"") for run_id in run.run_ids)


def _prompt_only_ends(run: Running, plan: Plan) -> dict[int, tuple[int, str]]:
    """The sequences that end with their prompt, whose last input was in this plan: as
    `_endings`.
    """
    if not plan.fills:
        return {}
    # Who has its last input known and yields nothing is to yield nothing at all.
    silent = [
        fill.index for fill in plan.fills if not plan.max_sampled_tokens[fill.index]
    ]
    upto = {
        plan.run_ids[index]: plan.starts[index] + plan.num_scheduled_tokens[index]
        for index in silent
    }
    ends = (
        i
        for i in positions(run, upto)
        if upto[run.run_ids[i]] == run.num_known_at_admission[i]
    )
    return dict.fromkeys(ends, (0, "length"))


def _endings(
    state: EngineState, tokens: tuple[int, ...], new: Yields, ripe: tuple[int, ...]
) -> dict[int, tuple[int, str]]:
    """The sequences that end with these tokens: position -> how many of the tokens count,
    and the reason.

    `tokens` are all of the step, with those of sequences that have left.
    """
    run = state.running
    over = {i for i in ripe if run.known[i] > run.last_index[i]}
    if not state.stops.isdisjoint(tokens):
        seqs = enumerate(run.seqs)
        over.update(i for i, seq in seqs if not seq.request.stop_ids.isdisjoint(new[i]))
    ends = {}
    for i in over:
        sampled, stop_ids = new[i], run.seqs[i].request.stop_ids
        room = run.last_index[i] + 1 - (run.known[i] - len(sampled))
        stop = next((j for j, t in enumerate(sampled[:room]) if t in stop_ids), None)
        ends[i] = (room, "length") if stop is None else (stop + 1, "stop")
    return ends


def _end(
    config: EngineConfig, state: EngineState, ends: dict[int, tuple[int, str]]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """End the sequences of `ends` (see `_endings`), in the order of their positions."""
    run = state.running
    leavers = [
        ending_sample(run, i, Cause.COMPLETED, reason)
        for i, (_, reason) in sorted(ends.items())
    ]
    return end_samples(config, state, leavers)


def _drop_after_ends(
    run: Running, new: Yields, ends: dict[int, tuple[int, str]]
) -> tuple[Running, Yields]:
    """Remove the tokens that came after an end."""
    extra = {i: len(new[i]) - keep for i, (keep, _) in ends.items() if keep < len(new[i])}
    if not extra:
        return run, new
    cut = {i: run.fresh[i][: len(run.fresh[i]) - count] for i, count in extra.items()}
    run = edited(
        run, known={i: run.known[i] - count for i, count in extra.items()}, fresh=cut
    )
    yields = list(new)
    for i in extra:
        yields[i] = new[i][: ends[i][0]]
    return run, tuple(yields)


def _publishable(
    config: EngineConfig,
    run: Running,
    plan: Plan,
    ripe: Iterable[int],
    ends: Container[int],
) -> dict[int, int]:
    """The sequences with full blocks to publish, and how many in all; sequences that end
    are left to `retire`.

    Prefill chunks are published at once, as other requests may need them. Blocks of
    sampled tokens can wait.
    """
    size = config.block_size
    deferrable = islice(
        (i for i in ripe if i not in ends), deferrable_blocks(config, len(run))
    )
    upto = {i: (run.known[i] - 1) // size for i in deferrable}
    if plan.saves:
        upto |= _saved(config, run, plan, upto)
    if not plan.fills:
        return upto
    spots = (fill.index for fill in plan.fills)
    computed = {
        plan.run_ids[index]: (plan.starts[index] + plan.num_scheduled_tokens[index])
        // size
        for index in spots
    }
    for i in positions(run, computed):
        if i in ends:
            continue
        # A request that recomputes everything may restart: its blocks stay private.
        if not run.seqs[i].request.recomputes_prompt:
            upto[i] = computed[run.run_ids[i]]
        elif config.by_chunk:
            upto[i] = RELEASE
    return upto


def _saved(
    config: EngineConfig, run: Running, plan: Plan, upto: dict[int, int]
) -> dict[int, int]:
    """The sequences whose states a plan saved, of which blocks `upto` some are published:
    those before their states are published first, also if they end.
    """
    ends = {
        plan.run_ids[save.index]: plan.starts[save.index]
        + plan.num_scheduled_tokens[save.index]
        for save in plan.saves
    }
    return {
        i: max(upto.get(i, 0), ends[run.run_ids[i]] // config.block_size)
        for i in positions(run, ends)
    }
