"""Optional accelerations that may not work: CUDA graphs, and other packages' kernels.

None of them is needed. If a step fails that used one of them for the first time, that one
is blamed: the step is repeated without it, and all that follow do without it, too.

A capture can also be spoiled from outside, when another thread of the process waits for
the whole device meanwhile. Such a graph is captured again later.
"""

import logging
from typing import Final

import torch
from attrs import define, field

from minfer.effects.execution.device.routes import Routes
from minfer.kernels.packages import FLASH, NAMES, QUACK, load

GRAPHS: Final = "CUDA graphs"
# Part of CUDA's message.
SPOILED_MESSAGE: Final = "due to a previous error during capture"
MAX_SPOILED_CAPTURES: Final = 8  # captures, after which graphs are given up
_log = logging.getLogger("minfer.executor")


@define(eq=False)
class Shortcuts:
    """The accelerations in use, as long as they work."""

    graphs: bool  # whether steps are captured as CUDA graphs
    flash: bool  # whether flash-attn serves long chunks
    fused: bool  # whether quack serves products of gate and up
    trying: list[str] = field(factory=list)  # what the current step uses
    spoiled: int = 0  # spoiled captures

    @classmethod
    def of(cls, routes: Routes, *, graphs: bool) -> "Shortcuts":
        """Returns the accelerations of these routes."""
        return cls(graphs, flash=routes.uses_flash, fused=not routes.no_quack)

    def begin(self) -> None:
        """Note that a step begins; it has used nothing yet."""
        self.trying = []

    def can_use(self, package: str) -> bool:
        """Returns whether a package can be loaded; if the current step fails, the package
        is blamed.
        """
        if reason := load(package):
            self.disable(package, reason)
        elif GRAPHS not in self.trying:  # else this step ran before the capture
            self.trying.append(package)
        return not reason

    def capture(self) -> None:
        """Note that the current step is being captured; all else in it has worked
        before.
        """
        self.trying = [GRAPHS]

    def blame(self, error: Exception) -> None:
        """Disable what a failed step used, unless memory was short, or a capture was
        spoiled.
        """
        if self.trying == [GRAPHS] and SPOILED_MESSAGE in str(error):
            self.spoiled += 1
            if self.spoiled <= MAX_SPOILED_CAPTURES:
                return
        if not isinstance(error, torch.OutOfMemoryError):
            for shortcut in self.trying:
                self.disable(shortcut, error)

    def disable(self, shortcut: str, reason: object) -> None:
        """Disable an acceleration, and log a warning: it would fail again."""
        name = NAMES.get(shortcut, shortcut)
        _log.warning("%s cannot be used here, and is not from now on: %s", name, reason)
        if shortcut == GRAPHS:
            self.graphs = False
        elif shortcut == FLASH:
            self.flash = False
        elif shortcut == QUACK:
            self.fused = False
