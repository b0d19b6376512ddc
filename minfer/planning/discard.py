"""A failed step: its results and those of the plans after it are discarded.

Their sequences restart from committed KV, which a failed step cannot have changed. The
sequences of the failed step are suspects: after a number of failures a sample ends with
an error, and one that is close to it runs alone first, so that it does not end by the
fault of another sequence.
"""

from minfer.lifecycle.ending import end_samples, ending_sample
from minfer.lifecycle.preempt import restart
from minfer.lifecycle.retire import free_fenced_blocks
from minfer.lifecycle.transitions import Cause
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
    state = restart(config, state, spots)
    state = evolve(state, inflight=(), faults=tuple(faults.items()))
    return _end_failed_samples(
        config, free_fenced_blocks(state, None), faults, error, reason
    )


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
