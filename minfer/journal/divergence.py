"""The first difference of a replay: its turn, the samples, the recorded and the new
decision.

Theory. Facts (`minfer.journal.decisions`) have places, generations and device rows, and
those of a plan are relative to the plan before. Both sides of a divergence took the same
turn in the same state, so the state maps generations to sequences, and with the plan
before them both sides can be rebuilt, row by row, under request ids. Differences are
reported in the order of decisions: admitted, deferred, preempted; ended
(`minfer.journal.differences`); and of the plans the first that differs
(`minfer.journal.plan_differences`), since later ones follow from it.
"""

import json
from typing import Any, Final

from attrs import frozen

from minfer.journal.decisions import Facts, columns_of
from minfer.journal.differences import REASONS, Difference, ends, moves, reasons, wakes
from minfer.journal.plan_differences import plans
from minfer.records.state import EngineState

# in which facts are compared
_ORDER: Final = ("reasons", "finished", "wake", "moves", "plans")
LEVELS: Final = 16  # of lists in facts, at most
_SHORT: Final = 300  # characters of a fact in a message
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
        what = f"turn {self.turn} (step {self.step}, {self.time:.6f} s) decides otherwise"
        if self.differences:
            return f"{what}: {'; '.join(one.words for one in self.differences)}"
        return (
            f"{what}: {self.field} was {_short(self.expected)}, is {_short(self.found)}"
        )


def diverged(
    number: int, before: EngineState, time: float, expected: Facts, found: Facts
) -> Divergence:
    """The divergence of turn `number`, taken in `before`: between its recorded facts and
    those found now.
    """
    found = json.loads(json.dumps(found))
    if not (isinstance(expected, dict) and is_shallow(expected, LEVELS)):
        expected = {}  # no engine has written that
    step = before.next_step
    name = next((name for name in _ORDER if expected.get(name) != found.get(name)), None)
    if name is None:
        what = f"{_DIGEST_ONLY}, or turns are missing or out of order"
        return Divergence(number, step, time, field=what, expected=None, found=None)
    path, was, now = innermost(name, expected.get(name), found.get(name))
    return Divergence(
        turn=number,
        step=step,
        time=time,
        field=path,
        expected=was,
        found=now,
        differences=_differences(before, expected, found),
        legend=_legend(path, was, now),
    )


def is_shallow(value: Any, levels: int) -> bool:
    """Whether JSON has at most so many levels."""
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(part, levels - 1) for part in parts)


def _differences(before: EngineState, then: Facts, now: Facts) -> tuple[Difference, ...]:
    """The differences in words; none for facts that no engine has written."""
    try:
        return (
            *reasons(then, now),
            *ends(then, now),
            *wakes(then, now),
            *moves(then, now),
            *plans(before, then, now),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return ()


def innermost(path: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    """The innermost place in which two JSON values differ first, and both values there.

    Lists are taken whole, unless they are of plans.
    """
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                return innermost(f"{path}.{key}", was.get(key), now.get(key))
    if isinstance(was, list) and isinstance(now, list) and path != "reasons":
        for at, (one, other) in enumerate(zip(was, now, strict=False)):
            if one != other and isinstance(one, dict):
                return innermost(f"{path}[{at}]", one, other)
    return path, was, now


def _legend(path: str, was: Any, now: Any) -> str:
    """The names of the columns of a fact."""
    if path == "reasons":
        shown = json.dumps([was, now])
        kinds = [kind for kind in REASONS if f'["{kind}"' in shown]
        return "; ".join(
            f"[{', '.join((kind, *columns_of(REASONS[kind])))}]" for kind in kinds
        )
    return LEGEND.get(path.rpartition(".")[2].partition("[")[0], "")


def _short(value: Any) -> str:
    text = "nothing out of the ordinary" if value is None else json.dumps(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."
