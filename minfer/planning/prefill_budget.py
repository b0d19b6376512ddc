"""The token budget of a step that prefill shares with decode rows.

Theory. Decode rows wait for the whole step, so the prompts in it are the time between
their tokens. Prompts that are computed in small chunks, beside decode rows whose step
takes little longer for them, cost these rows nothing; but each row that is still in
prefill is one that does not decode. So the configuration's `itl_target` bounds the
prefill tokens of a step beside decode rows:

- in seconds: by what fits into the target, as recent steps took (`StepTimes`);
- 0, by the load: by what fits into `STRETCH` times the duration of a step without
  prefill. Where that is less than is needed to keep up, it is at least
  `TOKENS_PER_DECODE_ROW` for each decode row, which prompts of up to so many times their
  output need; and at least one part in `BACKLOG_STEPS` of all prompt tokens that are
  still to be computed. So however long prompts are, they are computed as fast as they
  come, and a burst as fast as without a target.

A bounded step may take at least `min_prefill_tokens`, so prompts always get ahead.
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
    """The load of the step that is planned, with the budget that keeps to the target.

    `filled` are the positions of rows in prefill; `skipped` the generations that skip the
    step.
    """
    load = current_load(config, state)
    if config.itl_target is None or not (filled or state.waiting):
        return load
    run, waiting = state.running, state.waiting
    decoding = len(run) - len(skipped.union(run.run_ids[i] for i in filled))
    prompt_tokens = sum(run.num_known_at_admission[i] - run.scheduled[i] for i in filled)
    if waiting:  # a sum over all would cost more the more there are
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
