"""The line moves up: into rows, blocks and tokens that are left, or are made
free for it.

In order; but a client that the policy holds back for now (`Policy.holds_back`) is passed
by those of others.
"""

from math import inf

from minfer import consult
from minfer.admit import Newcomer, admit, displace, load
from minfer.messages import Held, Reason, WakeAt
from minfer.pausing import sits
from minfer.policy import Load
from minfer.record import evolve
from minfer.sequence import Sequence
from minfer.state import Hold
from minfer.work import Work


def move_up(work: Work) -> None:
    """Let in who can be let in, one after the other; say why the next one is not."""
    shut = set[str]()  # clients that are held back as things stand
    while work.state.waiting:
        if _wait_is_wanted(work):
            break
        seq = _next(work, shut)
        if seq is None:
            first = work.state.waiting.first()
            _hold(work, first, Held(*first.id, "share"))
            break
        if work.room <= 0:
            gave_way = _make_room(work, seq)
            if gave_way is None:
                _hold(work, seq, Held(*seq.id, "budget"))
                break
            work.reasons.append(gave_way)
            continue
        work.state, got = admit(work.config, work.state, seq, work.newcomers)
        if isinstance(got, Held):
            gave_way = _make_way(work, seq, got)
            if gave_way is None:
                _hold(work, seq, got)
                break
            work.reasons.append(gave_way)
            continue
        _joins(work, seq, got)
        shut.clear()  # with others in, a client may have more
    if work.state.shut != shut:
        work.state = evolve(work.state, shut=frozenset(shut))


def _next(work: Work, shut: set[str]) -> Sequence | None:
    """Who is next: the first whose client is not held back; None: all are. Learns who is.

    Who has been in takes up what it has had already.
    While nothing runs, nobody else's end can be waited for.
    """
    state = work.state
    runs = len(state.running) or work.newcomers
    if not runs or not consult.may_hold_back(work.config):
        shut.clear()
        return state.waiting.first()
    while seq := work.state.waiting.first_but(shut):
        if seq.ran_before:
            return seq
        client = seq.request.client
        waits, work.state = consult.holds_back(
            work.config, work.state, seq.request, _load(work), work.came[client]
        )
        if not waits:
            return seq
        shut.add(client)
    return None


def _load(work: Work) -> Load:
    """What a policy may look at, who has joined so far included."""
    now = load(work.config, work.state, len(work.newcomers))
    joined = now.paused and any(
        not work.idle.issuperset(one.seat.gens) for one in work.newcomers
    )
    return evolve(now, paused=False) if joined else now


def _joins(work: Work, seq: Sequence, got: Newcomer) -> None:
    """It is in. It has what is left of the step's tokens to be filled; or it sits the
    step out, as it has to run alone, or is paused and has no use for them.
    """
    work.newcomers.append(got)
    work.came[seq.request.client] += 1
    work.reasons += got.reasons
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
    first = state.waiting.first()
    if first.request.place is not None:  # it goes on with what the policy has let start
        return False
    now = _load(work)
    start, work.state = consult.admit_from(work.config, state, now)
    if start <= state.time or not (now.running or start < inf):
        return False
    if start < inf:
        work.wakes = (WakeAt(start),)
    _hold(work, first, Held(*first.id, "policy"))
    return True


def _make_way(work: Work, seq: Sequence, held: Held) -> Reason | None:
    """Have the last that runs give its blocks or its row to `seq`, if the policy says so
    and no blocks are coming; returns why it gave way, if it did.
    """
    if held.cause not in ("blocks", "rows") or work.state.fences:
        return None
    work.state, gave_way = displace(work.config, work.state, seq)
    return gave_way


def _make_room(work: Work, seq: Sequence) -> Reason | None:
    """Take the last that runs its tokens of this step for `seq`, if they are enough and
    the policy says so; returns why it gave way, if it did.
    """
    run = work.state.running
    if work.state.fences or not len(run) or run.gens[-1] in work.idle:
        return None
    tokens = work.shares.get(run.gens[-1], 1)
    if work.room + tokens <= 0:
        return None
    work.state, gave_way = displace(work.config, work.state, seq)
    if gave_way is not None:
        work.room += tokens
    return gave_way


def _hold(work: Work, seq: Sequence, held: Held) -> None:
    """Remember who waits and why; the reason is given when that is news."""
    now = Hold(seq.place, held.cause)
    if work.state.held != now:
        work.state = evolve(work.state, held=now)
        work.reasons.append(held)
