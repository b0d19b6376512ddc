"""Results become state: what a step yielded, and what to do when it failed.

A good step costs a few passes over the columns in C; only sequences that end, fill a block or
finish a chunk of their prompt are looked at one by one. Sealing is spread (`lifecycle.spread`), so
that a batch whose blocks fill at the same step does not stop the engine.
"""

from array import array
from collections.abc import Container
from itertools import chain, compress, count, islice, repeat
from operator import add, ge, ne, sub
from typing import Final

from minfer.config import EngineConfig
from minfer.lifecycle import open_fences, restart, retire, sealed, spread
from minfer.messages import Emit, Ended, Executed, Failed, Finished, Ignored, Reason, Voided, clip
from minfer.plan import Plan, Yields
from minfer.pmap import Map
from minfer.record import evolve
from minfer.sequence import Running, edited
from minfer.state import EngineState, Live, Transition

_WINDOW: Final = 64  # generations compared at once
_FOLD: Final = 8  # steps after which fresh tokens join the tails


def executed(config: EngineConfig, state: EngineState, event: Executed) -> Transition:
    """Commit the results of the step that is first in flight."""
    known_steps = [plan.step for plan in state.inflight]
    if event.step not in known_steps:
        return Transition(state, (), (Ignored("executed", f"step {event.step} is not in flight"),))
    plan = state.inflight[0]
    if event.step != plan.step:
        return _void(config, state, event.step, f"step {plan.step} was skipped")
    sizes = _sizes(event.yields)
    flaw = _flaw(config, plan, event.yields, sizes)
    if flaw:
        return _void(config, state, plan.step, flaw)
    run = state.running
    if plan.gens == run.gens:
        new, grown = event.yields, sizes
    else:  # sequences came or went since this was planned
        new = aligned(plan.gens, run.gens, event.yields)
        grown = tuple(map(len, new))
    if plan.step % _FOLD:
        tails, fresh = run.tails, tuple(map(add, run.fresh, new))
    else:
        tails, fresh = tuple(map(add, run.tails, run.fresh)), new
    advanced = Running(
        run.seqs, run.ids, run.gens, run.rows, run.starts, run.base,
        tuple(map(add, run.known, grown)), _caught_up(run, plan, sizes),
        run.last, run.ripe, run.mark, run.tables, run.chains, tails, fresh,
    )  # fmt: skip
    state = evolve(state, running=advanced, inflight=state.inflight[1:])
    if state.faults:
        ran = set(compress(run.ids, map(set(plan.gens).__contains__, run.gens)))
        state = evolve(state, faults=tuple(f for f in state.faults if f[0] not in ran))
    ripe = tuple(compress(range(len(advanced)), map(ge, advanced.known, advanced.ripe)))
    ends = _endings(state, new, ripe)
    if ends:
        run, new = _cut(state.running, new, ends)
        state = evolve(state, running=run)
    state = sealed(config, state, _fillings(config, state, plan, ripe, ends))
    finished: tuple[Finished, ...] = ()
    if ends:
        state, finished = end(config, state, {i: (why, "") for i, (_, why) in ends.items()})
    state = open_fences(state, plan.step)
    emit = Emit(advanced.ids, new, finished)
    return Transition(state, (emit,), tuple(map(ended_reason, finished)))


def aligned(before: tuple[int, ...], now: tuple[int, ...], yields: Yields) -> Yields:
    """What generations `now` have of the yields of the generations `before`; nothing for others.

    The two are in the same order and differ in few places, so windows of them are compared whole;
    a dictionary of all would cost five times as much.
    """
    out: list[tuple[int, ...]] = []
    i = j = 0
    while i < len(before) and j < len(now):
        left, right = before[i : i + _WINDOW], now[j : j + _WINDOW]
        same = len(left)
        if left != right:
            same = next(compress(count(), map(ne, left, right)), min(same, len(right)))
        out += yields[i : i + same]
        i, j = i + same, j + same
        if same == len(left) or same == len(right):
            continue
        if before[i] in right or before[i] in now[j:]:
            out.append(())  # now[j] came after the plan, or sat that one out
            j += 1
        else:
            i += 1  # before[i] has gone
    out += [()] * (len(now) - j)
    return tuple(out)


def failed(config: EngineConfig, state: EngineState, event: Failed) -> Transition:
    """Forget a failed step and all after it; its sequences begin again from committed KV."""
    if event.step not in [plan.step for plan in state.inflight]:
        return Transition(state, (), (Ignored("failed", f"step {event.step} is not in flight"),))
    return _void(config, state, event.step, event.error)


def ended_reason(done: Finished) -> Reason:
    """The reason that goes with a terminal word."""
    return Ended(done.id, done.sample, done.reason, done.error)


def end(
    config: EngineConfig, state: EngineState, ended: dict[int, tuple[str, str]]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """End running sequences: position -> reason and error. Their blocks stay cached."""
    run = state.running
    finished = []
    requests, policy = state.requests, state.policy
    for i, (reason, error) in sorted(ended.items()):
        request, sample = run.seqs[i].request, run.seqs[i].sample
        live = requests[request.id]
        length = run.known[i] - len(request.prompt)
        finished.append(Finished(request.id, sample, reason, length, error, max(0, live.cached)))
        requests = one_ended(live, request.id, requests)
        policy = config.policy.ended(policy, request, length, True)
    gone = {run.ids[i] for i in ended}
    faults = tuple(f for f in state.faults if f[0] not in gone)
    state = evolve(state, requests=requests, policy=policy, faults=faults)
    return retire(config, state, ended), tuple(finished)


def one_ended(live: Live, name: str, requests: Map[str, Live]) -> Map[str, Live]:
    """Count one sample of a request as ended; the request goes with its last one."""
    if live.ended + 1 == live.samples:
        return requests.delete(name)
    return requests.set(name, evolve(live, ended=live.ended + 1))


def _flaw(config: EngineConfig, plan: Plan, yields: Yields, sizes: tuple[int, ...]) -> str:
    """What is wrong with results, or nothing. Laws of a plan: module plan."""
    if len(sizes) != len(plan.gens):
        return f"{len(yields)} results for {len(plan.gens)} rows"
    if sizes != plan.most and any(
        not min(1, most) <= size <= most for size, most in zip(sizes, plan.most, strict=True)
    ):
        return "a row yielded more or less than it may"
    try:
        ids = array("I", chain.from_iterable(yields))
    except (TypeError, OverflowError):
        return "token ids must be whole numbers from 0"
    if ids and max(ids) >= config.vocab_size:
        return f"token ids must be below {config.vocab_size}"
    return ""


def _sizes(yields: Yields) -> tuple[int, ...]:
    """Tokens per row; of no row if the results are not one tuple per row."""
    return tuple(map(len, yields)) if set(map(type, yields)) <= {tuple} else ()


def _caught_up(run: Running, plan: Plan, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`sched`, less what rows yielded short of their most: later plans only said "at latest"."""
    if sizes == plan.most:
        return run.sched
    short = dict(zip(plan.gens, map(sub, plan.most, sizes), strict=True))
    return tuple(map(sub, run.sched, map(short.get, run.gens, repeat(0))))


def _endings(state: EngineState, new: Yields, ripe: tuple[int, ...]) -> dict[int, tuple[int, str]]:
    """Who ends with these tokens: position -> how many of them count, and the reason."""
    run = state.running
    over = {i for i in ripe if run.known[i] > run.last[i]}
    if not state.stops.isdisjoint(chain.from_iterable(new)):
        over.update(
            i
            for i, tokens in enumerate(new)
            if tokens and not run.seqs[i].request.stop_ids.isdisjoint(tokens)
        )
    ends = {}
    for i in over:
        tokens, stop_ids = new[i], run.seqs[i].request.stop_ids
        room = run.last[i] + 1 - (run.known[i] - len(tokens))
        stop = next((j for j, t in enumerate(tokens[:room]) if t in stop_ids), None)
        ends[i] = (room, "length") if stop is None else (stop + 1, "stop")
    return ends


def _cut(run: Running, new: Yields, ends: dict[int, tuple[int, str]]) -> tuple[Running, Yields]:
    """Take back the tokens that came after an end."""
    extra = {i: len(new[i]) - keep for i, (keep, _) in ends.items() if keep < len(new[i])}
    if not extra:
        return run, new
    cut = {i: run.fresh[i][: len(run.fresh[i]) - more] for i, more in extra.items()}
    run = edited(run, known={i: run.known[i] - more for i, more in extra.items()}, fresh=cut)
    kept = list(new)
    for i in extra:
        kept[i] = new[i][: ends[i][0]]
    return run, tuple(kept)


def _fillings(
    config: EngineConfig,
    state: EngineState,
    plan: Plan,
    ripe: tuple[int, ...],
    ends: Container[int],
) -> dict[int, int]:
    """Who has full blocks to publish, and how many in all; those that end do so on their way out.

    Chunks of prompts publish at once: others may be about to ask for them. Blocks of sampled
    tokens can wait.
    """
    run, size = state.running, config.block_size
    some = islice((i for i in ripe if i not in ends), spread(config, len(run) * plan.repeat))
    upto = {i: (run.known[i] - 1) // size for i in some}
    if plan.fills:
        done = {
            plan.gens[fill.index]: (plan.starts[fill.index] + plan.counts[fill.index]) // size
            for fill in plan.fills
        }
        for i in compress(range(len(run)), map(done.__contains__, run.gens)):
            if i not in ends:
                upto[i] = done[run.gens[i]]
    return upto


def _void(config: EngineConfig, state: EngineState, step: int, error: str) -> Transition:
    """Count everything in flight as never run, and blame the sequences of plan `step`."""
    run, error = state.running, clip(error)
    blamed = next(set(plan.gens) for plan in state.inflight if plan.step == step)
    touched = {gen for plan in state.inflight for gen in plan.gens}
    faults = dict(state.faults)
    for i, gen in enumerate(run.gens):
        if gen in blamed:
            faults[run.ids[i]] = faults.get(run.ids[i], 0) + 1
    spots = [i for i, gen in enumerate(run.gens) if gen in touched]
    reason = Voided(step, error, len(state.inflight), len(spots))
    state = evolve(restart(config, state, spots), inflight=(), faults=tuple(faults.items()))
    state = open_fences(state, None)
    lost = {
        i: ("error", f"its step failed {config.max_failures} times, at last with: {error}")
        for i, name in enumerate(state.running.ids)
        if faults.get(name, 0) >= config.max_failures
    }
    if not lost:
        return Transition(state, (), (reason,))
    state, finished = end(config, state, lost)
    reasons = (reason, *map(ended_reason, finished))
    return Transition(state, (Emit((), (), finished),), reasons)
