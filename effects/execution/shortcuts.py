"""What makes steps faster and may not work: CUDA graphs, and other packages' kernels.

None of it is needed. If a step fails that took one of them for the first time, that one
is blamed: the step is done again without it, and so are all that follow.

A capture can also be spoiled from outside, by whoever in the process waits for the whole
device meanwhile. Such a graph is captured another time.
"""

import logging
from typing import Final

import torch
from attrs import define, field

from minfer.effects.execution.routes import Routes
from minfer.kernels.packages import FLASH, NAMES, QUACK, load

GRAPHS: Final = "CUDA graphs"
SPOILED: Final = "due to a previous error during capture"  # CUDA's word for it
MOST_SPOILED: Final = 8  # captures, after which it is taken to go on like that
_log = logging.getLogger("minfer.executor")


@define(eq=False)
class Shortcuts:
    """Which of them are taken, as long as they work."""

    graphs: bool  # whether steps are captured as CUDA graphs
    flash_from: int  # inputs of the longest chunk from which flash-attn serves; 0: never
    fused: bool  # whether quack serves products of gate and up
    trying: list[str] = field(factory=list)  # what the step under way takes
    spoiled: int = 0  # captures

    @classmethod
    def of(cls, routes: Routes, *, graphs: bool) -> "Shortcuts":
        """What makes steps faster that take these routes."""
        return cls(graphs, routes.flash_from, fused=not routes.no_quack)

    def begin(self) -> None:
        """A step begins; it has taken nothing yet."""
        self.trying = []

    def may_take(self, package: str) -> bool:
        """Whether a package can be loaded; if the step under way fails, that is its
        fault.
        """
        if why := load(package):
            self.do_without(package, why)
        elif GRAPHS not in self.trying:  # else it has done this step before
            self.trying.append(package)
        return not why

    def capture(self) -> None:
        """The step under way is captured; all else in it has worked before."""
        self.trying = [GRAPHS]

    def blame(self, error: Exception) -> None:
        """A step failed: do without what it tried, unless memory was short, or a capture
        was spoiled.
        """
        if self.trying == [GRAPHS] and SPOILED in str(error):
            self.spoiled += 1
            if self.spoiled <= MOST_SPOILED:
                return
        if not isinstance(error, torch.OutOfMemoryError):
            for what in self.trying:
                self.do_without(what, error)

    def do_without(self, what: str, why: object) -> None:
        """Take the slower way from now on, and say so: what failed would fail again."""
        name = NAMES.get(what, what)
        _log.warning("%s cannot be used here, and is not from now on: %s", name, why)
        if what == GRAPHS:
            self.graphs = False
        elif what == FLASH:
            self.flash_from = 0
        elif what == QUACK:
            self.fused = False
