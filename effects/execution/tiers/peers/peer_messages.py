"""What two engines say to each other on a connection that carries KV blocks.

    receiver                             sender
       | Challenge ----------------------> |
       | <-------------------------- Hello |   both prove that they know the secret
       | Welcome, or Refused ------------> |   with shared memory on one host
       | Grant --------------------------> |   slots that the sender may fill,
       | <-------------------------- Block |   one each; more are granted meanwhile
       | ...                               |
       | <------------------------ Starved |   or the oldest block makes room

The sender pushes and never asks: what it may write was granted before, so a block takes
no round trip. Where memory is shared, the block is in its slot before its message is
sent; otherwise its contents follow the message.

Messages are msgpack, each behind its length.
"""

import hmac
import secrets
import socket
import struct
import zlib
from typing import Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

VERSION: Final = 1  # of this protocol
NONCE: Final = 16  # bytes
LARGEST: Final = 1 << 20  # bytes of a message
_LENGTH: Final = struct.Struct("<I")
Socket: TypeAlias = socket.socket


class PeerError(Exception):
    """The other side is not one that blocks can be exchanged with, or it has gone."""


class Challenge(Struct, tag=True, frozen=True):
    """What the sender has to answer."""

    nonce: bytes


class Hello(Struct, tag=True, frozen=True):
    """Who sends: another version, model or secret is refused."""

    version: int
    name: str
    layout: bytes  # of pages: a digest
    nonce: bytes
    mac: bytes  # of both nonces


class Welcome(Struct, tag=True, frozen=True):
    """The memory of the receiver."""

    slots: int
    slot_bytes: int
    mac: bytes  # of both nonces
    # Whether a descriptor of it comes with this message.
    shared: bool


class Refused(Struct, tag=True, frozen=True):
    """Why no blocks are taken."""

    why: str


class Grant(Struct, tag=True, frozen=True):
    """Slots that the sender may fill."""

    slots: tuple[int, ...]


class Block(Struct, tag=True, frozen=True):
    """A block."""

    key: bytes
    slot: int
    length: int  # bytes
    checksum: int  # CRC-32 of contents that follow


class Starved(Struct, tag=True, frozen=True):
    """The sender has waited for a slot."""


ToSender: TypeAlias = Challenge | Welcome | Refused | Grant
ToReceiver: TypeAlias = Hello | Block | Starved
Message = TypeVar("Message")
_to_sender: "Final[msgspec.msgpack.Decoder[ToSender]]" = msgspec.msgpack.Decoder(ToSender)
_to_receiver: "Final[msgspec.msgpack.Decoder[ToReceiver]]" = msgspec.msgpack.Decoder(
    ToReceiver
)
_encode: Final = msgspec.msgpack.Encoder().encode


def new_nonce() -> bytes:
    """Random bytes, for one connection."""
    return secrets.token_bytes(NONCE)


def proof(secret: bytes, who: str, *nonces: bytes) -> bytes:
    """Proves that `who` ("sender", "receiver") knows the secret, on one connection."""
    return hmac.digest(secret, b"\0".join((who.encode(), *nonces)), "sha256")


def is_proof(secret: bytes, mac: bytes, who: str, *nonces: bytes) -> bool:
    """Returns whether a proof is right."""
    return hmac.compare_digest(mac, proof(secret, who, *nonces))


def checksum_of(contents: memoryview) -> int:
    """The checksum of contents on a network, whose own is of 16 bits."""
    return zlib.crc32(contents)


def copy_bytes(into: memoryview, contents: memoryview) -> None:
    """Copy, while other threads run: assignment to a slice would hold the interpreter's
    lock.
    """
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(contents, np.uint8))


def framed(message: ToSender | ToReceiver) -> bytes:
    """A message with its length before it."""
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


def read_exactly(sock: Socket, into: memoryview) -> None:
    """Fill `into` from a socket. Raises PeerError at its end, and OSError."""
    while into:
        count = sock.recv_into(into)
        if not count:
            raise PeerError("the connection has ended")
        into = into[count:]


def read_to_sender(sock: Socket, first: bytes = b"") -> ToSender:
    """Read a message of the receiver, whose first bytes were read before. Raises
    PeerError and OSError.
    """
    return _read(sock, _to_sender, first)


def read_to_receiver(sock: Socket) -> ToReceiver:
    """Read a message of the sender. Raises PeerError and OSError."""
    return _read(sock, _to_receiver)


def _read(
    sock: Socket, decoder: "msgspec.msgpack.Decoder[Message]", first: bytes = b""
) -> Message:
    head = bytearray(_LENGTH.size)
    head[: len(first)] = first
    read_exactly(sock, memoryview(head)[len(first) :])
    (length,) = _LENGTH.unpack(head)
    if length > LARGEST:
        raise PeerError(f"a message of {length} bytes; the largest has {LARGEST}")
    data = bytearray(length)
    read_exactly(sock, memoryview(data))
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(f"a message that cannot be read: {error}") from None
