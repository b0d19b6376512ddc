"""How two processes of a deployment recognize each other on a new connection.

    listening process                  connecting process
       | Challenge ----------------------> |
       | <-------------------------- Hello |   both prove that they know the secret
       | Proven, or Refused -------------> |

Each proof is a MAC of the random numbers of both processes, of the connection's purpose
and of the process's side. So a recorded proof is of no use on another connection, or from
the other side. A process without the secret learns only that its secret is another one.

Only the beginning of a connection is proven: whoever can change packets on their way can
change what follows. Networks between machines have to keep others out, or be encrypted.
"""

import hashlib
import hmac
import secrets
import time
from typing import Final, NoReturn, TypeAlias

import msgspec
from attrs import field, frozen
from msgspec import Struct

from minfer.effects.net.framing import (
    PeerError,
    Socket,
    framed,
    read_message,
)

GREETING: Final = 5.0  # seconds that all of it may take
_LARGEST: Final = 4096  # bytes of a message
_NONCE: Final = 16  # bytes
_LISTENS, _DIALS = "listens", "dials"


class Challenge(Struct, tag=True, frozen=True):
    """What has to be answered."""

    nonce: bytes


class Hello(Struct, tag=True, frozen=True):
    """What the connecting process sends."""

    version: str
    name: str
    layout: bytes
    nonce: bytes
    mac: bytes


class Proven(Struct, tag=True, frozen=True):
    """The proof of the listening process."""

    mac: bytes


class Refused(Struct, tag=True, frozen=True):
    """Why nothing follows."""

    why: str


ToDialler: TypeAlias = Challenge | Proven | Refused
_to_dialler: "Final[msgspec.msgpack.Decoder[ToDialler]]" = msgspec.msgpack.Decoder(
    ToDialler
)
_hello: Final = msgspec.msgpack.Decoder(Hello)


@frozen(kw_only=True)
class Terms:
    """What both sides have to have in common."""

    purpose: str  # of the connection
    version: str  # of what is spoken on it
    layout: bytes  # a digest of what KV depends on: the model, or how pages are stored
    secret: bytes = field(repr=False)  # of the deployment

    def proof(self, side: str, challenge: bytes, nonce: bytes) -> bytes:
        """Proves that one side of a connection knows the secret."""
        said = b"\0".join((f"{self.purpose} {side}".encode(), challenge, nonce))
        return hmac.digest(self.secret, said, "sha256")


def secret_key(secret: str) -> bytes:
    """The key of proofs, of the deployment's secret."""
    data = secret.encode("utf-8", "surrogateescape")
    return hashlib.sha256(b"minfer: between processes\0" + data).digest()


def answer(sock: Socket, terms: Terms) -> str:
    """Check the connecting process; returns its name. Raises PeerError and OSError."""
    end, nonce = time.monotonic() + GREETING, secrets.token_bytes(_NONCE)
    sock.settimeout(GREETING)
    sock.sendall(framed(Challenge(nonce)))
    hello = read_message(sock, _hello, _LARGEST, end=end)
    right = terms.proof(_DIALS, nonce, hello.nonce)
    if len(hello.nonce) != _NONCE or not hmac.compare_digest(hello.mac, right):
        _refuse(sock, "the secret is another one")
    if hello.version != terms.version:
        _refuse(sock, f"version {terms.version} is spoken, not {hello.version}")
    if hello.layout != terms.layout:
        _refuse(sock, "the model, or how its KV is stored, is another one")
    sock.sendall(framed(Proven(terms.proof(_LISTENS, nonce, hello.nonce))))
    sock.settimeout(None)
    return hello.name


def introduce(sock: Socket, terms: Terms, name: str) -> None:
    """Introduce this side, which has dialled, and recognize the other one. Raises
    PeerError and OSError.
    """
    end, nonce = time.monotonic() + GREETING, secrets.token_bytes(_NONCE)
    challenge = _read(sock, end)
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != _NONCE:
        raise PeerError("it is no engine of minfer")
    mac = terms.proof(_DIALS, challenge.nonce, nonce)
    sock.sendall(framed(Hello(terms.version, name, terms.layout, nonce, mac)))
    said = _read(sock, end)
    if isinstance(said, Refused):
        raise PeerError(f"it refuses: {said.why[:200]!r}")
    right = terms.proof(_LISTENS, challenge.nonce, nonce)
    if not isinstance(said, Proven) or not hmac.compare_digest(said.mac, right):
        raise PeerError("it does not know the secret")
    sock.settimeout(None)


class RefusedError(PeerError):
    """The other side was refused."""


def _refuse(sock: Socket, why: str) -> NoReturn:
    sock.sendall(framed(Refused(why)))
    raise RefusedError(why)


def _read(sock: Socket, end: float) -> ToDialler:
    return read_message(sock, _to_dialler, _LARGEST, end=end)
