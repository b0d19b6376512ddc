"""Processes that do not outlive the one that started them."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

Result = TypeVar("Result")
_PR_SET_PDEATHSIG: Final = 1  # Linux's <sys/prctl.h>


def die_with_parent() -> None:
    """Have the system kill this process when its parent has died: a stopped process, or
    one in a call that does not return, would not notice that. To Linux, the parent is the
    thread that started it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def in_lasting_thread(start: Callable[[], Result], over: threading.Event) -> Result:
    """Start processes that die with their parent in a thread that runs until `over` is
    set, as this thread may end before. Raises what `start` raises.
    """
    started: Future[Result] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
            return
        over.wait()

    threading.Thread(target=run, name="minfer-parent", daemon=True).start()
    return started.result()
