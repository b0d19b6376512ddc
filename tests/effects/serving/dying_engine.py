"""A server whose engine dies of some prompts: of the tokens 7, HOW, N. It dies after N
steps of each engine, or at N output tokens, by what HOW says, and prints how many rows of
other requests its step has. `python -m
tests.effects.serving.dying_engine` takes the arguments of `minfer`.

It plays a kernel that kills for memory with a count of such kills that it raises before
it kills itself. Where it does not, nothing shows that the kill did not come from outside;
such a request is ended after `KILLS` engines that served it alone, instead of
`crash_rule.MAX_SOLO_ENDS`, which would take long.
"""

import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from attrs import frozen

from minfer.effects.cli.main import main
from minfer.effects.cluster.link import crash_rule
from minfer.effects.cluster.processes import engine_ends
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.plan import NewRow, Plan

MARK = 7
LENGTH = 3  # of such a prompt
DIES = "the engine dies of a request beside"
KILLS = 4  # more than kills for memory
_oom_kills = mmap.mmap(-1, 1)  # shared with processes that are forked


def fail() -> None:
    """Break the engine with an exception."""
    raise RuntimeError("it dies of a request")


def by(number: int) -> Callable[[], None]:
    """Die by a signal."""

    def die() -> None:
        os.kill(os.getpid(), number)
        signal.pause()  # until another thread has handled it

    return die


def count_oom_kills() -> int:
    """Returns how often the kernel has killed for memory, as the server believes."""
    return _oom_kills[0]


def run_out_of_memory() -> None:
    """Die as if the kernel had killed the engine for memory."""
    _oom_kills[0] += 1
    by(signal.SIGKILL)()


@frozen
class Death:
    """How an engine dies of a prompt."""

    die: Callable[[], None]
    position: bool = False  # at N output tokens, in whichever engine


DEATHS = {
    7: Death(by(signal.SIGKILL)),
    8: Death(by(signal.SIGSEGV)),
    9: Death(fail),
    10: Death(by(signal.SIGSEGV), position=True),
    11: Death(run_out_of_memory),
}
_left: dict[int, int] = {}  # steps, by row
_dies: dict[int, Death] = {}  # by row
_launch = TorchExecutor.launch


def _note(row: int, opened: NewRow) -> None:
    _left.pop(row, None)
    known_tokens = opened.known
    if (
        len(known_tokens) < LENGTH
        or known_tokens[0] != MARK
        or known_tokens[1] not in DEATHS
    ):
        return
    death = _dies[row] = DEATHS[known_tokens[1]]
    past = len(known_tokens) - LENGTH if death.position else 0
    _left[row] = max(0, known_tokens[2] - past)


def launch(self: Any, plan: Plan) -> None:
    """Launch a plan, or die."""
    for opened in plan.opens:
        _note(plan.rows[opened.index], opened)
    for row in _left.keys() & set(plan.rows):
        if not _left[row]:
            num_others = len(set(plan.rows) - _left.keys())
            print(f"{DIES} {num_others} other rows", file=sys.stderr, flush=True)
            _dies[row].die()
        _left[row] -= 1
    _launch(self, plan)


if __name__ == "__main__":
    with (  # in this process, and those that it forks
        mock.patch.object(TorchExecutor, "launch", launch),
        mock.patch.object(engine_ends, "oom_kills", count_oom_kills),
        mock.patch.object(crash_rule, "MAX_SOLO_ENDS", KILLS),
    ):
        sys.exit(main(sys.argv[1:]))
