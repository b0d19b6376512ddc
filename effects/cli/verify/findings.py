"""The findings of a comparison, and the verdict over all of them."""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

PASSED: Final = "pass"
FAILED: Final = "fail"
SKIPPED: Final = "skipped"
NOTE: Final = "note"  # true, and no fault of minfer's
RANDOM: Final = "random"  # nothing to find, as weights are random


@frozen
class Check:
    """One finding: `state` is one of the words above, `figures` has its numbers."""

    name: str
    state: str
    figures: str


def judge(name: str, bad: Sequence[str], figures: str) -> Check:
    """A finding that fails if anything is `bad`; it shows the first of these."""
    if not bad:
        return Check(name, PASSED, figures)
    remaining = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return Check(name, FAILED, f"{figures}; {bad[0]}{remaining}")


def failed(checks: Sequence[Check]) -> list[str]:
    """The names of failed checks."""
    return [check.name for check in checks if check.state == FAILED]


def verdict(checks: Sequence[Check]) -> str:
    """The verdict over all findings."""
    bad = failed(checks)
    if bad:
        return f"NOT supported: {bad[0]}"
    if any(check.state == RANDOM for check in checks):
        passed = ", ".join(check.name for check in checks if check.state == PASSED)
        return f"supported; its weights are random, so what was compared is: {passed}"
    return "supported"
