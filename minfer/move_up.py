"""The line moves up: into rows, blocks and tokens that are left, or are made
free for it.
"""

from math import inf

from minfer import consult
from minfer.admit import Newcomer, admit, displace, load
from minfer.branch import waiting_beams
from minfer.messages import Held, Reason, WakeAt
from minfer.pausing import sits
from minfer.preempt import preempt
from minfer.record import evolve
from minfer.state import Hold
from minfer.work import Work


def move_up(work: Work) -> None:
    """Let in who can be let in, one after the other; say why the next one is not."""
    while work.state.waiting:
        if _wait_is_wanted(work):
            return
        if work.room <= 0:
            gave_way = _make_room(work)
            if gave_way is None:
                _hold(work, Held(*work.state.waiting.first().id, "budget"))
                return
            work.reasons.append(gave_way)
            continue
        work.state, got = admit(work.config, work.state, work.newcomers)
        if isinstance(got, Held):
            gave_way = _make_way(work, got)
            if gave_way is None:
                _hold(work, got)
                return
            work.reasons.append(gave_way)
            continue
        work.newcomers.append(got)
        work.reasons += got.reasons
        _share_out(work, got)


def _share_out(work: Work, got: Newcomer) -> None:
    """A newcomer has what is left of the budget to be filled; or it sits the step out, as
    it has to run alone, or is paused and has nothing to be filled but its last input.
    """
    seat, (gen,), (name,) = got.seat, got.seat.gens, got.seat.ids
    inputs = seat.base[0] - seat.sched[0] - (name in work.state.paused)
    share = 0 if sits(work.config, work.state, name) else min(work.room, inputs)
    if not share:
        work.idle.add(gen)
        return
    work.shares[gen] = share
    work.room -= share


def _wait_is_wanted(work: Work) -> bool:
    """Whether the policy wants the first in line to wait; if nothing else would wake the
    engine, a time is asked for.
    """
    state = work.state
    now = load(work.config, state, len(work.newcomers))
    start, work.state = consult.admit_from(work.config, state, now)
    runs = now.running and not _stuck(work)
    if start <= state.time or not (runs or start < inf):
        return False
    if start < inf:
        work.wakes = (WakeAt(start),)
    _hold(work, Held(*state.waiting.first().id, "policy"))
    return True


def _make_way(work: Work, held: Held) -> Reason | None:
    """Have the last that runs give its blocks or its row to the first in line, if the
    policy says so and no blocks are coming; returns why it gave way, if it did.
    """
    if held.cause not in ("blocks", "rows") or work.state.fences:
        return None
    if _stuck(work):
        return _unstuck(work)
    work.state, gave_way = displace(work.config, work.state)
    return gave_way


def _stuck(work: Work) -> bool:
    """Whether all who run wait for somebody in line: beams for others of their search."""
    run, searches = work.state.running, work.state.searches
    if not searches or work.newcomers or work.state.inflight:
        return False
    return 0 < len(run) == len(work.idle.intersection(waiting_beams(work.state)))


def _unstuck(work: Work) -> Reason | None:
    """The last who waits for somebody else in line gives way to the first, whatever the
    policy says. No search is in need of it that has all there is: its beams fit.
    """
    first, run = work.state.waiting.first().id, work.state.running
    others = [i for i, (name, _) in enumerate(run.ids) if name != first[0]]
    if not others:
        return None
    work.state, gave_way = preempt(work.config, work.state, others[-1], first)
    return gave_way


def _make_room(work: Work) -> Reason | None:
    """Take the last that runs its tokens of this step for the first in line, if they are
    enough and the policy says so; returns why it gave way, if it did.
    """
    run = work.state.running
    if work.state.fences or not len(run) or run.gens[-1] in work.idle:
        return None
    tokens = work.shares.get(run.gens[-1], 1)
    if work.room + tokens <= 0:
        return None
    work.state, gave_way = displace(work.config, work.state)
    if gave_way is not None:
        work.room += tokens
    return gave_way


def _hold(work: Work, held: Held) -> None:
    """Remember who waits and why; the reason is given when that is news."""
    now = Hold(work.state.waiting.first().place, held.cause)
    if work.state.held != now:
        work.state = evolve(work.state, held=now)
        work.reasons.append(held)
