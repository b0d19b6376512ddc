"""Progress of an executor's start."""

from collections.abc import Callable
from typing import Final

from attrs import frozen

WEIGHTS: Final = "loading weights"
KERNELS: Final = "compiling kernels"
GRAPHS: Final = "capturing graphs"


@frozen
class Progress:
    """A stage, and how much of it is done."""

    stage: str  # one of the above, or an executor's own
    done: int
    total: int  # 0: unknown


Report = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Do nothing."""
