"""Processes that take from one bucket and count together, forked as fronts are:
`python -m tests.effects.serving.sharing`. Prints what is left, and what they counted.
"""

import os
import sys

from minfer.effects.serving.keys import Bucket
from minfer.effects.serving.shared import Shared

PROCESSES = 4
TAKES = 500  # of each
SIZE = 1000  # less than all want


def be(number: int, bucket: Bucket, shared: Shared) -> int:
    """Take what is there, and count what was got; the last one dies with the lock."""
    mine = shared.at(number)
    for _ in range(TAKES):
        got = bucket.take_if_there(1) == 0
        mine.viewers.set(mine.viewers.own + got)
    if number == PROCESSES - 1:
        bucket._full_at.locked().__enter__()
        os.kill(os.getpid(), 9)
    return 0


def main() -> int:
    bucket = Bucket(SIZE, lambda: 50.0)  # on which time stands still: nothing comes back
    shared = Shared.of(PROCESSES)
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if not child:
            os._exit(be(number, bucket, shared))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    bucket.take(5)  # which would hang if the lock were still held
    print(round(bucket.level, 6), shared.viewers.total, shared.connections.total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
