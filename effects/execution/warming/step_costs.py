"""Measures the costs of steps on this device, before requests are served.

From these costs the engine finds the best number of drafts (`minfer.speculate.length`). A
size is a number of decode rows, in short contexts; a row with drafts is assumed to cost
as much as one row for each of its inputs. `fixed` is the additional cost of verifying the
drafts of one row, plus an estimate of the host's work between two steps if the host makes
the drafts.
"""

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from attrs import evolve

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.warming.dummy_runner import DummyRunner
from minfer.effects.models.layout.shapes import padded_drafts
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, Speculation

REPEATS: Final = 5
# Factor between two numbers of rows that a drafter is measured for.
ROWS_FACTOR: Final = 4
MAX_DRAFTED_INPUTS: Final = 512  # inputs: there are no drafts in larger steps
# Prefill tokens that are measured.
PREFILL_TOKENS: Final = {"cuda": 8192, "cpu": 256}
# Seconds in which a GPU is idle before a step that could not be planned ahead: a turn of
# the engine's loop, with proposals. The CPU computes when results are requested, so it
# waits for the proposals only.
TURN_SECONDS: Final = {"cuda": 5e-4, "cpu": 1e-4}


def step_costs(dummy_runner: DummyRunner, spec_config: Speculation) -> Costs:
    """Returns the seconds of steps, for an engine with this speculation; no step may be
    in flight.
    """
    runner, drafts = dummy_runner.runner, padded_drafts(spec_config.drafts)
    shapes = _measured_shapes(runner.config, spec_config, drafts)
    shapes = [shape for shape in shapes if runner.padded(shape).lines <= runner.lines]
    verify_seconds = accumulate((_seconds(dummy_runner, shape) for shape in shapes), max)
    verify = tuple(
        zip((shape.decode_inputs for shape in shapes), verify_seconds, strict=True)
    )
    drafted_row = StepShape(decode_rows=1, draws=1, verified=1, drafts=drafts)
    drafted_seconds = _seconds(dummy_runner, drafted_row)
    # One more forward, of the fewest inputs.
    beside = verify[0][1] if runner.separates_drafts else 0.0
    costs = Costs(verify, fixed=TURN_SECONDS[runner.backend.device.type], beside=beside)
    extra = drafted_seconds - costs.seconds(
        min(drafted_row.decode_inputs, shapes[-1].decode_inputs)
    )
    if spec_config.drafter != DEVICE:
        return evolve(costs, fixed=costs.fixed + max(0.0, extra))
    drafting = [*_draft_seconds(dummy_runner, spec_config, shapes[-1].decode_inputs)]
    draft, *_ = forward_seconds = [*accumulate((seconds for _, seconds in drafting), max)]
    more_seconds = [seconds - draft for seconds in forward_seconds]
    draft_more = tuple(zip((rows for rows, _ in drafting), more_seconds, strict=True))
    return evolve(costs, draft=draft, fixed=max(0.0, extra), draft_more=draft_more)


def token_seconds(dummy_runner: DummyRunner) -> float:
    """Returns the seconds to compute the KV of a token, among as many as a step has at
    most; no step may be in flight.
    """
    config = dummy_runner.runner.config
    max_tokens = PREFILL_TOKENS[dummy_runner.runner.backend.device.type]
    tokens = min(config.max_num_batched_tokens, config.max_model_len - 1, max_tokens)
    shape = StepShape(decode_rows=0, draws=1, tokens=tokens, chunks=1, longest=tokens)
    return _seconds(dummy_runner, shape) / tokens


def _draft_seconds(
    dummy_runner: DummyRunner, spec_config: Speculation, largest: int
) -> Iterator[tuple[int, float]]:
    """Yields numbers of rows, from one on, and the seconds of a drafter's forward for
    them: the difference between steps with its drafts and steps with the host's.
    """
    max_seqs = dummy_runner.runner.config.max_num_seqs
    rows, max_rows = 1, min(max_seqs, spec_config.rows or max_seqs)
    while True:
        room = min(padded_drafts(spec_config.drafts), max(1, largest // rows - 1))
        drafts = max(n for n in range(1, room + 1) if padded_drafts(n) == n)
        verifying = StepShape(decode_rows=rows, draws=rows, verified=rows, drafts=drafts)
        by_host, by_device = (
            _seconds(dummy_runner, evolve(verifying, proposes=proposes))
            for proposes in (False, True)
        )
        yield rows, max(0.0, by_device - by_host) / drafts
        if rows == max_rows:
            return
        rows = min(ROWS_FACTOR * rows, max_rows)


def _measured_shapes(
    config: EngineConfig, spec_config: Speculation, drafts: int
) -> list[StepShape]:
    """Returns steps by ascending number of inputs: decode rows alone, and then, for more
    inputs, as many rows as may have drafts, with drafts.
    """
    max_rows = min(config.max_num_seqs, spec_config.rows or config.max_num_seqs)
    rows, size = list[int](), 1
    while size < max_rows:
        rows.append(size)
        size *= 2
    shapes = [StepShape(decode_rows=count, draws=count) for count in (*rows, max_rows)]
    draft_counts = sorted({padded_drafts(count) for count in range(1, drafts + 1)})
    shapes += [
        StepShape(decode_rows=max_rows, draws=max_rows, verified=max_rows, drafts=d)
        for d in draft_counts
    ]
    largest = min(MAX_DRAFTED_INPUTS, config.max_num_batched_tokens)
    return [shape for shape in shapes if shape.decode_inputs <= max(largest, 1)]


def _seconds(dummy_runner: DummyRunner, shape: StepShape) -> float:
    """Returns the shortest time of some steps of a shape, after one that compiles
    kernels: other load on the machine makes steps slower, never faster.
    """
    run = dummy_runner.prepared(shape)
    times = list[float]()
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        run()
        dummy_runner.runner.wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
