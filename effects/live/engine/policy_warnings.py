"""Warnings about a scheduling policy whose answers cannot be used.

The engine then answers as first come, first served would, and continues
(`minfer.policies.consult`). Users should notice that, and a policy may be wrong in each
turn: so there is one warning for each distinct fault: the question, what was wrong with
the answer, and the line that raised. All of them are counted
(`overruled_policy_answers`).
"""

import logging
from collections.abc import Iterable
from typing import Final

from attrs import define, field

from minfer.policies.mistakes import misnamed_methods
from minfer.records.messages import PolicyOverride, Reason
from minfer.records.policy import Policy

_log = logging.getLogger("minfer.engine")
MAX_WARNINGS: Final = 100  # a policy may make up names


@define
class PolicyWarnings:
    """Logs each distinct fault once, and at first methods with a wrong name."""

    policy: Policy
    warned: set[tuple[str, str, str]] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        for sentence in misnamed_methods(type(self.policy)).values():
            _log.warning("%s", sentence)

    def observe(self, reasons: Iterable[Reason]) -> None:
        """Warn of a turn's policy overrides, if these faults are new."""
        for reason in reasons:
            if type(reason) is PolicyOverride:
                self._warn(reason)

    def _warn(self, override: PolicyOverride) -> None:
        kind = override.question, override.why, override.line
        if kind in self.warned or len(self.warned) >= MAX_WARNINGS:
            return
        self.warned.add(kind)
        _log.warning(
            "scheduling policy %s: %s %s%s%s; the engine answers as first come, first "
            "served would, now and whenever this happens again without a further warning",
            type(self.policy).__name__,
            override.question,
            override.why,
            f": {override.error}" if override.error else "",
            f" ({override.line})" if override.line else "",
        )
