"""What steps cost: cost models fitted to the turns of a measured run, and
kept in files.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from minfer.config import ConfigError
from minfer.messages import Executed
from minfer.runs.codec import CodecError, dump, load
from minfer.runs.simulate import CostModel, work
from minfer.state import Turn

Step = tuple[float, ...]  # seconds, rows (0 if some have history), forwards, and `work`
PART: Final = 64  # steps in a row that are fitted, or held out, together
SEEN: Final = 20  # steps that a graph bucket needs, to have a cost of its own
H200: Final = CostModel(
    name="a 7B model on one H200, roughly (built in)",
    decode=((1, 4e-3),),
    mixed=4e-3,
    token=19e-6,
    sequence=19e-6,
    context=0.02e-6,
)


def steps(turns: Iterable[Turn]) -> Iterator[Step]:
    """The executed steps of a run, each with the time since the turn before.

    Between two turns of which the second has results, the driver waits for nothing else.
    """
    for turn in turns:
        flight = turn.before.inflight
        for event in turn.events:
            if isinstance(event, Executed) and flight and event.step == flight[0].step:
                plan, took = flight[0], turn.transition.state.time - turn.before.time
                yield took, 0 if plan.fills else len(plan.rows), plan.repeat, *work(plan)


def fit(measured: Iterable[Step], name: str) -> tuple[CostModel, dict[str, Any]]:
    """A cost model of the steps, and how far it is off on parts of them that it has not
    seen.

    Raises ConfigError if there are too few steps.
    """
    import numpy as np  # takes a while, and is needed here only

    table = np.array([*measured], float).reshape(-1, 8)
    if len(table) < 4 * PART:
        raise ConfigError(
            f"{name}: {len(table)} steps are too few to fit; {4 * PART} are needed"
        )
    took, rows, forwards, inputs = table[:, :4].T
    tops = [
        1 << k for k in range(24) if np.sum((rows > 2**k / 2) & (rows <= 2**k)) >= SEEN
    ] or [1]
    bucket = np.minimum(np.searchsorted(tops, rows), len(tops) - 1)
    launch, captured = _launch(took, rows, inputs)
    eager = (inputs > captured) & (launch > 0)
    bases = [
        *((rows > 0) & (bucket == k) for k in range(len(tops))),
        (rows == 0) & ~eager,
        eager,
    ]
    split = np.column_stack((inputs * ~eager, inputs * eager, table[:, 4:]))
    design = np.column_stack([*(forwards * base for base in bases), split])
    # While the host launches, it does not learn that the step before has ended: that one
    # seems to take longer, and the next less. What they take together is known.
    first = np.flatnonzero(~eager | (np.arange(len(took)) == 0))
    took, design = np.add.reduceat(took, first), np.add.reduceat(design, first)
    took, design = took[took > 0], design[took > 0]  # two may have ended in one turn
    held = np.arange(len(took)) // PART % 2 == 1
    said = design[held] @ _solve(design[~held], took[~held])
    off = {
        "steps": len(took),
        "total": float(said.sum() / took[held].sum() - 1),
        "step": float(np.median(np.abs(said / took[held] - 1))),
    }
    *decode, mixed, own, token, own_token, row, chunk, read, pair = map(
        float, _solve(design, took)
    )
    error = (
        f"on steps held out {off['total']:+.1%} of their total, {off['step']:.1%} of one"
    )
    model = CostModel(
        name=f"{name}; {error}",
        decode=tuple(zip(tops, decode, strict=True)),
        mixed=mixed,
        token=token,
        sequence=row,
        chunk=chunk,
        context=read,
        attention=pair,
        launch=launch,
        captured=captured,
        eager=own,
        eager_token=own_token,
    )
    return model, {"held_out_error": off}


def _launch(took: Any, rows: Any, inputs: Any) -> tuple[float, int]:
    """What launching a step with more inputs from history than so many takes the host, if
    it does.

    Then a step without inputs from history seems to take that long, if such a step comes
    next.
    """
    import numpy as np

    pairs = (rows[:-1] > 0) & (inputs[1:] > 0)
    seems, follows = took[:-1][pairs], inputs[1:][pairs]
    usual = np.median(took[rows > 0]) if rows.any() else 0.0
    found, least = (0.0, 0), np.abs(seems - usual).sum()
    for captured in np.unique([0, *follows])[:: 1 + len(follows) // 64]:
        late = follows > captured
        launch = np.median(seems[late]) if late.sum() >= SEEN else 0.0
        off = np.abs(seems - np.where(late, launch, usual)).sum()
        if (
            launch > 2 * usual and off < (0.95 if found[0] else 1) * least
        ):  # and not by chance
            found, least = (float(launch), int(captured)), off
    return found


def _solve(design: Any, took: Any) -> Any:
    """Coefficients, none below 0, that make relative errors small (Huber's estimator).

    A step that was interrupted pulls no harder than one that is off by twice the median
    error; but all of them together take as long as they did, none more than half again
    what is expected.
    """
    import numpy as np

    scale = np.maximum(np.sqrt((design**2).mean(0)), 1e-30)
    x, found, weights = design / scale, np.zeros(design.shape[1]), 1 / took
    for _ in range(20):
        weighed = x * weights[:, None]
        gram, right = weighed.T @ weighed, weighed.T @ (took * weights)
        for j in np.tile(np.flatnonzero(gram.diagonal()), 500):  # one after the other
            found[j] = max(0.0, found[j] + (right[j] - gram[j] @ found) / gram[j, j])
        said = np.maximum(x @ found, 1e-9)
        off = np.abs(took / said - 1)
        weights = (
            np.sqrt(np.minimum(1, 2 * np.median(off) / np.maximum(off, 1e-9))) / said
        )
    return found / scale * (np.minimum(took, 1.5 * said).sum() / said.sum())


def write_cost(path: Path, model: CostModel, about: dict[str, Any]) -> None:
    """Keep a cost model as JSON, with where it is from."""
    path.write_text(
        json.dumps({"model": dump(model), "about": about}, indent=1) + "\n", "utf-8"
    )


def read_cost(path: Path) -> CostModel:
    """A cost model that was kept. Raises ConfigError."""
    try:
        told = json.loads(path.read_text("utf-8"))["model"]
        model: CostModel = load({**told, "is": "CostModel"}, {"CostModel": CostModel})
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
