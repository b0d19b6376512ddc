"""Admission from the waiting queue: into the rows, blocks and tokens that are left, or
that a preemption frees.

Sequences are admitted in order of rank, but those of a client that the policy defers for
now (`Policy.defer`) are passed by those of other clients, and those whose adapter is not
on the device by those of others (adapter_loads.py).
"""

from math import inf

from minfer.lifecycle.pausing import skips_as_suspect
from minfer.lifecycle.seat import table_blocks
from minfer.planning.adapter_loads import count_pass, passes_over, report_slot_wait
from minfer.planning.admit import Admission, admit, current_load, preempt_last, shortage
from minfer.planning.load import choose_source
from minfer.planning.states import bound_chunk
from minfer.planning.step_builder import StepBuilder, row_cost, token_cost
from minfer.policies import consult
from minfer.records.adapters import ALL_READY
from minfer.records.messages import QueueBlocked, Reason, WakeAt
from minfer.records.policy import Load
from minfer.records.sequence import Sequence
from minfer.records.state import BlockedHead, pages_coming
from minfer.values.record import evolve


def admit_from_queue(builder: StepBuilder) -> None:
    """Admit sequences one by one, and record why the next one is not admitted."""
    deferred = set[str]()  # clients that the policy defers for now
    while builder.state.waiting:
        if _delay_by_policy(builder):
            break
        seq = _next_admissible(builder, deferred)
        if seq is None:
            first = builder.state.waiting.first()
            _report_blocked(builder, first, QueueBlocked(*first.id, _cause(builder)))
            break
        if seq.request.adapter and passes_over(builder, seq):
            continue
        if builder.room <= 0:
            preempted = _preempt_for_tokens(builder, seq)
            if preempted is None:
                _report_blocked(builder, seq, QueueBlocked(*seq.id, "budget"))
                break
            builder.reasons.append(preempted)
            _scan_anew(builder)
            continue
        if _chooses_source(builder, seq):
            continue
        max_tokens = 1 + (builder.room - 1) // token_cost(builder.config, seq.request)
        builder.state, admission = admit(
            builder.config, builder.state, seq, builder.newcomers, max_tokens
        )
        if isinstance(admission, QueueBlocked):
            preempted = _preempt_for_blocks(builder, seq, admission)
            if preempted is None:
                _report_blocked(builder, seq, admission)
                break
            builder.reasons.append(preempted)
            _scan_anew(builder)
            continue
        _add_to_step(builder, seq, admission, max_tokens)
        _consider_deferred(builder, deferred)
    if builder.state.deferred_clients != deferred:
        builder.state = evolve(builder.state, deferred_clients=frozenset(deferred))
    if builder.config.adapter_slots:
        report_slot_wait(builder)


def _scan_anew(builder: StepBuilder) -> None:
    """Pass over no adapter until the scan of the queue finds it unready again: there are
    samples ahead of those that were found, such as a victim, which may have left a slot.
    """
    builder.unready, builder.slot_blocked = ALL_READY, None


def _consider_deferred(builder: StepBuilder, deferred: set[str]) -> None:
    """Forget which clients are deferred: after an admission, the policy may allow one of
    them more.
    """
    if deferred:
        deferred.clear()
        _scan_anew(builder)


def _cause(builder: StepBuilder) -> str:
    """What the whole queue waits for, if none of it can be admitted."""
    if builder.unready:
        return "adapter"
    return "loading" if builder.state.tiers.loading else "share"


def _chooses_source(builder: StepBuilder, seq: Sequence) -> bool:
    """Decide whether blocks are loaded for the head of the queue, if there is room to
    admit it; returns whether that was decided now.
    """
    if seq.chosen or not builder.config.has_tiers:
        return False
    if shortage(builder.config, builder.state, seq, builder.newcomers):
        return False
    load = choose_source(builder.config, builder.state, seq)
    if load is None:
        return False
    builder.state = load.state
    if load.reason is not None:
        builder.reasons.append(load.reason)
    if load.command is not None:
        builder.loads.append(load.command)
    return True


def _next_admissible(builder: StepBuilder, deferred: set[str]) -> Sequence | None:
    """The first sequence whose client is not deferred, whose blocks are not on their way,
    and whose adapter is not known to be unready, or None if there is none; adds deferred
    clients to `deferred`. None as well if blocks are on their way for as many requests as
    can run.

    A sequence that ran before is never deferred: it continues on the share that it had.
    If nothing runs, no client is deferred, as there is no end of a sequence to wait for.
    """
    state, loading = builder.state, builder.state.tiers.loading
    if len(loading) >= builder.config.max_num_seqs:
        return None
    runs = len(state.running) or builder.newcomers
    if not runs or not consult.may_defer(builder.config):
        deferred.clear()
        return state.waiting.first_but((), loading, builder.unready)
    while seq := builder.state.waiting.first_but(deferred, loading, builder.unready):
        if seq.ran_before:
            return seq
        client = seq.request.client
        admitted = builder.admitted.get(client, 0)
        waits, builder.state = consult.defer(
            builder.config, builder.state, seq.request, _load(builder), admitted
        )
        if not waits:
            return seq
        deferred.add(client)
    return None


def _load(builder: StepBuilder) -> Load:
    """The load that a policy may look at, with the sequences admitted in this step."""
    now = current_load(builder.config, builder.state, len(builder.newcomers))
    joined = now.paused and any(
        not builder.skipped.issuperset(newcomer.seat.run_ids)
        for newcomer in builder.newcomers
    )
    return evolve(now, paused=False) if joined else now


def _add_to_step(
    builder: StepBuilder, seq: Sequence, admission: Admission, max_tokens: int
) -> None:
    """Add an admitted sequence to the step, with as many of the `max_tokens` left
    as it can use and has blocks for. It skips the step if it has to run alone later, or
    is paused and needs none.
    """
    builder.newcomers.append(admission)
    # It is behind the one that waits: all ahead of that one have been passed over.
    if builder.slot_blocked is not None and seq.request.adapter:
        count_pass(builder, seq.request.adapter)
    client = seq.request.client
    builder.admitted[client] = builder.admitted.get(client, 0) + 1
    builder.reasons += admission.reasons
    seat, (run_id,), (name,) = admission.seat, admission.seat.run_ids, admission.seat.ids
    inputs = (
        seat.num_known_at_admission[0]
        - seat.scheduled[0]
        - (name in builder.state.paused)
    )
    ends = table_blocks(builder.config, seat.tables[0]) * builder.config.block_size
    max_tokens = min(max_tokens, ends - seat.scheduled[0])
    share = (
        0
        if skips_as_suspect(builder.config, builder.state, name)
        else min(max_tokens, inputs)
    )
    if not share:
        builder.skipped.add(run_id)
        return
    if builder.config.state_group:
        share, seat = bound_chunk(builder.config, builder.state, seat, 0, share)
        builder.newcomers[-1] = evolve(admission, seat=seat)
    builder.shares[run_id] = share
    builder.room -= row_cost(builder.config, seq.request, share)


def _delay_by_policy(builder: StepBuilder) -> bool:
    """Whether the policy makes the head of the queue wait; if it names a time, requests
    a wake-up for it.
    """
    state = builder.state
    first = state.waiting.first()
    # It continues a request (beam search) that the policy has admitted.
    if first.request.continues:
        return False
    load = _load(builder)
    start, builder.state = consult.admit_from(builder.config, state, load)
    if start <= state.time or not (load.running or start < inf):
        return False
    if start < inf:
        builder.wakes = (WakeAt(start),)
    _report_blocked(builder, first, QueueBlocked(*first.id, "policy"))
    return True


def _preempt_for_blocks(
    builder: StepBuilder, seq: Sequence, blocked: QueueBlocked
) -> Reason | None:
    """Preempt the last running sequence for its blocks or its row, if the policy agrees
    and no blocks are about to be freed; returns the reason, if it did.
    """
    if blocked.cause not in ("blocks", "rows") or pages_coming(builder.state):
        return None
    builder.state, preempted = preempt_last(builder.config, builder.state, seq)
    return preempted


def _preempt_for_tokens(builder: StepBuilder, seq: Sequence) -> Reason | None:
    """Preempt the last running sequence for its tokens of this step, if they are enough
    and the policy agrees; returns the reason, if it did.

    If prefill is bounded by the `itl_target`, the next steps have room for it: only a row
    in prefill is preempted, and no decode row for its one token.
    """
    run = builder.state.running
    if pages_coming(builder.state) or not len(run) or run.run_ids[-1] in builder.skipped:
        return None
    if builder.bounded and run.run_ids[-1] not in builder.shares:
        return None
    tokens = row_cost(
        builder.config, run.seqs[-1].request, builder.shares.get(run.run_ids[-1], 1)
    )
    if builder.room + tokens <= 0:
        return None
    builder.state, preempted = preempt_last(builder.config, builder.state, seq)
    if preempted is not None:
        builder.room += tokens
    return preempted


def _report_blocked(builder: StepBuilder, seq: Sequence, blocked: QueueBlocked) -> None:
    """Record which sequence waits and why; the reason is reported if that changed."""
    now = BlockedHead(seq.place, blocked.cause)
    if builder.state.blocked != now:
        builder.state = evolve(builder.state, blocked=now)
        builder.reasons.append(blocked)
