"""State becomes work: at most one plan at a time.

In order: tables that end are grown (shortage makes the last in rank give way), rows that run get
one token each, chunks of prompts share what is left of the token budget in rank order, and the
line moves up into what is left after that. In a steady decode nothing of this is due, and the plan
is the running columns themselves.

Within this module a sequence is named by its generation: positions shift when others give way.
"""

from bisect import bisect_left
from collections.abc import Container
from functools import lru_cache
from itertools import compress
from math import inf
from operator import add, ge, lt

from minfer.admit import Newcomer, admit, displace, load
from minfer.config import EngineConfig
from minfer.grow import grow, stretch
from minfer.messages import Execute, Held, Reason, WakeAt
from minfer.plan import Fill, Grow, Open, Plan
from minfer.record import evolve
from minfer.sequence import Running, joined
from minfer.state import EngineState, Transition

Shares = dict[int, int]  # generation that is being filled -> tokens of it in this step
_MANY_STOPS = 256  # stop ids kept from sequences long gone before the union is made anew


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
    if solo is not None:
        idle.update(gen for gen in run.gens if gen != solo)
    state, grown, reasons = grow(config, state, due, idle)
    shares, room = _shares(config, state, idle)
    newcomers: list[Newcomer] = []
    wake: tuple[WakeAt, ...] = ()
    if state.waiting and solo is None:
        before = state.running
        state, wake, more = _move_up(config, state, room, newcomers, shares)
        reasons += more
        if state.running.gens is not before.gens:  # somebody was displaced
            there = set(state.running.gens)
            idle &= there
            grown = {gen: g for gen, g in grown.items() if gen in there}
            there.update(newcomer.seat.gens[0] for newcomer in newcomers)
            shares = {gen: n for gen, n in shares.items() if gen in there}
    if newcomers:
        state = _join(state, newcomers)
    if len(idle) == len(state.running):
        return Transition(state, wake, reasons)
    most = None
    if config.max_repeat > 1 and not shares:
        state, grown, most = stretch(config, state, idle, grown)
    state, plan = _plan(state, idle, shares, most, newcomers, tuple(grown.values()))
    return Transition(state, (Execute(plan), *wake), reasons)


def _suspect(config: EngineConfig, state: EngineState) -> int | None:
    """Who has to run alone: one more failure could end it, and must not be a neighbour's fault."""
    few = min(2, config.max_failures - 1)
    for sample, count in state.faults:
        if count >= few and (i := state.running.find(sample)) is not None:
            return state.running.gens[i]
    return None


def _shares(config: EngineConfig, state: EngineState, idle: set[int]) -> tuple[Shares, int]:
    """Tokens for rows that are being filled, and what is left of the budget for newcomers."""
    run = state.running
    budget = config.policy.budget(state.policy, load(config, state))
    room = min(budget, config.max_num_batched_tokens) - (len(run) - len(idle))
    shares: Shares = {}
    for i in compress(range(len(run)), map(lt, run.sched, run.base)):
        if run.gens[i] not in idle:
            more = max(0, min(room, run.base[i] - run.sched[i] - 1))
            shares[run.gens[i]] = 1 + more
            room -= more
    return shares, room


def _move_up(
    config: EngineConfig, state: EngineState, room: int, newcomers: list[Newcomer], shares: Shares
) -> tuple[EngineState, tuple[WakeAt, ...], tuple[Reason, ...]]:
    """Let in who can be let in; `newcomers` and `shares` are added to."""
    reasons: tuple[Reason, ...] = ()
    same = (state.waiting.first().place, "blocks")
    short = state.held and state.held[:2] == same and state.blocks.available <= state.held[2]
    if short and len(state.running):
        return state, (), ()  # nothing has changed for the first in line
    while state.waiting:
        first = state.waiting.first()
        now = load(config, state, len(newcomers))
        start = config.policy.admit_from(state.policy, now)
        if start > state.time and (now.running or start < inf):
            state, more = _hold(state, Held(*first.id, "policy"))
            return state, (WakeAt(start),) if start < inf else (), reasons + more
        if room <= 0:
            state, more = _hold(state, Held(*first.id, "budget"))
            return state, (), reasons + more
        state, got = admit(config, state, newcomers)
        if isinstance(got, Held):
            room_made = None
            if got.cause in ("blocks", "rows") and not state.fences and not newcomers:
                room_made = displace(config, state)
            if room_made is None:
                state, more = _hold(state, got)
                return state, (), reasons + more
            state, reason = room_made
            reasons += (reason,)
            continue
        newcomers.append(got)
        reasons += got.reasons
        share = min(room, got.seat.base[0] - got.seat.sched[0])
        shares[got.seat.gens[0]] = share
        room -= share
    return state, (), reasons


def _hold(state: EngineState, held: Held) -> tuple[EngineState, tuple[Reason, ...]]:
    """Remember who waits and why; the reason is given when that is news."""
    available = -1 if state.fences else held.available  # look again once blocks have come
    now = (state.waiting.first().place, held.cause, available)
    news = state.held is None or state.held[:2] != now[:2]
    return evolve(state, held=now), (held,) if news else ()


def _join(state: EngineState, newcomers: list[Newcomer]) -> EngineState:
    run, stops = joined(state.running, [n.seat for n in newcomers]), state.stops
    if len(stops) > _MANY_STOPS:
        stops = frozenset().union(*{seq.request.stop_ids for seq in run.seqs})
    return evolve(state, running=run, stops=stops)


def _plan(
    state: EngineState,
    idle: set[int],
    shares: Shares,
    most: tuple[int, ...] | None,
    newcomers: list[Newcomer],
    grows: tuple[Grow, ...],
) -> tuple[EngineState, Plan]:
    """Put the plan together; `most` has one entry per running sequence, or is None for ones."""
    run = state.running
    places = _places(run, idle.union(shares))
    out = [i for i in places if run.gens[i] in idle]
    gens, rows, starts = _less(run.gens, out), _less(run.rows, out), _less(run.sched, out)
    steps = most or ones(len(run))  # positions that each row is scheduled for
    counts, yields = ones(len(gens)), _less(steps, out)
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
            seq, start, share = run.seqs[i], run.sched[i], shares[run.gens[i]]
            steps_[i] = counts_[at] = share
            yields_[at] = int(start + share == run.base[i])
            fills.append(Fill(at, seq.history[start : start + share]))
            if start == run.starts[i]:  # a generation's first plan: the device takes over all of it
                opens.append(Open(at, seq.request, seq.sample, run.tables[i][:]))
        steps, counts, yields = tuple(steps_), tuple(counts_), tuple(yields_)
    plan = Plan(
        state.next_step,
        gens,
        rows,
        starts,
        counts,
        yields,
        tuple(fills),
        tuple(opens),
        grows,
        tuple(n.copy for n in newcomers if n.copy),
        max(most) if most else 1,
    )
    run = evolve(run, sched=tuple(map(add, run.sched, steps)))
    return evolve(
        state, running=run, inflight=(*state.inflight, plan), next_step=plan.step + 1
    ), plan


def _places(run: Running, gens: Container[int]) -> list[int]:
    """Positions of the given generations, in order."""
    return list(compress(range(len(run)), map(gens.__contains__, run.gens))) if gens else []


def _less(column: tuple[int, ...], out: list[int]) -> tuple[int, ...]:
    """`column` without the entries at the positions `out`, which are sorted."""
    if not out:
        return column
    kept = list(column)
    for i in reversed(out):
        del kept[i]
    return tuple(kept)
