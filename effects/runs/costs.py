"""Cost models of steps: fitted to the turns of a measured run, and stored in files."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from attrs import astuple, frozen

from minfer.journal.codec import CodecError, dump, load
from minfer.records.messages import Executed
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel, StepWork, drafts_of, work
from minfer.values.checks import ConfigError

PART: Final = 64  # successive steps that are fitted, or held out, together
FEWEST: Final = 4 * PART  # steps from which a model is fitted
SEEN: Final = 20  # steps that a graph bucket needs, to have a cost of its own
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
                yield MeasuredStep(took, rows, work(plan))


def fit(measured: Iterable[MeasuredStep], name: str) -> tuple[CostModel, dict[str, Any]]:
    """A cost model of the steps, and its errors on parts of them that it was not fitted
    to.

    Raises ConfigError if there are too few steps.
    """
    import numpy as np  # takes a while, and is needed here only

    every = [*measured]
    if len(every) < FEWEST:
        raise ConfigError(
            f"{name}: {len(every)} steps are too few to fit; {FEWEST} are needed"
        )
    took = np.array([one.seconds for one in every], float)
    rows = np.array([one.rows for one in every], float)
    inputs = np.array([one.work.inputs for one in every], float)
    tops = _buckets(rows)
    launch, captured = _launch(took, rows, inputs)
    eager = (inputs > captured) & (launch > 0)
    design = _design(every, tops, eager)
    # While the host launches, it does not notice that the step before has ended: that one
    # seems to take longer, and the next less. Their sum is known.
    first = np.flatnonzero(~eager | (np.arange(len(took)) == 0))
    took, design = np.add.reduceat(took, first), np.add.reduceat(design, first)
    took, design = took[took > 0], design[took > 0]  # two may have ended in one turn
    off = _held_out_error(took, design)
    *decode, mixed, own, token, own_token, row, chunk, read, pair, draft = map(
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
        eager=own,
        eager_token=own_token,
    )
    return model, {"held_out_error": off}


def _buckets(rows: Any) -> list[int]:
    """The sizes of graphs for forwards of so many rows: powers of two."""
    import numpy as np

    tops = [1 << k for k in range(24)]
    return [n for n in tops if np.sum((rows > n / 2) & (rows <= n)) >= SEEN] or [1]


def _design(every: list[MeasuredStep], tops: list[int], eager: Any) -> Any:
    """The matrix of each step's work, one column for each coefficient: forwards by
    bucket, with prefill tokens, and launched by operations; prefill tokens, in steps with
    a graph and without; and the rest of `StepWork`.
    """
    import numpy as np

    rows = np.array([one.rows for one in every], float)
    done = np.array([astuple(one.work) for one in every], float)
    bucket = np.minimum(np.searchsorted(tops, rows), len(tops) - 1)
    bases = [(rows > 0) & (bucket == k) for k in range(len(tops))]
    bases += [(rows == 0) & ~eager, eager]
    inputs = done[:, 0]
    split = np.column_stack((inputs * ~eager, inputs * eager, done[:, 1:]))
    return np.column_stack([*bases, split])


def _held_out_error(took: Any, design: Any) -> dict[str, Any]:
    """The errors of a model of every other part of the steps on the parts between: of
    their total, and of one step.
    """
    import numpy as np

    held = np.arange(len(took)) // PART % 2 == 1
    predicted = design[held] @ _solve(design[~held], took[~held])
    return {
        "steps": len(took),
        "total": float(predicted.sum() / took[held].sum() - 1),
        "step": float(np.median(np.abs(predicted / took[held] - 1))),
    }


def _launch(took: Any, rows: Any, inputs: Any) -> tuple[float, int]:
    """The host's time to launch a step with more than so many prefill tokens, if there is
    such a time.

    Then a step without prefill tokens seems to take that long, if such a step comes next.
    """
    import numpy as np

    pairs = (rows[:-1] > 0) & (inputs[1:] > 0)
    seems, follows = took[:-1][pairs], inputs[1:][pairs]
    usual = np.median(took[rows > 0]) if rows.any() else 0.0
    found = (0.0, 0)
    least = np.abs(seems - usual).sum()
    for captured in np.unique([0, *follows])[:: 1 + len(follows) // 64]:
        late = follows > captured
        launch = np.median(seems[late]) if late.sum() >= SEEN else 0.0
        off = np.abs(seems - np.where(late, launch, usual)).sum()
        clearly = (0.95 if found[0] else 1) * least  # not by chance
        if launch > 2 * usual and off < clearly:
            found = (float(launch), int(captured))
            least = off
    return found


def _solve(design: Any, took: Any) -> Any:
    """Coefficients, none below 0, that make relative errors small (Huber's estimator).

    An interrupted step has no more influence than one that is off by twice the median
    error; but the sum of all is kept, with none above one and a half times its
    expectation.
    """
    import numpy as np

    scale = np.maximum(np.sqrt((design**2).mean(0)), 1e-30)
    x = design / scale
    found = np.zeros(design.shape[1])
    weights = 1 / took
    for _ in range(20):
        weighed = x * weights[:, None]
        gram, right = weighed.T @ weighed, weighed.T @ (took * weights)
        for j in np.tile(np.flatnonzero(gram.diagonal()), 500):  # one after the other
            found[j] = max(0.0, found[j] + (right[j] - gram[j] @ found) / gram[j, j])
        predicted = np.maximum(x @ found, 1e-9)
        off = np.abs(took / predicted - 1)
        weights = (
            np.sqrt(np.minimum(1, 2 * np.median(off) / np.maximum(off, 1e-9))) / predicted
        )
    return found / scale * (np.minimum(took, 1.5 * predicted).sum() / predicted.sum())


def write_cost(path: Path, model: CostModel, about: dict[str, Any]) -> None:
    """Store a cost model as JSON, with its origin."""
    path.write_text(
        json.dumps({"model": dump(model), "about": about}, indent=1) + "\n", "utf-8"
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
        what = f"{path}: this is no cost model, as --save-cost writes: {error}"
        raise ConfigError(what) from None
    return model
