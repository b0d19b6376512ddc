"""Which ends of engines are crashes; in memory that processes share."""

import os
import signal

import pytest

from minfer.effects.cluster.engine_server.engine_process import BROKEN
from minfer.effects.cluster.processes.engine_ends import EngineEnds


@pytest.mark.parametrize(
    ("code", "crashed"),
    [
        (0, False),
        (BROKEN, True),
        (1, True),
        (-signal.SIGSEGV, True),
        (-signal.SIGABRT, True),
        (-signal.SIGKILL, False),
        (-signal.SIGTERM, False),
    ],
)
def test_a_crash_is_an_engines_own_fault(code: int, *, crashed: bool) -> None:
    ends = EngineEnds(2)
    child = os.fork()
    if not child:
        ends.note(1, code)
        os._exit(0)
    os.waitpid(child, 0)
    assert (ends.crashed(0), ends.crashed(1)) == (False, crashed)
    ends.note(1, 0)
    assert not ends.crashed(1)
