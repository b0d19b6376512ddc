"""How other ranks join rank 0: each connects to rank 0's Unix socket, both check that the
other one is a process of the same user, and rank 0 sends its settings. The rank prepares
the same engine, and reports which version of minfer and which weights it has.
"""

import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from socket import SO_RCVTIMEO, SOL_SOCKET
from typing import Any, Final

from attrs import define, field, frozen

from minfer.effects.execution.ranks.rank_folder import SOCKET_NAME, RankStartError
from minfer.effects.execution.ranks.rank_messages import (
    Alive,
    FromRank,
    RankPrepared,
    Settings,
    read_from_rank,
)
from minfer.effects.net.addresses import listen_at
from minfer.effects.net.framing import PeerError, Socket, framed
from minfer.effects.net.handshake import Terms
from minfer.effects.net.listener import Listener, connect
from minfer.effects.net.run_folder import check_private

JOIN_SECONDS: Final = 120.0  # all ranks must have joined by then
SILENCE_SECONDS: Final = 10.0  # a rank without a message for so long hangs
POLL_SECONDS: Final = 0.05
# There is no secret: the folder's mode and the check of the peer's user protect it.
# Versions and weights are compared later, as rank 0 ends with an error if they differ.
_TERMS: Final = Terms(purpose="rank", version="2", layout=b"", secret=b"")


@frozen(eq=False)
class Joined:
    """A rank that is ready to load its part of the model."""

    rank: int
    link: Socket
    prepared: RankPrepared


@define(eq=False)
class RankListener:
    """Rank 0's listening socket, and the ranks that have joined there."""

    folder: Path
    settings: Mapping[str, Any]  # rank 0's, as JSON has them
    _listener: Listener = field(init=False)
    _joined: SimpleQueue[Joined] = field(factory=SimpleQueue, init=False)

    def __attrs_post_init__(self) -> None:
        sock = listen_at(self.folder / SOCKET_NAME)
        self._listener = Listener(sock, _TERMS, self._accept_rank, "a rank")
        self._listener.start()

    def joined(self) -> Joined | None:
        """Returns the next rank that has joined; None if there is none for `POLL_SECONDS`
        seconds.
        """
        try:
            return self._joined.get(timeout=POLL_SECONDS)
        except Empty:
            return None

    def _accept_rank(self, sock: Socket, name: str) -> None:
        # For each read, here and later: the reader must not wait for ever for the rest of
        # a message.
        limit = struct.pack("ll", int(SILENCE_SECONDS), 0)
        sock.setsockopt(SOL_SOCKET, SO_RCVTIMEO, limit)
        message: FromRank | None = None
        with suppress(PeerError, OSError):  # it has ended, or hangs
            sock.sendall(framed(Settings(dict(self.settings))))
            while isinstance(message := read_from_rank(sock), Alive):
                pass  # it prepares the engine
        if isinstance(message, RankPrepared):
            self._joined.put(Joined(int(name), sock, message))
        else:
            sock.close()

    def close(self) -> None:
        """Accept no more connections, and close those that `joined` has not returned."""
        self._listener.close()
        with suppress(Empty):
            while True:
                self._joined.get_nowait().link.close()


def find_rank_0(folder: Path, rank: int) -> Socket:
    """Connect to rank 0; waits for one that starts later, as under torchrun. Its settings
    come first. Raises RankStartError.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            check_private(folder)
            return connect(folder / SOCKET_NAME, _TERMS, str(rank))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > deadline:
                raise RankStartError(
                    f"rank 0 does not listen in {folder} within {JOIN_SECONDS:.0f} s; "
                    f"all ranks must run on one machine, with the same TMPDIR"
                ) from error
        except (PeerError, OSError) as error:
            raise RankStartError(
                f"rank {rank} cannot join rank 0 in {folder}: {error}"
            ) from error
        time.sleep(POLL_SECONDS)
