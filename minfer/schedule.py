"""State becomes work: at most one plan at a time.

In order: tables that end are grown (shortage makes the last in rank give way), rows that
run get one token each, chunks of prompts share what is left of the token budget in rank
order, and the line moves up into what is left after that. In a steady decode nothing of
this is due, and the plan is the running columns themselves.

Within this module a sequence is named by its generation: positions shift when others give
way.
"""

from bisect import bisect_left
from functools import lru_cache
from itertools import compress
from math import inf
from operator import add, ge, lt

from minfer import consult
from minfer.admit import Newcomer, admit, displace, load
from minfer.config import EngineConfig
from minfer.grow import grow, stretch
from minfer.messages import Execute, Held, Reason, WakeAt
from minfer.plan import Fill, Grow, Open, Plan
from minfer.record import evolve
from minfer.sample import row_sampling
from minfer.sequence import Running, joined, less, positions
from minfer.state import EngineState, Transition

Shares = dict[int, int]  # generation that is being filled -> tokens of it in this step


@lru_cache(maxsize=64)
def ones(count: int) -> tuple[int, ...]:
    """A column of ones: the same object for the same length."""
    return (1,) * count


def schedule(config: EngineConfig, state: EngineState) -> Transition:
    """Plan one more step, or say that there is nothing to do now."""
    run = state.running
    if not len(run) and not state.waiting:
        return Transition(state)
    solo = _suspect(config, state)
    if solo is not None and state.inflight:
        return Transition(state)
    due = tuple(compress(range(len(run)), map(ge, run.sched, run.mark)))
    idle = {run.gens[i] for i in due if run.sched[i] >= run.last[i]}
    if state.lockstep:
        state, waiting_for_host = _lockstep(state)
        idle |= waiting_for_host
    if solo is not None:
        idle.update(gen for gen in run.gens if gen != solo)
    state, grown, reasons = grow(config, state, due, idle)
    state, shares, room = _shares(config, state, idle)
    newcomers: list[Newcomer] = []
    wake: tuple[WakeAt, ...] = ()
    if state.waiting and solo is None:
        before = state.running.gens
        state, wake, more = _move_up(config, state, room, newcomers, idle, shares)
        reasons += more
        if state.running.gens is not before:  # somebody was displaced
            gone = set(before).difference(state.running.gens)
            idle -= gone
            grown = {gen: one for gen, one in grown.items() if gen not in gone}
            shares = {gen: share for gen, share in shares.items() if gen not in gone}
    if newcomers:
        run, stops = joined(state.running, [n.seat for n in newcomers]), state.stops
        if len(stops) > config.thresholds.stop_ids:  # some are of sequences long gone
            stops = frozenset().union(*{seq.request.stop_ids for seq in run.seqs})
        bound = any(newcomer.seat.seqs[0].request.lockstep for newcomer in newcomers)
        lockstep = state.lockstep or bound
        state = evolve(state, running=run, stops=stops, filling=True, lockstep=lockstep)
    if len(idle) == len(state.running):
        return Transition(state, wake, reasons)
    most = None
    if config.max_repeat > 1 and not shares and not state.lockstep:
        state, grown, most = stretch(config, state, idle, grown)
    state, plan = _plan(
        config, state, idle, shares, most, newcomers, tuple(grown.values())
    )
    return Transition(state, (Execute(plan), *wake), reasons)


def _suspect(config: EngineConfig, state: EngineState) -> int | None:
    """Who has to run alone: one more failure could end it, and must not be a neighbour's
    fault.
    """
    few, run = min(2, config.max_failures - 1), state.running
    for sample, count in state.faults:
        if count >= few and sample in run.ids:
            return run.gens[run.ids.index(sample)]
    return None


def _lockstep(state: EngineState) -> tuple[EngineState, set[int]]:
    """Who may not run ahead and has a token in flight; the state knows if nobody is left
    who may not.
    """
    run = state.running
    bound = [i for i, seq in enumerate(run.seqs) if seq.request.lockstep]
    if not bound:
        return evolve(state, lockstep=False), set()
    return state, {run.gens[i] for i in bound if run.sched[i] >= run.known[i]}


def _shares(
    config: EngineConfig, state: EngineState, idle: set[int]
) -> tuple[EngineState, Shares, int]:
    """Tokens for rows that are being filled, and what is left of the budget for
    newcomers.
    """
    run = state.running
    budget, state = consult.budget(config, state, load(config, state))
    room = budget - (len(run) - len(idle))
    shares: Shares = {}
    if not state.filling:
        return state, shares, room
    filled = tuple(compress(range(len(run)), map(lt, run.sched, run.base)))
    if not filled:
        state = evolve(state, filling=False)
    for i in filled:
        if run.gens[i] not in idle:
            more = max(0, min(room, run.base[i] - run.sched[i] - 1))
            shares[run.gens[i]] = 1 + more
            room -= more
    return state, shares, room


def _move_up(
    config: EngineConfig,
    state: EngineState,
    room: int,
    newcomers: list[Newcomer],
    idle: set[int],
    shares: Shares,
) -> tuple[EngineState, tuple[WakeAt, ...], tuple[Reason, ...]]:
    """Let in who can be let in; `newcomers` and `shares` are added to."""
    reasons: tuple[Reason, ...] = ()
    while state.waiting:
        first, now = state.waiting.first(), load(config, state, len(newcomers))
        start, state = consult.admit_from(config, state, now)
        if start > state.time and (now.running or start < inf):
            wake = (WakeAt(start),) if start < inf else ()
            return _hold(state, Held(*first.id, "policy"), reasons, wake)
        gave_way: Reason | None
        if room <= 0:
            state, gave_way, room = _make_room(config, state, room, idle, shares)
            if gave_way is None:
                return _hold(state, Held(*first.id, "budget"), reasons)
            reasons += (gave_way,)
            continue
        state, got = admit(config, state, newcomers)
        if isinstance(got, Held):
            gave_way = None
            if got.cause in ("blocks", "rows") and not state.fences:
                state, gave_way = displace(config, state)
            if gave_way is None:
                return _hold(state, got, reasons)
            reasons += (gave_way,)
            continue
        newcomers.append(got)
        reasons += got.reasons
        share = min(room, got.seat.base[0] - got.seat.sched[0])
        shares[got.seat.gens[0]] = share
        room -= share
    return state, (), reasons


def _make_room(
    config: EngineConfig, state: EngineState, room: int, idle: set[int], shares: Shares
) -> tuple[EngineState, Reason | None, int]:
    """Take the last that runs its tokens of this step for the first in line, if they are
    enough and the policy says so; returns why it gave way, if it did, and what is left of
    the budget.
    """
    run = state.running
    if state.fences or not len(run) or run.gens[-1] in idle:
        return state, None, room
    last = run.gens[-1]
    tokens = shares.get(last, 1)
    if room + tokens <= 0:
        return state, None, room
    state, gave_way = displace(config, state)
    return state, gave_way, room + tokens if gave_way else room


def _hold(
    state: EngineState,
    held: Held,
    reasons: tuple[Reason, ...],
    wake: tuple[WakeAt, ...] = (),
) -> tuple[EngineState, tuple[WakeAt, ...], tuple[Reason, ...]]:
    """Remember who waits and why; the reason is given when that is news."""
    now = (state.waiting.first().place, held.cause)
    if state.held == now:
        return state, wake, reasons
    return evolve(state, held=now), wake, (*reasons, held)


def waits_for(config: EngineConfig, state: EngineState) -> str:
    """Why the first in line, if there is one, waits: the cause of `Held`; "step": none
    was planned since it is the first; "fault": somebody runs alone, to see whose fault
    failing steps are.
    """
    if state.faults and _suspect(config, state) is not None:
        return "fault"
    held = state.held
    return held[1] if held and held[0] == state.waiting.first().place else "step"


def _plan(
    config: EngineConfig,
    state: EngineState,
    idle: set[int],
    shares: Shares,
    most: tuple[int, ...] | None,
    newcomers: list[Newcomer],
    grows: tuple[Grow, ...],
) -> tuple[EngineState, Plan]:
    """Put the plan together; `most` has one entry per running sequence, or is None for
    ones.
    """
    run = state.running
    places = positions(run, idle.union(shares))
    out = [i for i in places if run.gens[i] in idle]
    gens, rows, starts = less(run.gens, out), less(run.rows, out), less(run.sched, out)
    steps = most or ones(len(run))  # positions that each row is scheduled for
    counts, yields = ones(len(gens)), less(steps, out)
    fills: list[Fill] = []
    opens: list[Open] = []
    if places:
        steps_, counts_, yields_ = list(steps), list(counts), list(yields)
        for i in out:
            steps_[i] = 0
        for i in places:
            if run.gens[i] in idle:
                continue
            at = i - bisect_left(out, i)
            start, share = run.sched[i], shares[run.gens[i]]
            steps_[i] = counts_[at] = share
            yields_[at] = int(start + share == run.base[i])
            fills.append(Fill(at, run.inputs(i, start, start + share, config.block_size)))
            if (
                start == run.starts[i]
            ):  # a generation's first plan: the device takes over all of it
                opens.append(_opened(config, run, i, at))
        steps, counts, yields = tuple(steps_), tuple(counts_), tuple(yields_)
    step, repeat = state.next_step, max(most) if most else 1
    copies = tuple(newcomer.copy for newcomer in newcomers if newcomer.copy)
    apart = _apart(run, gens, yields) if state.lockstep else ()
    plan = Plan(
        step,
        gens,
        rows,
        starts,
        counts,
        yields,
        tuple(fills),
        tuple(opens),
        grows,
        copies,
        repeat,
        apart=apart,
    )
    run, inflight = (
        evolve(run, sched=tuple(map(add, run.sched, steps))),
        (*state.inflight, plan),
    )
    return evolve(state, running=run, inflight=inflight, next_step=step + 1), plan


def _opened(config: EngineConfig, run: Running, i: int, at: int) -> Open:
    """What the device keeps of the sequence at position `i`, at place `at` of a plan."""
    seq = run.seqs[i]
    return Open(
        index=at,
        name=seq.id,
        known=run.inputs(i, 0, run.known[i], config.block_size),
        prompt=len(seq.request.prompt),
        last=run.last[i],
        sampling=row_sampling(seq.request, seq.sample),
        tables=(run.tables[i][:],),
    )


def _apart(run: Running, gens: tuple[int, ...], most: tuple[int, ...]) -> tuple[int, ...]:
    """The places of a plan whose rows are sampled apart: those that yield, in
    lockstep.
    """
    each = zip(run.gens, run.seqs, strict=True)
    bound = {gen for gen, seq in each if seq.request.lockstep}
    return tuple(at for at, gen in enumerate(gens) if gen in bound and most[at])
