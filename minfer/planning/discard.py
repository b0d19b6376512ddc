"""A failed step: its results and those of the plans after it are discarded.

Their sequences restart from committed KV, which a failed step cannot have changed. The
sequences of the failed step are suspects: after a number of failures a sample ends with
an error, and one that is close to it runs alone first, so that it does not end by the
fault of another sequence.

With a state group they cannot restart in place: the working state of a row is not
addressed by position, and a failed step may have changed it. They are preempted, and
start from the last state that was kept.
"""

from minfer.lifecycle.ending import end_samples, ending_sample
from minfer.lifecycle.preempt import preempt, restart
from minfer.lifecycle.retire import free_fenced_blocks
from minfer.lifecycle.transitions import Cause
from minfer.planning.saves import release_saves
from minfer.records.config import EngineConfig
from minfer.records.messages import Discarded, Reason, clip
from minfer.records.sequence import SampleId, positions
from minfer.records.state import EngineState, Transition, emit
from minfer.values.record import evolve


def discard(
    config: EngineConfig, state: EngineState, step: int, error: str
) -> Transition:
    """Discard all steps in flight, and count a failure of the sequences of plan
    `step`.
    """
    error = clip(error)
    run = state.running
    blamed = next(set(plan.run_ids) for plan in state.inflight if plan.step == step)
    faults = dict(state.faults)
    for i in positions(run, blamed):
        faults[run.ids[i]] = faults.get(run.ids[i], 0) + 1
    touched = {run_id for plan in state.inflight for run_id in plan.run_ids}
    spots = positions(run, touched)
    reason = Discarded(step, error, len(state.inflight), len(spots))
    if config.state_group:
        state = evolve(release_saves(state), faults=tuple(faults.items()))
        failed = _end_failed_samples(config, state, faults, error, reason)
        return _preempt_touched(config, failed, touched)
    state = restart(config, state, spots)
    state = evolve(state, inflight=(), faults=tuple(faults.items()))
    return _end_failed_samples(
        config, free_fenced_blocks(state, None), faults, error, reason
    )


def _preempt_touched(
    config: EngineConfig, ended: Transition, touched: set[int]
) -> Transition:
    """Preempt the generations in plans in flight, which are discarded: all but those that
    have just ended.
    """
    state, reasons = ended.state, list[Reason]()
    for run_id in [run_id for run_id in state.running.run_ids if run_id in touched]:
        i = state.running.run_ids.index(run_id)
        state, reason = preempt(config, state, i, state.running.ids[i])
        reasons.append(reason)
    state = free_fenced_blocks(evolve(state, inflight=()), None)
    return evolve(ended, state=state, reasons=(*ended.reasons, *reasons))


def _end_failed_samples(
    config: EngineConfig,
    state: EngineState,
    faults: dict[SampleId, int],
    error: str,
    reason: Reason,
) -> Transition:
    """End the samples that failed too often."""
    max_failures = config.max_failures
    message = f"its step failed {max_failures} times, at last with: {error}"
    run = state.running
    lost = [i for i, name in enumerate(run.ids) if faults.get(name, 0) >= max_failures]
    if not lost:
        return Transition(state, (), (reason,))
    leavers = [ending_sample(run, i, Cause.FAILED, "error", message) for i in lost]
    state, finished = end_samples(config, state, leavers)
    ended = emit(state, finished)
    return evolve(ended, reasons=(reason, *ended.reasons))
