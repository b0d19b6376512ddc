"""A child process of `test_child`: `python -m tests.effects.net.spawned DESCRIPTOR`.

It writes its standard input and a secret of its environment to the descriptor, and sends
heartbeats.
"""

import os
import sys
import time

from minfer.effects.net.child import PARENT_VARIABLE, begin_as_child

if __name__ == "__main__":
    heartbeat = begin_as_child()
    assert PARENT_VARIABLE not in os.environ, "its own children have another parent"
    secret = os.environ.get("MINFER_CACHE_SECRET", "")
    os.write(int(sys.argv[1]), sys.stdin.buffer.read() + secret.encode() + b"|")
    while True:
        heartbeat.beat()
        time.sleep(0.01)
