"""The first difference of a replay: its turn, the samples, the recorded and the new
decision.

Theory. Facts (`minfer.journal.decisions`) have places, run ids and device rows, and
those of a plan are relative to the plan before. Both sides of a divergence took the same
turn in the same state, so the state maps run ids to sequences, and with the plan
before them both sides can be rebuilt, row by row, under request ids. Differences are
reported in the order of decisions: admitted, deferred, preempted; ended
(`minfer.journal.differences`); and of the plans the first that differs
(`minfer.journal.plan_differences`), since later ones follow from it.
"""

import json
from typing import Any, Final

from attrs import frozen

from minfer.journal.decisions import Facts, columns_of
from minfer.journal.differences import (
    REASONS,
    Difference,
    ends,
    loads,
    moves,
    reasons,
    wakes,
)
from minfer.journal.plan_differences import plans
from minfer.records.state import EngineState

# in which facts are compared
_FACT_ORDER: Final = ("reasons", "finished", "wake", "moves", "loads", "plans")
MAX_FACT_LEVELS: Final = 16  # of lists in facts, at most
_MAX_FACT_CHARS: Final = 300  # characters of a fact in a message
_DIGEST_ONLY: Final = "positions or rows of a plan (known by digest)"

LEGEND: Final = {
    "finished": "[request, sample, reason, output tokens, cached tokens of its prompt]",
    "wake": "seconds",
    "plans": "one entry for each step planned, as far as it differs from the one before",
    "run_ids": "runs, in batch order",
    "left": "runs",
    "joined": "[place in the batch, run, device row]",
    "num_scheduled_tokens": "[place in the batch, input tokens], where not 1",
    "max_sampled_tokens": "[place in the batch, tokens it may yield], where not 1",
    "fills": "[place in the batch, position of the first of its inputs from history]",
    "opens": "[place in the batch, request, sample, table as [first block, how many]]",
    "slots": "[place in the batch, slot of its adapter]",
    "loads": "slots into which adapters are loaded",
    "grows": "[device row, entry of its table, new blocks as [first block, how many]]",
    "copies": "[block, to block, positions]",
    "drafts": "[place in the batch, tokens to verify]",
    "moves": "[number, whether to the device, from pages as [first page, how many], to]; "
    "or [number, stored or fetched, how many blocks, pages of the device]",
    "deferred": "places in the batch of rows with deferred sampling",
}


@frozen
class Divergence:
    """The first turn whose decisions are not the recorded ones."""

    turn: int
    step: int  # the first step planned in that turn, or that would have been
    time: float  # seconds
    field: str  # the first fact that differs, and its innermost part
    expected: Any  # the recorded value; None if only its digest was
    found: Any
    differences: tuple[Difference, ...] = ()
    legend: str = ""  # what the columns of `expected` and `found` are

    def __str__(self) -> str:
        head = f"turn {self.turn} (step {self.step}, {self.time:.6f} s) decides otherwise"
        if self.differences:
            words = "; ".join(difference.words for difference in self.differences)
            return f"{head}: {words}"
        old, new = _shortened(self.expected), _shortened(self.found)
        return f"{head}: {self.field} was {old}, is {new}"


def find_divergence(
    number: int, before: EngineState, time: float, expected: Facts, actual: Facts
) -> Divergence:
    """The divergence of turn `number`, taken in `before`: between its recorded facts and
    those found now.
    """
    actual = json.loads(json.dumps(actual))
    if not (isinstance(expected, dict) and is_shallow(expected, MAX_FACT_LEVELS)):
        expected = {}  # no engine has written that
    step = before.next_step
    name = next(
        (name for name in _FACT_ORDER if expected.get(name) != actual.get(name)), None
    )
    if name is None:
        field = f"{_DIGEST_ONLY}, or turns are missing or out of order"
        return Divergence(number, step, time, field=field, expected=None, found=None)
    path, old, new = first_difference(name, expected.get(name), actual.get(name))
    return Divergence(
        turn=number,
        step=step,
        time=time,
        field=path,
        expected=old,
        found=new,
        differences=_differences(before, expected, actual),
        legend=_legend(path, old, new),
    )


def is_shallow(value: Any, levels: int) -> bool:
    """Whether JSON has at most `levels` levels."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(item, levels - 1) for item in items)


def _differences(
    before: EngineState, recorded: Facts, replayed: Facts
) -> tuple[Difference, ...]:
    """The differences in words; none for facts that no engine has written."""
    try:
        return (
            *reasons(recorded, replayed),
            *ends(recorded, replayed),
            *wakes(recorded, replayed),
            *moves(recorded, replayed),
            *loads(recorded, replayed),
            *plans(before, recorded, replayed),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return ()


def first_difference(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The innermost place in which two JSON values differ first, and both values there.

    Lists are taken whole, unless they are of plans.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return first_difference(f"{path}.{key}", old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and path != "reasons":
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=False)):
            if old_item != new_item and isinstance(old_item, dict):
                return first_difference(f"{path}[{index}]", old_item, new_item)
    return path, old, new


def _legend(path: str, old: Any, new: Any) -> str:
    """The names of the columns of a fact."""
    if path == "reasons":
        shown = json.dumps([old, new])
        kinds = [kind for kind in REASONS if f'["{kind}"' in shown]
        return "; ".join(
            f"[{', '.join((kind, *columns_of(REASONS[kind])))}]" for kind in kinds
        )
    return LEGEND.get(path.rpartition(".")[2].partition("[")[0], "")


def _shortened(value: Any) -> str:
    text = "nothing out of the ordinary" if value is None else json.dumps(value)
    return text if len(text) <= _MAX_FACT_CHARS else text[: _MAX_FACT_CHARS - 3] + "..."
