"""`minfer`, whose KV blocks go through a network of the test's: its port is the
environment's KV_NETWORK.
"""

import os
import sys

from minfer.effects.cli.main import main
from minfer.effects.execution.tiers.peers import peers


def read_port(text: str) -> tuple[str, int]:
    """The network's port instead of any other one."""
    del text
    return "127.0.0.1", int(os.environ["KV_NETWORK"])


peers.read_port = read_port  # type: ignore[attr-defined]  # it is imported there

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
