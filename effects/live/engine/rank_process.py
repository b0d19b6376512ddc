"""The process of a rank other than 0: the command line, started by rank 0 or torchrun.

torchrun's variables say where rank 0's store is, which has its settings.
"""

import ctypes
import json
import logging
import os
import signal
import sys
from typing import Final

from minfer.effects.execution.follow import Leader, fail, follow
from minfer.effects.execution.ranks.crew import SETTINGS, find_store
from minfer.effects.execution.ranks.started_by import is_by_torchrun
from minfer.effects.live.engine.open_engine import open_rank
from minfer.effects.live.engine.ranks import (
    RankGroup,
    about,
    join,
    settings_from,
)
from minfer.effects.models.ranks import Place

_PR_SET_PDEATHSIG: Final = 1  # Linux's <sys/prctl.h>
_log = logging.getLogger("minfer.executor")


def main() -> int:
    """Follow rank 0 until it ends; returns the exit code."""
    rank = int(os.environ["RANK"])
    if not is_by_torchrun():
        _end_with_rank_0()
    for one in (signal.SIGTERM, signal.SIGINT):  # for rank 0, which ends this one
        signal.signal(one, signal.SIG_IGN)
    store = find_store()
    setup = settings_from(json.loads(store.get(SETTINGS)))
    leader = Leader.found(store, rank, about(setup))
    try:
        place = Place(rank, setup.args.parallel)
        group = RankGroup(join(setup, place, store))
        executor = open_rank(setup, group)
        follow(executor, leader)
        executor.close()
    except Exception as error:
        _log.exception("rank %d ends", rank)
        fail(leader, error)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end_with_rank_0() -> None:
    """Have the system kill this process when its parent has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
