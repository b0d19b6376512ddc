"""Who starts the ranks of an engine, by the environment, and the folder where they meet.
Needs no torch.

    started by   of rank 0             of another rank
    rank 0       a new folder          FOLDER_VARIABLE: the folder's path
    torchrun     a folder by TORCHRUN_VARIABLE and others of its variables, which all
                 ranks have

Only processes of this user reach the folder. It has rank 0's socket (joining.py), and the
file through which torch.distributed exchanges the addresses of its own sockets, which
listen at loopback addresses; minfer writes nothing to that file. Torchrun's own store,
whose port is open to the network, is not used.
"""

import hashlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from minfer.effects.net.run_folder import folder_path, run_folder
from minfer.values.checks import ConfigError

# Of processes that rank 0 has started: the folder.
FOLDER_VARIABLE: Final = "MINFER_FOLLOWS"
TORCHRUN_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
SOCKET_NAME, STORE_NAME = "rank-0", "torch"  # names of files in the folder
# What differs between engines that torchrun starts on a machine at the same time, and
# between two starts of an engine.
_VARIABLES: Final = (
    TORCHRUN_VARIABLE,
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)


class RankStartError(ConfigError):
    """The ranks of an engine cannot be started together."""


def is_by_torchrun() -> bool:
    """Returns whether torchrun starts the processes of all ranks."""
    return TORCHRUN_VARIABLE in os.environ


def is_rank() -> bool:
    """Returns whether this process was started as a rank, by torchrun or rank 0."""
    return FOLDER_VARIABLE in os.environ or is_by_torchrun()


def is_other_rank() -> bool:
    """Returns whether this process is to be a rank other than 0."""
    is_not_zero = os.environ.get("RANK", "0") != "0"
    return is_not_zero and is_rank()


def new_rank_folder() -> AbstractContextManager[Path]:
    """Make a new folder of an engine of which this process is rank 0; it is removed at
    the end. Raises OSError.
    """
    return run_folder(_torchrun_name() if is_by_torchrun() else "")


def rank_folder_path() -> Path:
    """Returns the folder that rank 0 makes, for another rank."""
    if is_by_torchrun():
        return folder_path(_torchrun_name())
    return Path(os.environ[FOLDER_VARIABLE])


def _torchrun_name() -> str:
    """Returns the name of the folder, of this user's and torchrun's."""
    values = [str(os.geteuid()), *(os.environ.get(name, "") for name in _VARIABLES)]
    return "ranks-" + hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]
