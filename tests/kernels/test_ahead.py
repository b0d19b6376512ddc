"""What is compiled ahead, with stand-ins for Triton's compiler; test_gpu.py has the real
one.
"""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attrs import define, field
from triton import FutureKernel
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from minfer.kernels.ahead import compiled


@define(eq=False)
class Compiler:
    """Instead of `JITFunction.run`: what was asked of it, and by whom."""

    launched: list[str] = field(factory=list)
    asked: list[str] = field(factory=list)
    loaded: list[str] = field(factory=list)
    devices: list[int] = field(factory=list)

    def run(self, kernel: str, *, grid: tuple[int, ...], warmup: bool) -> "Kernel":
        assert grid == (1,)
        (self.asked if warmup else self.launched).append(kernel)
        return Kernel(kernel, self)


@define(eq=False)
class Kernel:
    name: str
    compiler: Compiler

    @property
    def run(self) -> None:
        self.compiler.loaded.append(self.name)
        if self.name == "broken":
            raise RuntimeError("there is no C compiler")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(JITFunction, "run", made.run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", made.devices.append)
    return made


def launch(kernel: str) -> Any:
    run: Any = JITFunction.run
    return run(kernel, grid=(1,), warmup=False)


def test_this_thread_compiles_and_the_others_go_on(compiler: Compiler) -> None:
    with compiled(), ThreadPoolExecutor(1) as other:
        launch("a")
        other.submit(launch, "somebody's").result()
        launch("b")
    assert compiler.asked == ["a", "b"]
    assert compiler.launched == ["somebody's"]
    assert sorted(compiler.loaded) == ["a", "b"]
    assert set(compiler.devices) == {3}  # each thread has a device of its own
    launch("c")
    assert compiler.launched == ["somebody's", "c"]


def test_a_kernel_still_on_its_way_is_waited_for(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    future: Any = FutureKernel.__new__(FutureKernel)
    future.kernel = Kernel("late", compiler)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: future)
    with compiled():
        launch("late")
        launch("late")
    assert compiler.loaded == ["late"]


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_launch(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compiler.run

    def run_or_queue(kernel: str, *, grid: tuple[int, ...], warmup: bool) -> Any:
        made, mode = run(kernel, grid=grid, warmup=warmup), active_mode.get()
        if kernel == "sound" or mode is None:
            return made
        hooks = (
            len(inspect.signature(mode.submit).parameters) - 2
        )  # which versions have more of
        return mode.submit(kernel, lambda: 1 / 0, *[lambda *_: None] * hooks)

    monkeypatch.setattr(JITFunction, "run", run_or_queue)
    with compiled():
        launch("faulty")
        launch("sound")
    assert compiler.loaded == ["sound"]
    assert active_mode.get() is None  # or whatever this thread launches would be queued
    launch("faulty")
    assert compiler.launched == ["faulty"]


@pytest.mark.parametrize("kernel", ["broken", "never asked for"])
def test_an_error_leaves_no_traces(compiler: Compiler, kernel: str) -> None:
    def work() -> None:
        with compiled():
            launch(kernel)
            if kernel != "broken":
                raise RuntimeError("there is no such tensor")

    with pytest.raises(RuntimeError, match="there is no"):
        work()
    launch("next")
    assert compiler.launched == ["next"]


def test_two_at_once_take_turns(compiler: Compiler) -> None:
    inside, most = 0, 0
    both = threading.Barrier(2)

    def work(name: str) -> None:
        nonlocal inside, most
        both.wait(10)
        with compiled():
            inside += 1
            most = max(most, inside)
            launch(name)
            inside -= 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, "ab"))
    assert most == 1
    assert sorted(compiler.asked) == ["a", "b"]
    launch("next")
    assert compiler.launched == ["next"]
