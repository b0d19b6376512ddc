"""A server whose engine dies of some prompts: of the tokens 7, HOW, N. It dies after N
steps of each engine, or at N output tokens, by what HOW says, and prints how many rows of
other requests its step has. `python -m
tests.effects.serving.dying_engine` takes the arguments of `minfer`.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from attrs import frozen

from minfer.effects.cli.main import main
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.plan import Open, Plan

MARK = 7
LENGTH = 3  # of such a prompt
DIES = "the engine dies of a request beside"


def fail() -> None:
    """Break the engine with an exception."""
    raise RuntimeError("it dies of a request")


def by(number: int) -> Callable[[], None]:
    """Die by a signal."""

    def die() -> None:
        os.kill(os.getpid(), number)
        signal.pause()  # until another thread has handled it

    return die


@frozen
class Death:
    """How an engine dies of a prompt."""

    die: Callable[[], None]
    position: bool = False  # at so many output tokens, in whichever engine


DEATHS = {
    7: Death(by(signal.SIGKILL)),
    8: Death(by(signal.SIGSEGV)),
    9: Death(fail),
    10: Death(by(signal.SIGSEGV), position=True),
}
_left: dict[int, int] = {}  # steps, by row
_dies: dict[int, Death] = {}  # by row
_launch = TorchExecutor.launch


def _note(row: int, opened: Open) -> None:
    _left.pop(row, None)
    known = opened.known
    if len(known) < LENGTH or known[0] != MARK or known[1] not in DEATHS:
        return
    death = _dies[row] = DEATHS[known[1]]
    past = len(known) - LENGTH if death.position else 0
    _left[row] = max(0, known[2] - past)


def launch(self: Any, plan: Plan) -> None:
    """Launch a plan, or die."""
    for opened in plan.opens:
        _note(plan.rows[opened.index], opened)
    for row in _left.keys() & set(plan.rows):
        if not _left[row]:
            others = len(set(plan.rows) - _left.keys())
            print(f"{DIES} {others} other rows", file=sys.stderr, flush=True)
            _dies[row].die()
        _left[row] -= 1
    _launch(self, plan)


if __name__ == "__main__":
    TorchExecutor.launch = launch  # type: ignore[method-assign]  # in this process, and those that it forks
    sys.exit(main(sys.argv[1:]))
