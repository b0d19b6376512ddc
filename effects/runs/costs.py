"""Cost models of steps: fitted to the turns of a measured run, and stored in files."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from attrs import astuple, frozen

from minfer.journal.codec import CodecError, dump, load
from minfer.records.messages import Executed
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel, StepWork, drafts_of, work_of
from minfer.values.checks import ConfigError

STEPS_PER_FOLD: Final = 64  # successive steps that are fitted, or held out, together
MIN_STEPS: Final = 4 * STEPS_PER_FOLD  # steps from which a model is fitted
MIN_STEPS_PER_BUCKET: Final = 20  # a graph bucket with fewer has no cost of its own
H200: Final = CostModel(
    name="a 7B model on one H200, roughly (built in)",
    decode=((1, 4e-3),),
    mixed=4e-3,
    token=19e-6,
    sequence=19e-6,
    context=0.02e-6,
)


@frozen
class MeasuredStep:
    """A measured step."""

    seconds: float
    rows: int  # and drafts; 0 if some rows have prefill tokens
    work: StepWork


def measured_steps(turns: Iterable[Turn]) -> Iterator[MeasuredStep]:
    """The executed steps of a run, each with the time since the turn before.

    Between two turns of which the second has results, the driver only waits for results.
    """
    for turn in turns:
        flight = turn.before.inflight
        for event in turn.events:
            if isinstance(event, Executed) and flight and event.step == flight[0].step:
                plan, took = flight[0], turn.transition.state.time - turn.before.time
                rows = 0 if plan.fills else len(plan.rows) + drafts_of(plan)
                yield MeasuredStep(took, rows, work_of(plan))


def fit(measured: Iterable[MeasuredStep], name: str) -> tuple[CostModel, dict[str, Any]]:
    """A cost model of the steps, and its errors on parts of them that it was not fitted
    to.

    Raises ConfigError if there are too few steps.
    """
    import numpy as np  # takes a while, and is needed here only

    steps = [*measured]
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"{name}: {len(steps)} steps are too few to fit; {MIN_STEPS} are needed"
        )
    took = np.array([step.seconds for step in steps], float)
    rows = np.array([step.rows for step in steps], float)
    inputs = np.array([step.work.prefill_tokens for step in steps], float)
    tops = _buckets(rows)
    launch, captured = _launch(took, rows, inputs)
    eager = (inputs > captured) & (launch > 0)
    design = _design(steps, tops, eager)
    # While the host launches, it does not notice that the step before has ended: that one
    # seems to take longer, and the next less. Their sum is known.
    first = np.flatnonzero(~eager | (np.arange(len(took)) == 0))
    took, design = np.add.reduceat(took, first), np.add.reduceat(design, first)
    took, design = took[took > 0], design[took > 0]  # two may have ended in one turn
    off = _held_out_error(took, design)
    *decode, mixed, eager_step, token, eager_token, row, chunk, read, pair, draft = map(
        float, _solve(design, took)
    )
    model = CostModel(
        name=(
            f"{name}; on steps held out {off['total']:+.1%} of their total, "
            f"{off['step']:.1%} of one"
        ),
        decode=tuple(zip(tops, decode, strict=True)),
        mixed=mixed,
        token=token,
        sequence=row,
        chunk=chunk,
        context=read,
        attention=pair,
        draft=draft,
        launch=launch,
        captured=captured,
        eager=eager_step,
        eager_token=eager_token,
    )
    return model, {"held_out_error": off}


def _buckets(rows: Any) -> list[int]:
    """The sizes of graphs for forwards of these numbers of rows: powers of two."""
    import numpy as np

    tops = [1 << k for k in range(24)]
    return [
        n for n in tops if np.sum((rows > n / 2) & (rows <= n)) >= MIN_STEPS_PER_BUCKET
    ] or [1]


def _design(steps: list[MeasuredStep], tops: list[int], eager: Any) -> Any:
    """The matrix of each step's work, one column for each coefficient: forwards by
    bucket, with prefill tokens, and launched by operations; prefill tokens, in steps with
    a graph and without; and the rest of `StepWork`.
    """
    import numpy as np

    rows = np.array([step.rows for step in steps], float)
    work_columns = np.array([astuple(step.work) for step in steps], float)
    bucket = np.minimum(np.searchsorted(tops, rows), len(tops) - 1)
    bases = [(rows > 0) & (bucket == k) for k in range(len(tops))]
    bases += [(rows == 0) & ~eager, eager]
    inputs = work_columns[:, 0]
    split = np.column_stack((inputs * ~eager, inputs * eager, work_columns[:, 1:]))
    return np.column_stack([*bases, split])


def _held_out_error(took: Any, design: Any) -> dict[str, Any]:
    """The errors of a model of every other part of the steps on the parts between: of
    their total, and of one step.
    """
    import numpy as np

    held_out = np.arange(len(took)) // STEPS_PER_FOLD % 2 == 1
    predicted = design[held_out] @ _solve(design[~held_out], took[~held_out])
    return {
        "steps": len(took),
        "total": float(predicted.sum() / took[held_out].sum() - 1),
        "step": float(np.median(np.abs(predicted / took[held_out] - 1))),
    }


def _launch(took: Any, rows: Any, inputs: Any) -> tuple[float, int]:
    """The host's time to launch a step with more than the returned number of prefill
    tokens, if there is such a time.

    Then a step without prefill tokens seems to take that long, if such a step comes next.
    """
    import numpy as np

    pairs = (rows[:-1] > 0) & (inputs[1:] > 0)
    seems, follows = took[:-1][pairs], inputs[1:][pairs]
    usual = np.median(took[rows > 0]) if rows.any() else 0.0
    best = (0.0, 0)
    smallest_error = np.abs(seems - usual).sum()
    for captured in np.unique([0, *follows])[:: 1 + len(follows) // 64]:
        late = follows > captured
        launch = np.median(seems[late]) if late.sum() >= MIN_STEPS_PER_BUCKET else 0.0
        off = np.abs(seems - np.where(late, launch, usual)).sum()
        clearly = (0.95 if best[0] else 1) * smallest_error  # not by chance
        if launch > 2 * usual and off < clearly:
            best = (float(launch), int(captured))
            smallest_error = off
    return best


def _solve(design: Any, took: Any) -> Any:
    """Coefficients, none below 0, that make relative errors small (Huber's estimator).

    An interrupted step has no more influence than one that is off by twice the median
    error; but the sum of all is kept, with none above one and a half times its
    expectation.
    """
    import numpy as np

    scale = np.maximum(np.sqrt((design**2).mean(0)), 1e-30)
    x = design / scale
    coefficients = np.zeros(design.shape[1])
    weights = 1 / took
    for _ in range(20):
        weighed = x * weights[:, None]
        gram, right = weighed.T @ weighed, weighed.T @ (took * weights)
        for j in np.tile(np.flatnonzero(gram.diagonal()), 500):  # one after the other
            coefficients[j] = max(
                0.0, coefficients[j] + (right[j] - gram[j] @ coefficients) / gram[j, j]
            )
        predicted = np.maximum(x @ coefficients, 1e-9)
        off = np.abs(took / predicted - 1)
        weights = (
            np.sqrt(np.minimum(1, 2 * np.median(off) / np.maximum(off, 1e-9))) / predicted
        )
    return (
        coefficients / scale * (np.minimum(took, 1.5 * predicted).sum() / predicted.sum())
    )


def write_cost(path: Path, model: CostModel, details: dict[str, Any]) -> None:
    """Store a cost model as JSON, with its origin."""
    path.write_text(
        json.dumps({"model": dump(model), "about": details}, indent=1) + "\n", "utf-8"
    )


def read_cost(path: Path) -> CostModel:
    """Read a stored cost model. Raises ConfigError."""
    try:
        stored = json.loads(path.read_text("utf-8"))["model"]
        model: CostModel = load({**stored, "is": "CostModel"}, {"CostModel": CostModel})
    except (
        OSError,
        CodecError,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ) as error:
        message = f"{path}: this is no cost model, as --save-cost writes: {error}"
        raise ConfigError(message) from None
    return model
