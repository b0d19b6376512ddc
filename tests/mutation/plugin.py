"""pytest's part in a mutant's run: changes the module, bounds the time, and notes what
happened.

Loaded with `-p`, before anything of the core is imported. A test that takes more than
`TEST_CPU` seconds of CPU is endless: no sound test takes a quarter of that on a slow
processor whose other thread is busy. A run that takes more than `RUN_CPU` in all ends
there, and has found nothing. Notes are lines of JSON in the file `NOTES` names, so that a
run which had to be killed tells how far it came.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

import hypothesis
import pytest

from tests.mutation import catalogue
from tests.mutation.loader import install

# variables of the environment: a mutant's key, or nothing
MUTANT: Final = "MINFER_MUTANT"
NOTES: Final = "MINFER_MUTANT_NOTES"  # a path
TEST_CPU: Final = 20  # seconds
RUN_CPU: Final = 120
MEMORY: Final = 4 * 2**30  # bytes of address space; mutants may build lists without end
ENDLESS: Final = 77  # exit statuses beside pytest's own
UNFINISHED: Final = 78


def note(**fields: object) -> None:
    """Write down what happens, and after how many seconds of CPU."""
    with open(os.environ[NOTES], "a") as file:
        file.write(json.dumps({**fields, "cpu": round(time.process_time(), 3)}) + "\n")


def _stop(number: int, frame: FrameType | None) -> None:
    """Out of time. Not by an exception: what is tested might catch it."""
    del frame
    os._exit(ENDLESS if number == signal.SIGPROF else UNFINISHED)


def _bound() -> None:
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGXCPU, _stop)
    # Code that never comes back to the interpreter hears no signal: it is killed a little
    # later.
    resource.setrlimit(resource.RLIMIT_CPU, (RUN_CPU, RUN_CPU + 3))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _plant(key: str) -> None:
    """Import every deciding file from its tree, one of them changed: a sound run takes
    that way.
    """
    changes = {}
    for file in catalogue.files():
        name = "minfer." + file.removesuffix(".py").replace("/", ".")
        changes[name] = lambda tree: tree
        if key and catalogue.named(key).file == file:
            changes[name] = lambda _: catalogue.tree(catalogue.named(key))
    install(changes)


if NOTES in os.environ:
    _bound()
    _plant(os.environ[MUTANT])


def pytest_configure() -> None:
    """One counterexample is enough, and need not be short."""
    hypothesis.settings.register_profile(
        "mutants",
        parent=hypothesis.settings.get_profile("suite"),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        report_multiple_bugs=False,
        max_examples=40,
    )
    hypothesis.settings.load_profile("mutants")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Each test has its own time."""
    note(test=item.nodeid)
    signal.setitimer(signal.ITIMER_PROF, TEST_CPU)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say which test failed."""
    if report.failed:
        note(failed=report.nodeid)
