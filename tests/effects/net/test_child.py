"""Child processes of both kinds: they are watched, and end with their parent."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minfer.effects.net import child
from minfer.effects.net.child import Child, spawn_child

ROOT = Path(__file__).parents[3]
MODULE = "tests.effects.net.spawned"
PATIENCE = 20.0  # seconds for what takes some tenths


def alive(process: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until_ended(process: int) -> None:
    end = time.monotonic() + PATIENCE
    while alive(process):
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def spawned(given: bytes = b"", limit: float = 0.0) -> Iterator[tuple[Child, bytes]]:
    """A child that runs, and what it said."""
    ours, its = os.pipe()
    made = spawn_child(MODULE, str(its), stdin_data=given, descriptors=[its], limit=limit)
    os.close(its)
    try:
        yield made, os.read(ours, 100)
    finally:
        made.kill()
        os.close(ours)


def test_a_spawned_child_gets_its_input_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINFER_CACHE_SECRET", "secret")
    with spawned(given=b"input") as (_, said):
        assert said == b"input|"


def test_its_exit_code_is_known_and_it_leaves_no_zombie() -> None:
    with spawned() as (made, _):
        assert made.poll() is None
        assert made.wait(0.05) is None, "it runs"
        made.signal(signal.SIGTERM)
        assert made.wait() == -signal.SIGTERM
        assert not Path(f"/proc/{made.pid}").exists()
        made.signal(signal.SIGTERM)  # there is no such process


def test_a_heartbeat_of_a_spawned_child_is_seen() -> None:
    def looks(start: float) -> Iterator[bool]:
        for number in range(10):
            time.sleep(0.05)
            yield made.hangs(start + number, ready=True)

    with spawned(limit=5.0) as (made, _):
        assert not any(looks(100.0))
        made.kill()
        made.wait()
        assert [*looks(200.0)].count(True) == 1


def test_a_program_that_cannot_be_started_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        spawn_child(MODULE)


def test_a_child_outlives_the_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(spawn_child, MODULE, "2", descriptors=[2]).result()
    assert made.wait(0.5) is None
    made.kill()


# Each writes to one pipe, as its child does: at once, so that nothing comes between.
PARENTS = {
    "spawned": f"""
import os
from minfer.effects.net.child import spawn_child
made = spawn_child("{MODULE}", "1", descriptors=[1])
os.write(1, b"%d\\n" % made.pid)
made.wait()
""",
    "forked": """
import os, time
from minfer.effects.net.child import fork_child
def run(beat):
    os.write(1, b"input|")
    time.sleep(60)
os.write(1, b"%d\\n" % fork_child(run, "test", 0.0).pid)
time.sleep(60)
""",
    "forked, where the system does not end it": """
import os, time
from minfer.effects.net import child
child._PR_SET_PDEATHSIG = -1  # no such operation
def run(beat):
    os.write(1, b"input|")
    time.sleep(60)
os.write(1, b"%d\\n" % child.fork_child(run, "test", 0.0).pid)
time.sleep(60)
""",
}


@pytest.mark.parametrize(
    ("kind", "stopped"),
    [(kind, kind != "forked, where the system does not end it") for kind in PARENTS],
)
def test_a_child_ends_with_its_parent(kind: str, stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENTS[kind]],
        stdout=subprocess.PIPE,
        text=True,
        # A command's own folder is not among those that its children import from.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        said = ""
        while not (found := re.search(r"\d+\n", said)) or "|" not in said:
            part = os.read(parent.stdout.fileno(), 100).decode()
            assert part, "the parent has ended"
            said += part
        process = int(found[0])
        if stopped:  # it cannot look whether its parent is there
            os.kill(process, signal.SIGSTOP)
        parent.kill()
        until_ended(process)


def test_a_child_whose_parent_has_ended_before_it_looks_ends() -> None:
    code = "from minfer.effects.net.child import begin_as_child; begin_as_child()"
    gone = {**os.environ, child.PARENT_VARIABLE: "1 -1"}  # not this process's id
    done = subprocess.run([sys.executable, "-c", code], env=gone, check=False)
    assert done.returncode == 1
