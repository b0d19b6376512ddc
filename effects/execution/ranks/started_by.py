"""Who started this process, by the variables of its environment; without torch."""

import os
from typing import Final

# Of processes that rank 0 has started: the folder in which they meet.
FOLLOWS: Final = "MINFER_FOLLOWS"
TORCHRUN: Final = "TORCHELASTIC_RUN_ID"


def is_by_torchrun() -> bool:
    """Whether torchrun starts the processes of all ranks."""
    return TORCHRUN in os.environ


def is_rank() -> bool:
    """Whether this process was started as a rank, by torchrun or rank 0."""
    return FOLLOWS in os.environ or is_by_torchrun()


def is_other_rank() -> bool:
    """Whether this process is to be a rank other than 0."""
    other = os.environ.get("RANK", "0") != "0"
    return other and is_rank()
