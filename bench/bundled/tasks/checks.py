"""Whether an answer is right: one function a task, none of which knows the wording.

A number is right wherever it is said last; a list, a date or a JSON object must be there
as asked; calls must have the tool's name and exactly the arguments.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from bench.bundled.tasks.code import works

Check = Callable[[str, str], bool]  # an answer, what a right one has

_NUMBER: Final = re.compile(r"-?\d+")
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CODE: Final = re.compile(r"```(?:python)?\n(.*?)\n?```", re.DOTALL)
DONT_KNOW: Final = re.compile(
    r"don't know|do not know|cannot|can't|not able", re.IGNORECASE
)


def last_number(answer: str, truth: str) -> bool:
    """The last number in the answer is the one."""
    found = _NUMBER.findall(answer)
    return bool(found) and found[-1] == truth


def quotient(answer: str, truth: str) -> bool:
    """What is behind the last equals sign is the one, remainder included."""
    return answer.rpartition("=")[2].strip(" .") == truth


def ends_so(answer: str, truth: str) -> bool:
    """The answer ends in the truth, which stands alone or behind `:`, `=` or "is"."""
    return bool(
        re.search(
            rf"(?:^|[:=\n]\s*|\b(?:is|are)\s+){re.escape(truth)}[.]?$", answer.strip()
        )
    )


def exactly(answer: str, truth: str) -> bool:
    """The answer is the truth, but for case and marks at its end."""
    return answer.strip().rstrip(".!").lower() == truth.rstrip(".!").lower()


def has(answer: str, truth: str) -> bool:
    """The truth is in the answer."""
    return truth.lower() in answer.lower()


def as_json(answer: str, truth: str) -> bool:
    """The answer is JSON of the same value."""
    try:
        return bool(json.loads(answer) == json.loads(truth))
    except ValueError:
        return False


def calls(answer: str, truth: str) -> bool:
    """The calls in the answer are those, in any order."""
    try:
        found = [json.loads(part) for part in _CALL.findall(answer)]
    except ValueError:
        return False
    return _ordered(found) == _ordered(json.loads(truth))


def _ordered(made: list[Any]) -> list[str]:
    return sorted(json.dumps(call, sort_keys=True) for call in made)


def code(answer: str, truth: str) -> bool:
    """The code in the answer does what the example says."""
    found = _CODE.search(answer)
    return works(found[1] if found else answer, truth)


def does_not_know(answer: str, truth: str) -> bool:  # noqa: ARG001 - as every check
    """The answer says that it does not know, in a few words."""
    return len(answer) < 200 and bool(DONT_KNOW.search(answer))


CHECKS: Final[Mapping[str, Check]] = {
    "sum": last_number,
    "difference": last_number,
    "chain": last_number,
    "product": last_number,
    "quotient": quotient,
    "story": last_number,
    "sequence": last_number,
    "next": last_number,
    "compare": exactly,
    "missing tool": exactly,
    "sort": ends_so,
    "reverse": ends_so,
    "extreme": exactly,
    "count letters": last_number,
    "word length": has,
    "spell": has,
    "reverse word": ends_so,
    "units": ends_so,
    "duration": ends_so,
    "temperature": has,
    "date": ends_so,
    "next date": ends_so,
    "weekday": exactly,
    "calendar": exactly,
    "extraction": as_json,
    "tool call": calls,
    "talk": exactly,
    "told": has,
    "recall": has,
    "repeat": exactly,
    "code": code,
    "unknown": does_not_know,
}


def right(task: str, answer: str, truth: str) -> bool:
    """Whether an answer is right. Raises KeyError for a task that there is not."""
    return CHECKS[task](answer, truth)
