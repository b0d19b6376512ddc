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
from tests.effects.waiting import alive, until

ROOT = Path(__file__).parents[3]
MODULE = "tests.effects.net.spawned"


@contextlib.contextmanager
def spawned(stdin_data: bytes = b"", limit: float = 0.0) -> Iterator[tuple[Child, bytes]]:
    """A child that runs, and what it said."""
    read_end, write_end = os.pipe()
    child_process = spawn_child(
        MODULE,
        str(write_end),
        stdin_data=stdin_data,
        descriptors=[write_end],
        limit=limit,
    )
    os.close(write_end)
    try:
        yield child_process, os.read(read_end, 100)
    finally:
        child_process.kill()
        os.close(read_end)


def test_a_spawned_child_gets_its_input_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINFER_CACHE_SECRET", "secret")
    with spawned(stdin_data=b"input") as (_, output):
        assert output == b"input|"


def test_its_exit_code_is_known_and_it_leaves_no_zombie() -> None:
    with spawned() as (child_process, _):
        assert child_process.poll() is None
        assert child_process.wait(0.05) is None, "it runs"
        child_process.signal(signal.SIGTERM)
        assert child_process.wait() == -signal.SIGTERM
        assert not Path(f"/proc/{child_process.pid}").exists()
        child_process.signal(signal.SIGTERM)  # there is no such process


def test_a_heartbeat_of_a_spawned_child_is_seen() -> None:
    def looks(start: float) -> Iterator[bool]:
        for number in range(10):
            time.sleep(0.05)
            yield child_process.hangs(start + number, ready=True)

    with spawned(limit=5.0) as (child_process, _):
        assert not any(looks(100.0))
        child_process.kill()
        child_process.wait()
        assert [*looks(200.0)].count(True) == 1


def test_a_program_that_cannot_be_started_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        spawn_child(MODULE)


def test_a_child_outlives_the_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        child_process = pool.submit(spawn_child, MODULE, "2", descriptors=[2]).result()
    assert child_process.wait(0.5) is None
    child_process.kill()


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
        output = ""
        while not (match := re.search(r"\d+\n", output)) or "|" not in output:
            data = os.read(parent.stdout.fileno(), 100).decode()
            assert data, "the parent has ended"
            output += data
        process = int(match[0])
        if stopped:  # it cannot look whether its parent is there
            os.kill(process, signal.SIGSTOP)
        parent.kill()
        until(lambda: not alive(process))


def test_a_child_whose_parent_has_ended_before_it_looks_ends() -> None:
    code = "from minfer.effects.net.child import begin_as_child; begin_as_child()"
    env = {**os.environ, child.PARENT_VARIABLE: "1 -1"}  # not this process's id
    result = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert result.returncode == 1
