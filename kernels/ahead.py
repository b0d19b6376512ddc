"""Kernels compiled before they are needed, side by side, and kept on disk.

Theory. Triton compiles a kernel when it is first launched: 0.1 to 1 s, while everybody
waits. What launches will need is known before (specialization.py), so all of it is
compiled at once, a thread for each processor: Triton's compiler and NVIDIA's assembler
run beside Python, and so does the C compiler, where Triton's version builds with it what
launches each kernel. What was compiled lies in Triton's cache (`TRITON_CACHE_DIR`, else
~/.triton/cache), and is found there by the next process, on this machine or another.

A cached kernel's key is a digest of the kernel's source (and its line in the file), of
the specialization, of Triton's own files, the version of its assembler, the GPU's compute
capability, and of those environment variables that change what Triton makes. So another
version of Triton or of minfer's kernels, another kind of GPU, another model or other
sizes of the engine find nothing of what they do not share, and compile that. A GPU need
not be there: nothing of it enters the key but its compute capability.

A key's folder lists its files by their full names, so a cache that was moved would be
taken for an empty one: `settle` corrects the lists.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton import AsyncCompileMode, FutureKernel, knobs

from minfer.kernels.specialization import Specialization, elsewhere, one_at_a_time
from minfer.kernels.target import Capability, aim

Told = Callable[[int, int], None]  # how many are done, of how many


class Made(NamedTuple):
    """What came of it."""

    wanted: int
    compiled: int  # the others were on disk
    seconds: float
    failed: tuple[str, ...]  # names of kernels, and why
    kernels: tuple[Any, ...] = ()  # Triton's own


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    return Path(knobs.cache.dir)


def make(
    wanted: Sequence[Specialization],
    *,
    target: Capability | None = None,
    told: Told = lambda _done, _of: None,
) -> Made:
    """Compile what is not on disk yet, side by side.

    For the GPU that is there, to which all of it is loaded then; or, with a `target`, for
    one that need not be. What cannot be compiled or loaded is left to its first launch,
    which will say so. Raises OSError if the cache cannot be written.
    """
    began, fresh = time.monotonic(), list[str]()
    here = target is None
    if here:
        wanted = [one for one in wanted if not _in_memory(one)]
    settle(cache_folder())
    listening = knobs.compilation.listener

    def listen(**said: Any) -> None:
        if not said["cache_hit"]:
            fresh.append(said["src"].name)
        if listening is not None:
            listening(**said)

    begin: tuple[Any, ...] = (aim, (target,))
    if here:
        begin = (torch.cuda.set_device, (torch.cuda.current_device(),))
    count = _Count(len(wanted), told)
    with (
        one_at_a_time,
        elsewhere(target) if target is not None else nullcontext(),
        patch.object(knobs.compilation, "listener", listen),
        _Counting(count, *begin) as pool,
    ):
        made = _compiled(wanted, pool)
        if here:
            made = list(pool.map(_loaded, wanted, made))
    failed = [one for one in made if isinstance(one, str)]
    kernels = [one for one in made if not isinstance(one, str)]
    seconds = time.monotonic() - began
    return Made(len(wanted), len(fresh), seconds, tuple(failed), tuple(kernels))


def _compiled(wanted: Sequence[Specialization], pool: ThreadPoolExecutor) -> list[Any]:
    """Triton's kernels, or why there are none, in order."""
    made = list[Any]()
    with AsyncCompileMode(pool, ignore_errors=True):
        for one in wanted:
            try:
                made.append(kernel_of(one).preload(one.data))
            except Exception as error:  # of whatever kind: the others are compiled
                made.append(_said(one, error))
                continue
            if isinstance(made[-1], FutureKernel):
                made[-1] = made[-1].future  # which Triton forgets if it fails
    return [_finished(*each) for each in zip(wanted, made, strict=True)]


def _finished(one: Specialization, made: Any) -> Any:
    if not isinstance(made, Future):
        return made
    error = made.exception()
    return made.result() if error is None else _said(one, error)


def _loaded(one: Specialization, made: Any) -> Any:
    try:
        _ = made if isinstance(made, str) else made.run  # which loads it
    except Exception as error:
        return _said(one, error)
    return made


def _said(one: Specialization, error: BaseException) -> str:
    while error.__cause__ is not None:  # the compiler's own errors say where, not what
        error = error.__cause__
    return f"{one.kernel}: {error!r}"


def kernel_of(one: Specialization) -> Any:
    """The kernel itself."""
    module, _, name = one.kernel.rpartition(".")
    return getattr(import_module(module), name)


def _in_memory(one: Specialization) -> bool:
    kernels, *_ = kernel_of(one).device_caches[torch.cuda.current_device()]
    return one.key in kernels


def settle(folder: Path) -> int:
    """Let the lists of a cache that was moved name its files where they are now; returns
    how many were corrected.
    """
    corrected = 0
    for listing in folder.glob("*/__grp__*.json"):
        with suppress(OSError, ValueError, KeyError, AttributeError):
            files = json.loads(listing.read_text("utf-8"))["child_paths"]
            here = {name: str(listing.parent / name) for name in files}
            moved = not all(map(os.path.exists, files.values()))
            if moved and all(map(os.path.exists, here.values())):
                fresh = listing.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
                fresh.write_text(json.dumps({"child_paths": here}), "utf-8")
                fresh.replace(listing)
                corrected += 1
    return corrected


class _Count:
    """Tells how far it is, one at a time."""

    def __init__(self, of: int, told: Told) -> None:
        self.done = 0
        self.of = of
        self.told = told
        self.lock = threading.Lock()

    def one(self, _: Future[Any]) -> None:
        with self.lock:
            if self.done < self.of:  # else they are being loaded
                self.done += 1
                self.told(self.done, self.of)


class _Counting(ThreadPoolExecutor):
    """Threads that count what they have compiled."""

    def __init__(self, count: _Count, *begin: Any) -> None:
        super().__init__(os.cpu_count(), "compile", *begin)
        self.count = count

    def submit(self, *of: Any, **how: Any) -> Future[Any]:
        """As `ThreadPoolExecutor` does."""
        future = super().submit(*of, **how)
        future.add_done_callback(self.count.one)
        return future
