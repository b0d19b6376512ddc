"""Settings for the whole suite, and which of its circles runs: see circles.py."""

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

import tests.circles  # noqa: F401  # registers the profiles

GPU = os.path.exists("/dev/nvidiactl")
WORKERS = 8  # of `-n auto`, at most: each has to load torch
# Small models on shared machines: threads that wait for each other cost more than they
# bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is imported, which transformers does, whether to interpret its
# kernels.
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell's background jobs ignore Ctrl-C, and so would all that tests start and then
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test")
    parser.addoption("--rest", action="store_true", help="run the long tests instead")


def pytest_configure(config: pytest.Config) -> None:
    for circle in ("rest", "all"):
        if config.getoption(f"--{circle}"):
            hypothesis.settings.load_profile(circle)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests and the modules that they import stay until the end, over a million objects:
    the collector need not go through them, neither as they come nor later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what the circle does not have, unless it is asked for one by one."""
    if config.getoption("--rest"):
        selected = [item for item in items if _has(item, "long") or _takes_examples(item)]
    elif config.getoption("--all") or any("::" in arg for arg in config.args):
        return
    else:
        selected = [item for item in items if not _has(item, "long")]
    selected = [item for item in selected if not _has(item, "claimed")]
    selected_ids = {*map(id, selected)}
    config.hook.pytest_deselected(
        items=[item for item in items if id(item) not in selected_ids]
    )
    items[:] = selected


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def _takes_examples(item: pytest.Item) -> bool:
    """Whether it is one of Hypothesis, which has more examples in the widest circle."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """With a GPU, none: tests there take the memory that they find, and measure time.

    Each worker begins with a part of the suite, and they take from each other's ends:
    servers that tests share are seldom started by more than one.
    """
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = len(allowed(0)) if allowed else os.cpu_count() or 1
    if config.option.dist == "no":
        config.option.dist = "worksteal"
    return 0 if GPU else min(processors, WORKERS)
