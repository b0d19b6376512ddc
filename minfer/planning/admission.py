"""Admission from the waiting queue: into the rows, blocks and tokens that are left, or
that a preemption frees.

Sequences are admitted in order of rank, but those of a client that the policy defers for
now (`Policy.defer`) are passed by those of other clients.
"""

from math import inf

from minfer.lifecycle.pausing import skips_as_suspect
from minfer.lifecycle.seat import table_blocks
from minfer.planning.admit import Admission, admit, current_load, preempt_last, shortage
from minfer.planning.load import choose_source
from minfer.planning.work import StepBuilder, row_cost, token_cost
from minfer.policies import consult
from minfer.records.messages import QueueBlocked, Reason, WakeAt
from minfer.records.policy import Load
from minfer.records.sequence import Sequence
from minfer.records.state import BlockedHead, pages_coming
from minfer.values.record import evolve


def admit_from_queue(work: StepBuilder) -> None:
    """Admit sequences one by one, and record why the next one is not admitted."""
    deferred = set[str]()  # clients that the policy defers for now
    while work.state.waiting:
        if _policy_delays(work):
            break
        seq = _next_admissible(work, deferred)
        if seq is None:
            first = work.state.waiting.first()
            loads = bool(work.state.tiers.loading)
            cause = "loading" if loads else "share"
            _report_blocked(work, first, QueueBlocked(*first.id, cause))
            break
        if work.room <= 0:
            preempted = _preempt_for_tokens(work, seq)
            if preempted is None:
                _report_blocked(work, seq, QueueBlocked(*seq.id, "budget"))
                break
            work.reasons.append(preempted)
            continue
        if _chooses_source(work, seq):
            continue
        most = 1 + (work.room - 1) // token_cost(work.config, seq.request)
        work.state, got = admit(work.config, work.state, seq, work.newcomers, most)
        if isinstance(got, QueueBlocked):
            preempted = _preempt_for_blocks(work, seq, got)
            if preempted is None:
                _report_blocked(work, seq, got)
                break
            work.reasons.append(preempted)
            continue
        _add_to_step(work, seq, got, most)
        deferred.clear()  # after an admission, the policy may allow a client more
    if work.state.deferred_clients != deferred:
        work.state = evolve(work.state, deferred_clients=frozenset(deferred))


def _chooses_source(work: StepBuilder, seq: Sequence) -> bool:
    """Decide whether blocks are loaded for the head of the queue, if there is room to
    admit it; returns whether that was decided now.
    """
    if seq.chosen or not work.config.has_tiers:
        return False
    if shortage(work.config, work.state, seq, work.newcomers):
        return False
    load = choose_source(work.config, work.state, seq)
    if load is None:
        return False
    work.state = load.state
    if load.reason is not None:
        work.reasons.append(load.reason)
    if load.command is not None:
        work.loads.append(load.command)
    return True


def _next_admissible(work: StepBuilder, deferred: set[str]) -> Sequence | None:
    """The first sequence whose client is not deferred, and whose blocks are not on their
    way, or None if there is none; adds deferred clients to `deferred`. None as well if
    blocks are on their way for as many requests as can run.

    A sequence that ran before is never deferred: it continues on the share that it had.
    If nothing runs, no client is deferred, as there is no end of a sequence to wait for.
    """
    state, loading = work.state, work.state.tiers.loading
    if len(loading) >= work.config.max_num_seqs:
        return None
    runs = len(state.running) or work.newcomers
    if not runs or not consult.may_defer(work.config):
        deferred.clear()
        return state.waiting.first_but((), loading)
    while seq := work.state.waiting.first_but(deferred, loading):
        if seq.ran_before:
            return seq
        client = seq.request.client
        came = work.admitted.get(client, 0)
        waits, work.state = consult.defer(
            work.config, work.state, seq.request, _load(work), came
        )
        if not waits:
            return seq
        deferred.add(client)
    return None


def _load(work: StepBuilder) -> Load:
    """The load that a policy may look at, with the sequences admitted in this step."""
    now = current_load(work.config, work.state, len(work.newcomers))
    joined = now.paused and any(
        not work.skipped.issuperset(one.seat.run_ids) for one in work.newcomers
    )
    return evolve(now, paused=False) if joined else now


def _add_to_step(work: StepBuilder, seq: Sequence, got: Admission, most: int) -> None:
    """Add an admitted sequence to the step, with as many of the tokens left, `most`, as
    it can use and has blocks for. It skips the step if it has to run alone later, or is
    paused and needs none.
    """
    work.newcomers.append(got)
    client = seq.request.client
    work.admitted[client] = work.admitted.get(client, 0) + 1
    work.reasons += got.reasons
    seat, (gen,), (name,) = got.seat, got.seat.run_ids, got.seat.ids
    inputs = (
        seat.num_known_at_admission[0] - seat.scheduled[0] - (name in work.state.paused)
    )
    ends = table_blocks(work.config, seat.tables[0]) * work.config.block_size
    most = min(most, ends - seat.scheduled[0])
    share = 0 if skips_as_suspect(work.config, work.state, name) else min(most, inputs)
    if not share:
        work.skipped.add(gen)
        return
    work.shares[gen] = share
    work.room -= row_cost(work.config, seq.request, share)


def _policy_delays(work: StepBuilder) -> bool:
    """Whether the policy wants the head of the queue to wait; if so until a time,
    requests a wake-up at that time.
    """
    state = work.state
    first = state.waiting.first()
    # a later round of a search that the policy has admitted
    if first.request.place is not None:
        return False
    now = _load(work)
    start, work.state = consult.admit_from(work.config, state, now)
    if start <= state.time or not (now.running or start < inf):
        return False
    if start < inf:
        work.wakes = (WakeAt(start),)
    _report_blocked(work, first, QueueBlocked(*first.id, "policy"))
    return True


def _preempt_for_blocks(
    work: StepBuilder, seq: Sequence, why: QueueBlocked
) -> Reason | None:
    """Preempt the last running sequence for its blocks or its row, if the policy agrees
    and no blocks are about to be freed; returns the reason, if it did.
    """
    if why.cause not in ("blocks", "rows") or pages_coming(work.state):
        return None
    work.state, preempted = preempt_last(work.config, work.state, seq)
    return preempted


def _preempt_for_tokens(work: StepBuilder, seq: Sequence) -> Reason | None:
    """Preempt the last running sequence for its tokens of this step, if they are enough
    and the policy agrees; returns the reason, if it did.
    """
    run = work.state.running
    if pages_coming(work.state) or not len(run) or run.run_ids[-1] in work.skipped:
        return None
    tokens = row_cost(
        work.config, run.seqs[-1].request, work.shares.get(run.run_ids[-1], 1)
    )
    if work.room + tokens <= 0:
        return None
    work.state, preempted = preempt_last(work.config, work.state, seq)
    if preempted is not None:
        work.room += tokens
    return preempted


def _report_blocked(work: StepBuilder, seq: Sequence, why: QueueBlocked) -> None:
    """Record which sequence waits and why; the reason is reported if that changed."""
    now = BlockedHead(seq.place, why.cause)
    if work.state.blocked != now:
        work.state = evolve(work.state, blocked=now)
        work.reasons.append(why)
