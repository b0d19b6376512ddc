"""Policy overrides of a run: how often, in which methods, and the first.

A policy whose answers cannot be used decides as first come, first served does. So a run
with overrides says little about the policy, and each result of a run has their number.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from attrs import define, field, frozen

from minfer.policies.mistakes import PolicyWarning, misnamed_methods
from minfer.records.messages import PolicyOverride
from minfer.records.state import Turn
from minfer.values.checks import ConfigError


class PolicyOverrideError(ConfigError):
    """An answer of a scheduling policy could not be used, or a method has nearly the name
    of one of the protocol and is never called, where that is an error.
    """


@frozen
class FirstOverride:
    """The first override of a run, and its turn."""

    turn: int
    time: float  # seconds
    override: PolicyOverride

    def __str__(self) -> str:
        override = self.override
        error = f": {override.error}" if override.error else ""
        line = f" ({override.line})" if override.line else ""
        return (
            f"turn {self.turn} ({self.time:.6g} s): {override.question} "
            f"{override.why}{error}{line}"
        )


@define
class OverrideCounts:
    """The policy overrides of the turns that were folded.

    With `strict`, the first raises PolicyOverrideError; so does a method that the engine
    never calls, before any turn.
    """

    strict: bool = False
    by_method: Counter[str] = field(factory=Counter)
    first: FirstOverride | None = None

    @property
    def count(self) -> int:
        """How many there were."""
        return self.by_method.total()

    def check_methods(self, policy: object) -> None:
        """Warn of a policy's methods that the engine never calls, though their names are
        nearly the protocol's. Raises PolicyOverrideError, if `strict`.
        """
        for sentence in misnamed_methods(type(policy)).values():
            if self.strict:
                raise PolicyOverrideError(sentence)
            warnings.warn(sentence, PolicyWarning, stacklevel=4)

    def fold(self, turn: Turn) -> None:
        """Count the overrides of a turn. Raises PolicyOverrideError."""
        for reason in turn.transition.reasons:
            if type(reason) is PolicyOverride:
                if self.first is None:
                    time = turn.transition.state.time
                    self.first = FirstOverride(turn.number, time, reason)
                self.by_method[reason.question] += 1
                if self.strict:
                    raise PolicyOverrideError(
                        f"the scheduling policy's answer cannot be used: {self.first}"
                    )

    def fold_turns(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Pass turns on, and count their overrides. Raises PolicyOverrideError."""
        for turn in turns:
            self.fold(turn)
            yield turn

    def fold_and_warn(self, turn: Turn, policy: object) -> None:
        """Count the overrides of a turn of a simulation, and warn of the first."""
        known = self.first
        self.fold(turn)
        if self.first is not known:
            name = type(policy).__name__
            warnings.warn(
                f"scheduling policy {name}: an answer could not be used, in "
                f"{self.first}. The engine answers as first come, first served would; "
                "`overrides` counts how often",
                PolicyWarning,
                stacklevel=4,
            )

    def figures(self) -> dict[str, Any]:
        """The counts as JSON values; times in seconds."""
        first = self.first
        return {
            "count": self.count,
            "by_method": dict(self.by_method),
            "first": first
            and {
                "turn": first.turn,
                "time": first.time,
                "method": first.override.question,
                "why": first.override.why,
                "error": first.override.error,
                "line": first.override.line,
            },
        }

    def sentence(self, policy: object) -> str:
        """The counts for people; nothing if there are none."""
        if self.first is None:
            return ""
        methods = ", ".join(
            f"{name} {count:,}" for name, count in self.by_method.most_common()
        )
        return (
            f"scheduling policy {type(policy).__name__}: {self.count:,} answers could "
            f"not be used, and those of first come, first served were: {methods}; the "
            f"first in {self.first}"
        )
