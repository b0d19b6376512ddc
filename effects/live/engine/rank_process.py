"""The process of a rank other than 0: the command line, started by rank 0 or torchrun.

It finds rank 0's socket in a folder, and gets rank 0's settings there.
"""

import logging
import os
import signal
import sys

from minfer.effects.execution.follow import Leader, fail, follow
from minfer.effects.execution.ranks.rank_folder import rank_folder_path
from minfer.effects.live.engine.open_engine import open_rank, open_store
from minfer.effects.live.engine.ranks import (
    RankGroup,
    about,
    join,
    settings_from,
)
from minfer.effects.models.ranks import Place

_log = logging.getLogger("minfer.executor")


def main() -> int:
    """Follow rank 0 until it ends; returns the exit code."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for rank 0, which ends this one
    folder = rank_folder_path()
    leader = Leader.found(folder, rank)
    setup = settings_from(leader.settings)
    leader.join(about(setup))
    # So far torchrun ends this one, if rank 0 does not come.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        place = Place(rank, setup.args.parallel)
        group = RankGroup(join(setup, place, folder))
        executor = open_rank(setup, group, store=open_store(setup, rank))
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
