"""Compiles kernels before they are launched, in parallel.

Theory. Triton compiles a kernel when it is first launched, in 0.1 to 1 s, once for each
combination of its arguments' types, constants and divisibility. The launching code
decides which combinations there are; so within `compile_launches`, launches compile the
kernel and do not run it. There is a compiling thread for each processor: Triton's
compiler and NVIDIA's assembler release the interpreter lock. Results are in Triton's
cache (`TRITON_CACHE_DIR`, else ~/.triton/cache), where the next process finds them.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from attrs import frozen
from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_WATCHED: Final = 1000  # compilations that were not read yet
_patch_lock: Final = threading.Lock()  # guards the patching of Triton's launch


class CompileResult(NamedTuple):
    """The results of compiling."""

    requested: int
    compiled: int  # the others were in the cache on disk
    seconds: float
    failed: tuple[str, ...]  # the reasons of failures


@frozen
class Compilation:
    """A kernel that Triton compiled, as it was not in the cache on disk."""

    kernel: str
    seconds: float
    thread: int  # the identifier of the thread that needed it


class Compilations(deque[Compilation]):
    """The compilations of this process since `watch_compilations` returned the queue, the
    last `MAX_WATCHED` of them.
    """

    # By identity, for a set of queues; `deque` has none.
    __hash__ = object.__hash__  # type: ignore[assignment]


_watched: Final = weakref.WeakSet[Compilations]()


def watch_compilations() -> Compilations:
    """Returns a queue to which each compilation from now on is added."""
    compilations = Compilations(maxlen=MAX_WATCHED)
    with _patch_lock:
        if not _watched and not isinstance(knobs.compilation.listener, _Listener):
            knobs.compilation.listener = _Listener(knobs.compilation.listener)
        _watched.add(compilations)
    return compilations


@frozen
class _Listener:
    """What Triton calls after each compilation: adds it to the watched queues."""

    earlier: Callable[..., None] | None  # the listener before, which is called too

    def __call__(self, **event: Any) -> None:
        if not event["cache_hit"]:
            seconds = event["times"].total / 1e6
            ended = Compilation(event["src"].name, seconds, threading.get_ident())
            for compilations in [*_watched]:
                compilations.append(ended)
        if self.earlier is not None:
            self.earlier(**event)


def compile_launches(
    launch: Callable[[], None], report: Callable[[int], None]
) -> CompileResult:
    """Compile and load the kernels that `launch` launches on the current device. They do
    not run, and their outputs are zero. `report` is called with the number of kernels
    that are compiled. A kernel that cannot be compiled fails at its first launch.
    """
    with _patch_lock:
        return _compile(launch, report)


def _compile(launch: Callable[[], None], report: Callable[[int], None]) -> CompileResult:
    began, newly_compiled, run = time.monotonic(), list[str](), JITFunction.run
    handles, own_thread = dict[int, Any](), threading.get_ident()

    def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != own_thread:  # a step of another engine, which runs
            return run(kernel, *args, warmup=warmup, **kwargs)
        handle = run(kernel, *args, warmup=True, **kwargs)
        handles[id(handle)] = handle
        return handle

    listening = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if not event["cache_hit"]:
            newly_compiled.append(event["src"].name)
        if listening is not None:
            listening(**event)

    pool = _CountingExecutor(report)
    with (
        pool,
        patch.object(knobs.compilation, "listener", listen),
        AsyncCompileMode(pool, ignore_errors=True),
        patch.object(JITFunction, "run", compile_only),
        # The output of a kernel may be used as an index by torch.
        patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        patch.object(torch, "empty", torch.zeros),
        patch.object(torch, "empty_like", torch.zeros_like),
    ):
        launch()
    errors = [
        _error_text(error) for future in pool.futures if (error := future.exception())
    ]
    active = driver.active
    device_setup = active.set_current_device, (active.get_current_device(),)
    with ThreadPoolExecutor(os.cpu_count(), "load", *device_setup) as loading:
        errors += filter(None, loading.map(_load, handles.values()))
    seconds = time.monotonic() - began
    return CompileResult(
        len(handles), len(newly_compiled), seconds, tuple(dict.fromkeys(errors))
    )


def _load(handle: Any) -> str:
    """Load a kernel; returns the reason if that fails. For each signature, Triton has the
    C compiler build the launcher, unless it is on disk.
    """
    # None: it could not be compiled.
    kernel = handle.kernel if isinstance(handle, FutureKernel) else handle
    try:
        _ = None if kernel is None else kernel.run
    except Exception as error:  # any error: its first launch raises it again
        return _error_text(error)
    return ""


def _error_text(error: BaseException) -> str:
    # the compiler's own errors have the place, not the reason
    while error.__cause__ is not None:
        error = error.__cause__
    return repr(error)


class _CountingExecutor(ThreadPoolExecutor):
    """Threads that report how many kernels they have compiled."""

    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__(os.cpu_count(), "compile")
        self.report = report
        self.futures = list[Future[Any]]()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit as `ThreadPoolExecutor` does, and count."""
        future = super().submit(*args, **kwargs)
        self.futures.append(future)
        future.add_done_callback(self._count)
        return future

    def _count(self, _: Future[Any]) -> None:
        self.report(sum(future.done() for future in self.futures))
