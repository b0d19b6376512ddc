"""The messages between rank 0 and another rank, beside items (`items`).

rank 0                    another rank
   | Settings ------------> |
   | <------- RankPrepared |   its weights follow
   | <-------------- Ready |   its caches are there
   | items ---------------> |
   | <------ TransferEnded |
   | <--- Alive, or Broken |   at any time
"""

from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from minfer.effects.net.framing import Socket, read_message

MAX_MESSAGE_BYTES: Final = 2**30


class Settings(Struct, frozen=True):
    """The settings of rank 0, as JSON has them."""

    values: dict[str, Any]


class Alive(Struct, tag=True, frozen=True):
    """The process runs."""


class RankPrepared(Struct, tag="Prepared", frozen=True):
    """The rank has prepared an engine."""

    process: int  # its id
    about: dict[str, str]  # what must be alike on all ranks


class Ready(Struct, tag=True, frozen=True):
    """The rank has its weights and caches."""


class TransferEnded(Struct, tag=True, frozen=True):
    """The rank's part of a transfer has ended."""

    number: int
    lost: str | None  # why; None: all its pages are written


class Broken(Struct, tag=True, frozen=True):
    """The rank ends, as it cannot go on."""

    why: str


FromRank: TypeAlias = Alive | RankPrepared | Ready | TransferEnded | Broken
_settings: Final = msgspec.msgpack.Decoder(Settings)
_from_rank: "Final[msgspec.msgpack.Decoder[FromRank]]" = msgspec.msgpack.Decoder(FromRank)


def read_settings(sock: Socket) -> Settings:
    """Read the first message of rank 0. Raises PeerError and OSError."""
    return read_message(sock, _settings, MAX_MESSAGE_BYTES)


def read_from_rank(sock: Socket) -> FromRank:
    """Read a message of another rank. Raises PeerError and OSError."""
    return read_message(sock, _from_rank, MAX_MESSAGE_BYTES)
