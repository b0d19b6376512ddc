"""A process of its own for a policy under test, with limits.

A policy is code of others: it may never end, allocate without bound or print. The process
is a fork, so that a policy need not be importable. It has a limit of memory, what it
prints is counted, and the process that waits ends it if a call does not return.
"""

import io
import os
import pickle
import resource
import sys
import warnings
from collections.abc import Callable
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic
from typing import Final

from attrs import define, field

from minfer.policies.mistakes import PolicyWarning
from minfer.testing.call_limits import (
    CheckTooLongError,
    RunningCall,
    limits,
    running_call,
)

MEMORY_BYTES: Final = 2**30  # that a policy may need, beside what there was
MAX_CALL_SECONDS: Final = 60.0  # after which the process of a call is ended
# A check is ended after this many times its limit of CPU time: a policy may sleep.
_WAITS: Final = 20
_POLL_SECONDS: Final = 0.2
_MAX_PRINTED: Final = 300  # characters kept of what is printed

# Makes the error of a broken law from its name, how it was broken, and the method.
MakeError = Callable[[str, str, str], AssertionError]


class Prints(io.TextIOBase):
    """Counts what is printed, and keeps the beginning."""

    def __init__(self) -> None:
        self.count, self.first, self.method = 0, "", ""

    def write(self, text: str) -> int:
        """Count a text; note which method runs when the first is printed."""
        if limits.board is not None and not self.count:
            self.method = running_call(limits.board).name
        self.count += len(text)
        self.first += text[: max(0, _MAX_PRINTED - len(self.first))]
        return len(text)

    def __str__(self) -> str:
        more = (
            f"... ({self.count:,} characters in all)" if self.count > _MAX_PRINTED else ""
        )
        return f"{self.first.strip()!r}{more}"


@define
class _Outcome:
    """How a check in another process ended: the error that it raised, if any, as far as
    that can be pickled, and the kit's warnings.
    """

    error: bytes = b""  # empty if it cannot be pickled: then it is made again
    cause: bytes = b""
    broken: tuple[str, str, str] | None = None  # law, detail and method of a broken law
    text: str = ""
    notes: list[str] = field(factory=list)
    warnings: list[str] = field(factory=list)

    def raised(self, make_error: MakeError) -> BaseException | None:
        """The error that the check raised; None if it raised none."""
        if self.error:
            error: BaseException = pickle.loads(self.error)  # noqa: S301  # of our own fork
        elif self.broken is not None:
            error = make_error(*self.broken)
            error.args = (self.text,)
        elif self.text:
            error = RuntimeError(self.text)
        else:
            return None
        if self.cause:
            error.__cause__ = pickle.loads(self.cause)  # noqa: S301  # likewise
        for note in self.notes:
            error.add_note(note)
        return error


def run_bounded(check: Callable[[], None], make_error: MakeError, seconds: float) -> None:
    """Run `check` in a process of its own, and raise what it raises.

    A call that cannot be interrupted, a process that dies, and a check that takes more
    than `seconds` of CPU time are reported as broken laws: by what `make_error` returns.
    """
    context, board = get_context("fork"), mmap(-1, 4096)
    receiver, sender = context.Pipe(duplex=False)
    arguments = check, make_error, board, sender, seconds
    process = context.Process(target=_run, args=arguments)
    with warnings.catch_warnings():
        # Of a fork beside threads that may hold locks: the child runs only Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        outcome = _wait(receiver, board, make_error, seconds)
    except EOFError:
        process.join()
        name, code = running_call(board).name, process.exitcode
        detail = (
            f"the policy's process ended in {name or 'its first call'}: exit code {code}"
        )
        raise make_error("never raises", detail, name) from None
    finally:
        process.kill()
        process.join()
        board.close()
    for text in outcome.warnings:
        warnings.warn(text, PolicyWarning, stacklevel=3)
    error = outcome.raised(make_error)
    if error is not None:
        raise error from error.__cause__


def _wait(
    receiver: Connection, board: mmap, make_error: MakeError, seconds: float
) -> _Outcome:
    """Wait for the outcome. Raises EOFError if there will be none."""
    began = since = monotonic()
    last = running_call(board)
    while not receiver.poll(_POLL_SECONDS):
        now, call = monotonic(), running_call(board)
        if call != last or not call.running:
            last, since = call, now
        if now - since > MAX_CALL_SECONDS:
            raise make_error("never ends", _unreturned(call), call.name)
        if now - began > _WAITS * seconds:
            raise make_error("never ends", *_too_long(board, seconds))
    outcome: _Outcome = receiver.recv()
    return outcome


def _too_long(board: mmap, seconds: float) -> tuple[str, str]:
    """How a check took too long, and the method that was called last."""
    call = running_call(board)
    detail = (
        f"the check took more than {seconds:g} s of CPU time: {call.number:,} calls "
        f"so far, the last of {call.name}; `seconds` allows more"
    )
    return detail, call.name


def _unreturned(call: RunningCall) -> str:
    return (
        f"{call.name} did not return within {MAX_CALL_SECONDS:g} s, and could not be "
        "interrupted"
    )


def _run(
    check: Callable[[], None],
    make_error: MakeError,
    board: mmap,
    sender: Connection,
    seconds: float,
) -> None:
    """Run a check in this process, and send its outcome."""
    prints, nowhere = Prints(), os.open(os.devnull, os.O_WRONLY)
    sys.stdout = sys.stderr = prints
    os.dup2(nowhere, 1)  # what is printed from C, and by the programs that it starts
    os.dup2(nowhere, 2)
    limits.begin(board, seconds)
    _limit_memory(MEMORY_BYTES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = _error_of(check, make_error, board, seconds)
    if error is None and prints.count:
        detail = f"{prints.method} printed {prints}: a policy touches nothing"
        error = make_error("prints", detail, prints.method)
    outcome = _Outcome() if error is None else _outcome(error, prints)
    outcome.warnings = [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, PolicyWarning)
    ]
    sender.send(outcome)
    sender.close()


def _error_of(
    check: Callable[[], None], make_error: MakeError, board: mmap, seconds: float
) -> BaseException | None:
    """Run a check; returns what it raises."""
    try:
        check()
    except CheckTooLongError:
        return make_error("never ends", *_too_long(board, seconds))
    except MemoryError:
        _limit_memory(4 * MEMORY_BYTES)  # so that it can be reported
        detail = f"it needs more than {MEMORY_BYTES >> 20} MiB"
        return make_error("memory", detail, running_call(board).name)
    except BaseException as raised:  # raised again where it is waited for
        return raised
    return None


def _outcome(error: BaseException, prints: Prints) -> _Outcome:
    notes = [note for note in getattr(error, "__notes__", ()) if "Falsifying" not in note]
    law, detail = getattr(error, "law", ""), getattr(error, "detail", "")
    if prints.count and law != "prints":
        notes.append(f"the policy printed {prints}")
    return _Outcome(
        error=_pickled(error),
        cause=_pickled(error.__cause__),
        broken=(law, detail, getattr(error, "method", "")) if law else None,
        text=str(error) if law else f"{type(error).__name__}: {error}",
        notes=notes,
    )


def _pickled(value: object) -> bytes:
    """The pickled value; empty if it cannot be pickled, as with a class that is defined
    in a function.
    """
    try:
        pickled = b"" if value is None else pickle.dumps(value)
        if pickled:
            pickle.loads(pickled)  # noqa: S301  # just pickled
    except Exception:  # pickle raises errors of many kinds
        return b""
    return pickled


def _limit_memory(more: int) -> None:
    """Limit the memory of this process to `more` bytes than it has."""
    try:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[0])
    except OSError:  # not on Linux
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size = pages * resource.getpagesize() + more
    if most == resource.RLIM_INFINITY or size < most:
        resource.setrlimit(resource.RLIMIT_AS, (size, most))
