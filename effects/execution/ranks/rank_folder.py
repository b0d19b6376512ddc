"""The folder in which the ranks of an engine meet. Only processes of this user reach it.

It has rank 0's socket (joining.py), and the file through which torch.distributed
exchanges the addresses of its own sockets, which listen at loopback addresses; minfer
writes nothing to that file.

Ranks that rank 0 starts get the folder's path in their environment. Those of torchrun
find it by torchrun's variables: torchrun's own store, whose port is open to the network,
is not used.
"""

import hashlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from minfer.effects.execution.ranks.started_by import FOLLOWS, TORCHRUN, is_by_torchrun
from minfer.effects.net.run_folder import folder_path, run_folder
from minfer.values.checks import ConfigError

SOCKET, STORE = "rank-0", "torch"  # names of files in the folder
# What differs between engines that torchrun starts on a machine at the same time, and
# between two starts of an engine.
_VARIABLES: Final = (
    TORCHRUN,
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)


class RankStartError(ConfigError):
    """The ranks of an engine cannot be started together."""


def new_rank_folder() -> AbstractContextManager[Path]:
    """A new folder of an engine of which this process is rank 0, removed at the end.
    Raises OSError.
    """
    return run_folder(_torchrun_name() if is_by_torchrun() else "")


def rank_folder_path() -> Path:
    """The folder that rank 0 makes, for another rank."""
    if is_by_torchrun():
        return folder_path(_torchrun_name())
    return Path(os.environ[FOLLOWS])


def _torchrun_name() -> str:
    """The name of the folder, of this user's and torchrun's."""
    values = [str(os.geteuid()), *(os.environ.get(name, "") for name in _VARIABLES)]
    return "ranks-" + hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]
