"""A server whose engine dies of some prompts. Prompts of the tokens 7, 7, N kill it after
N steps. `python -m tests.effects.serving.dying_engine` takes the arguments of `minfer`.
"""

import os
import signal
import sys
from typing import Any

from minfer.effects.cli.main import main
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.plan import Plan

MARK = (7, 7)
_left: dict[int, int] = {}  # steps, by row
_launch = TorchExecutor.launch


def launch(self: Any, plan: Plan) -> None:
    """Launch a plan, or die."""
    for opened in plan.opens:
        row = plan.rows[opened.index]
        _left.pop(row, None)
        if opened.known[:2] == MARK:
            _left[row] = opened.known[2]
    for row in _left.keys() & set(plan.rows):
        if not _left[row]:
            os.kill(os.getpid(), signal.SIGKILL)
        _left[row] -= 1
    _launch(self, plan)


if __name__ == "__main__":
    TorchExecutor.launch = launch  # type: ignore[method-assign]  # in this process, and those that it forks
    sys.exit(main(sys.argv[1:]))
