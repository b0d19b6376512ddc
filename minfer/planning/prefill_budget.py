"""The token budget of a step that prefill shares with decode rows.

Theory. Decode rows wait for the whole step, so its prefill tokens lengthen the time
between their tokens. Small prefill chunks lengthen a step little, but then prompts take
more steps, and each row in prefill is one that does not decode yet. The configuration's
`itl_target` bounds the prefill tokens of a step that has decode rows:

- Above 0, a duration in seconds: the step takes the prefill tokens that fit into it, by
  the durations of recent steps (`StepTimes`).
- 0, a bound by the load: the step takes the prefill tokens that fit into `STRETCH` times
  the duration of a step without prefill, and always at least
    - `TOKENS_PER_DECODE_ROW` for each decode row. That keeps up with prompts of up to
      this number of times the length of their outputs.
    - 1 / `BACKLOG_STEPS` of all prompt tokens that are still to be computed. That keeps
      up with longer prompts, and computes a burst about as fast as without a target.

The bound is never below `min_prefill_tokens`, so prompts always make progress.
"""

from typing import Final

from minfer.planning.admit import current_load
from minfer.records.config import EngineConfig
from minfer.records.policy import Load
from minfer.records.state import EngineState
from minfer.values.record import evolve

STRETCH: Final = 1.15
TOKENS_PER_DECODE_ROW: Final = 8
BACKLOG_STEPS: Final = 12


def step_load(
    config: EngineConfig, state: EngineState, filled: tuple[int, ...], skipped: set[int]
) -> Load:
    """The load of the step that is planned, with a budget that keeps to the target.

    `filled` has the positions of the rows in prefill, and `skipped` the run ids of the
    rows that skip the step.
    """
    load = current_load(config, state)
    if config.itl_target is None or not (filled or state.waiting):
        return load
    run, waiting = state.running, state.waiting
    decoding = len(run) - len(skipped.union(run.run_ids[i] for i in filled))
    prompt_tokens = sum(run.num_known_at_admission[i] - run.scheduled[i] for i in filled)
    if waiting:  # estimated, as a sum over the whole queue would take too long
        prompt_tokens += len(waiting) * len(waiting.first().history)
    load = evolve(
        load,
        decoding=decoding,
        prompt_tokens=prompt_tokens,
        min_prefill_tokens=config.min_prefill_tokens,
        step_times=state.step_times,
    )
    if not decoding:
        return load
    if config.itl_target:
        bounded = load.budget_within(config.itl_target)
    else:
        needed = max(TOKENS_PER_DECODE_ROW * decoding, prompt_tokens // BACKLOG_STEPS)
        short = load.budget_within(STRETCH * state.step_times.decode)
        bounded = max(short, decoding + needed)
    return evolve(load, budget=min(load.budget, bounded))
