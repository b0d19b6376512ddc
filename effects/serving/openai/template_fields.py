"""Fields of requests that are variables of the chat template."""

from collections.abc import Mapping
from typing import Any, Literal

# OpenAI's values, and "max", which vLLM and DeepSeek's templates know.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def template_kwargs(
    given: Mapping[str, Any] | None, effort: Effort | None, verbosity: Verbosity | None
) -> dict[str, Any]:
    """The template's variables: those `given`, and those that follow from fields.

    As in vLLM, an effort sets `reasoning_effort`, and `enable_thinking` where that is not
    given. A template that reads none of these is not changed by them.
    """
    found = dict(given or {})
    if effort is not None:
        found["reasoning_effort"] = effort
        found.setdefault("enable_thinking", effort != "none")
    if verbosity is not None:
        found["verbosity"] = verbosity
    return found
