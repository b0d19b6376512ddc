"""Kernels compiled before they are needed, side by side: one by one they are half of a
cold start.

A step is made with its launches left out, which tells what it needs: 7 s become 2 s (H200
and 16 processors, Qwen2.5 7B, 2026-11-22). Triton compiles beside Python; so does the C
compiler, which builds what launches each kernel.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

_one_at_a_time = threading.Lock()


@contextmanager
def compiled() -> Iterator[None]:
    """What this thread launches in here is compiled and loaded instead, by the end of it.

    Other threads' launches go on. A kernel that cannot be compiled is left to its first
    launch, which will say so. Raises what Triton does where one cannot be loaded.
    """
    run, mine, made = JITFunction.run, threading.get_ident(), list[Any]()

    def compile_or_run(kernel: Any, *of: Any, warmup: bool, **how: Any) -> Any:
        ours = threading.get_ident() == mine
        found = run(kernel, *of, warmup=warmup or ours, **how)
        made.extend([found] * ours)
        return found

    begin = torch.cuda.set_device, (torch.cuda.current_device(),)
    with _one_at_a_time, ThreadPoolExecutor(None, "compile", *begin) as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)
        with patch.object(JITFunction, "run", compile_or_run), mode:
            yield
        kernels = {
            one.result(True) if isinstance(one, FutureKernel) else one for one in made
        }
        list(pool.map(lambda one: one and one.run, kernels))  # which loads it
