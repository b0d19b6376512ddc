"""The messages of two engines on a connection that carries KV blocks.

    receiver                             sender
       | <---------- both prove that they know the secret: see `handshake`
       | Welcome ------------------------> |   with shared memory on one host
       | Grant --------------------------> |   slots that the sender may fill,
       | <---------------------- PeerBlock |   one each; more are granted meanwhile
       | ...                               |
       | <------------------------ Starved |   or the oldest block makes room

The sender pushes and never asks: what it may write was granted before, so a block takes
no round trip. Where memory is shared, or written to through NIXL, a block is in its slot
before its message is sent; otherwise its contents follow the message.
"""

from typing import Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from minfer.effects.net.framing import Socket, read_message
from minfer.effects.net.handshake import Terms

MAX_MESSAGE_BYTES: Final = 2**20


class RemoteMemory(Struct, frozen=True):
    """How the receiver's memory is written to through NIXL."""

    agent: bytes  # NIXL's own description
    at: int  # its address there


class Welcome(Struct, tag=True, frozen=True):
    """The memory of the receiver."""

    slots: int
    slot_bytes: int
    # Whether a descriptor of it comes with this message.
    shared: bool
    remote: RemoteMemory | None = None  # None: not through NIXL


class Grant(Struct, tag=True, frozen=True):
    """Slots that the sender may fill."""

    slots: tuple[int, ...]


class PeerBlock(Struct, tag="Block", frozen=True):
    """A block."""

    key: bytes
    slot: int
    length: int  # bytes
    checksum: int | None  # CRC-32 of the contents; None: memory is shared
    follows: bool = False  # the contents do


class Starved(Struct, tag=True, frozen=True):
    """The sender has waited for a slot."""


ToSender: TypeAlias = Welcome | Grant
ToReceiver: TypeAlias = PeerBlock | Starved
_to_sender: "Final[msgspec.msgpack.Decoder[ToSender]]" = msgspec.msgpack.Decoder(ToSender)
_to_receiver: "Final[msgspec.msgpack.Decoder[ToReceiver]]" = msgspec.msgpack.Decoder(
    ToReceiver
)


def terms_of(layout: bytes, secret: bytes) -> Terms:
    """Returns what sender and receiver have to have in common."""
    return Terms(purpose="kv", version="2", layout=layout, secret=secret)


def copy_bytes(into: memoryview, contents: memoryview) -> None:
    """Copy, while other threads run: assignment to a slice would hold the interpreter's
    lock.
    """
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(contents, np.uint8))


def read_to_sender(sock: Socket, first: bytes = b"") -> ToSender:
    """Read a message of the receiver, whose first bytes were read before. Raises
    PeerError and OSError.
    """
    return read_message(sock, _to_sender, MAX_MESSAGE_BYTES, first=first)


def read_to_receiver(sock: Socket) -> ToReceiver:
    """Read a message of the sender. Raises PeerError and OSError."""
    return read_message(sock, _to_receiver, MAX_MESSAGE_BYTES)
