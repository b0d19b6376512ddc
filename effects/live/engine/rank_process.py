"""The process of a rank other than 0: the command line, started by rank 0 or torchrun.

torchrun's variables say where rank 0's store is, which has its settings.
"""

import json
import logging
import os
import signal
import sys

from minfer.effects.execution.follow import Leader, fail, follow
from minfer.effects.execution.ranks.rank_store import SETTINGS, find_store
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
    store = find_store()
    setup = settings_from(json.loads(store.get(SETTINGS)))
    leader = Leader.found(store, rank, about(setup))
    # So far torchrun ends this one, if rank 0 does not come.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        place = Place(rank, setup.args.parallel)
        group = RankGroup(join(setup, place, store))
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
