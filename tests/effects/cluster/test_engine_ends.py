"""How engines ended; in memory that processes share."""

import os
import signal
from pathlib import Path

import pytest

from minfer.effects.cluster.engine_server.engine_process import BROKEN
from minfer.effects.cluster.link.crash_rule import EndKind, EngineEnd
from minfer.effects.cluster.processes import engine_ends
from minfer.effects.cluster.processes.engine_ends import EngineEnds
from minfer.effects.cluster.processes.oom_kills import oom_kills


@pytest.mark.parametrize("hung", [False, True])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (BROKEN, EndKind.CRASHED),
        (1, EndKind.CRASHED),
        (-signal.SIGSEGV, EndKind.CRASHED),
        (-signal.SIGABRT, EndKind.CRASHED),
        (0, EndKind.KILLED),
        (-signal.SIGKILL, EndKind.KILLED),
        (-signal.SIGTERM, EndKind.KILLED),
    ],
)
def test_a_crash_is_an_engines_own_fault(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: EndKind, *, hung: bool
) -> None:
    monkeypatch.setattr(engine_ends, "oom_kills", lambda: 7)
    ends = EngineEnds(2)
    assert ends.last(1) == EngineEnd(EndKind.UNKNOWN, 0)
    child = os.fork()
    if not child:
        ends.note(1, code, hung=hung)
        os._exit(0)
    os.waitpid(child, 0)
    if hung and kind is EndKind.KILLED:
        kind = EndKind.HUNG
    assert (ends.last(0), ends.last(1)) == (EngineEnd(), EngineEnd(kind, 1))
    ends.note(1, 0)
    assert ends.last(1) == EngineEnd(EndKind.KILLED, 2)


def test_a_kill_is_the_kernels_if_its_count_has_risen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter([7, 8, 8, 9, None, 9, 9])
    monkeypatch.setattr(engine_ends, "oom_kills", lambda: next(counts))
    ends = EngineEnds(1)
    kinds = []
    for code in (-9, -9, 1, -9, -9, -9):
        ends.note(0, code)
        kinds.append(ends.last(0).kind)
    assert kinds == [
        EndKind.OUT_OF_MEMORY,
        EndKind.KILLED,
        EndKind.CRASHED,
        EndKind.UNKNOWN,  # the system does not say
        EndKind.UNKNOWN,
        EndKind.KILLED,
    ]


def test_the_count_is_that_of_the_control_group_or_of_the_machine(
    tmp_path: Path,
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / "own/part").mkdir(parents=True)

    def count() -> int | None:
        return oom_kills(proc, groups)

    assert count() is None
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    assert count() == 3
    (groups / "memory.events").write_text("oom 9\noom_kill 4\noom_group_kill 0\n")
    assert count() == 4
    (proc / "self/cgroup").write_text("1:memory:/old\n0::/own/part\n")
    assert count() == 4
    (groups / "own/part/memory.events").write_text("oom 9\noom_kill 6\n")
    assert count() == 6
    (groups / "own/part/memory.events").write_text("oom_kill many\n")
    assert count() == 4


def test_this_machine_says_how_many_it_has_killed() -> None:
    count = oom_kills()
    assert count is not None
    assert count >= 0
