"""Mistakes in scheduling policies that Python accepts, and what to write instead."""

import inspect
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Final

from attrs.exceptions import FrozenInstanceError

from minfer.records.policy import FirstCome, Policy

METHODS: Final = tuple(name for name in vars(Policy) if not name.startswith("_"))
_FORMER_NAMES: Final = {
    "again": "requeue_rank",
    "displaces": "may_preempt",
    "holds_back": "defer",
}
_LIKENESS: Final = 0.7  # of two names, from 0 to 1, at which one may mean the other
# Short: records keep 200 characters of an error.
STATE_ADVICE: Final = (
    "a policy keeps nothing in its object, but in its state: start() returns the first "
    "one, and rank, defer, admitted and ended the next"
)


class PolicyWarning(UserWarning):
    """A scheduling policy does not do what its author may expect."""


def overridden_methods(policy: object) -> tuple[str, ...]:
    """The protocol's methods that a policy has of its own."""
    kind = type(policy)
    return tuple(
        name
        for name in METHODS
        if getattr(kind, name, None) not in (None, getattr(FirstCome, name))
    )


def misnamed_methods(kind: type) -> dict[str, str]:
    """The methods of a policy's class that nobody calls, and whose name and parameters
    are nearly those of a method that the class does not have: a sentence for each name.
    """
    sentences = {}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if name.startswith("_") or name in METHODS or not inspect.isfunction(method):
            continue
        near = get_close_matches(name, (*METHODS, *_FORMER_NAMES), 1, _LIKENESS)
        meant = _FORMER_NAMES.get(near[0], near[0]) if near else ""
        if meant and _is_meant(kind, method, meant):
            signature = ", ".join(_parameters(getattr(Policy, meant))[1:])
            sentences[name] = (
                f"scheduling policy {kind.__name__}: the engine never calls {name}; the "
                f"protocol has {meant}({signature}). Rename it, or begin its name with "
                "_ if it is a helper"
            )
    return sentences


def _is_meant(kind: type, method: Any, meant: str) -> bool:
    """Whether `method` may be meant as the protocol's method `meant`."""
    own = getattr(kind, meant, None)
    is_overridden = own not in (None, getattr(FirstCome, meant), getattr(Policy, meant))
    expected = len(_parameters(getattr(Policy, meant)))
    return not is_overridden and len(_parameters(method)) == expected


def _parameters(method: Any) -> list[str]:
    return [*inspect.signature(method).parameters]


def error_text(error: BaseException) -> str:
    """The text of an error that a policy raised, with what to write where `self.x = ...`
    raised it.
    """
    if not isinstance(error, FrozenInstanceError):
        return str(error)
    frames = _frames(error)
    name = frames[-1].tb_frame.f_locals.get("name", "") if frames else ""
    return f"{error} {name}: {STATE_ADVICE}"


def raising_line(error: BaseException, method: Any = None) -> str:
    """The file and line of code that raised an error when `method` was called, and was
    caught by the caller: of `self.x = ...`, that line; where `method` was not entered, as
    with a parameter too few, that of its definition.
    """
    frames = _frames(error)
    if len(frames) == 1:  # of the caller alone
        code = getattr(method, "__code__", None)
        return f"{code.co_filename}, line {code.co_firstlineno}" if code else ""
    if isinstance(error, FrozenInstanceError):
        frames = frames[:-1]  # without the one in attrs
    if not frames:
        return ""
    return f"{frames[-1].tb_frame.f_code.co_filename}, line {frames[-1].tb_lineno}"


def _frames(error: BaseException) -> list[TracebackType]:
    frames, last = [], error.__traceback__
    while last is not None:
        frames.append(last)
        last = last.tb_next
    return frames
