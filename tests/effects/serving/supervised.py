"""A server of processes that load nothing: `python -m tests.effects.serving.supervised`.

Each line of its output is what a process did: its name, its process id, and a word.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from minfer.effects.cluster.processes import supervisor
from minfer.effects.cluster.processes.process_ends import (
    ENGINE,
    Processes,
    api_server_name,
)
from minfer.effects.cluster.processes.supervisor import Supervisor
from minfer.effects.net.child import DRAIN, STOP

PR_SET_CHILD_SUBREAPER = 36
NAMES = (ENGINE, api_server_name(0), api_server_name(1))


def say(name: str, word: str) -> None:
    os.write(1, f"{name.replace(' ', '-')} {os.getpid()} {word}\n".encode())


def be(
    name: str,
    options: argparse.Namespace,
    beat: Callable[[], None],
    ready: Callable[[], None],
) -> int:
    """Be a process of the server: say what happens, and end when told to."""
    reported: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    for number in (DRAIN, STOP):
        signal.signal(number, lambda number, _: reported.append(number))
    say(name, "started")
    if name == options.orphaning and not os.fork():  # its child outlives it
        time.sleep(0.3)
        os._exit(0)
    if name == options.failing:
        return 7
    ready()
    while True:
        time.sleep(0.01)
        beat()
        if reported and name != options.deaf:
            time.sleep(options.work if reported == [DRAIN] else 0)
            if len(reported) > 1 or reported != [DRAIN] or name != options.endless:
                say(name, "stopped" if STOP in reported else "drained")
                return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--orphaning", "--failing", "--deaf", "--endless"):
        parser.add_argument(name, default="")
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--last-moments", type=float, default=10.0)
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    supervisor.END_SECONDS = options.last_moments  # type: ignore[misc]  # sooner
    supervisor._CHECK_SECONDS = 0.05  # type: ignore[misc]  # likewise
    if options.orphaning:  # what it leaves behind comes to us, as to a container's first
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    runs = {name: partial(be, name, options) for name in NAMES}
    tested = Supervisor(
        Processes(2), runs, lambda run: run(), options.patience, options.limit
    )
    before = descriptors() - len((tested._reports, tested._reports_end))
    code = tested.run(lambda: say("server", "ready"))
    assert descriptors() == before, "a descriptor is left"
    return code


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    sys.exit(main())
