"""How two processes of a deployment recognize each other on a new connection.

    listening process                  connecting process
       | Challenge ----------------------> |
       | <-------------------------- Hello |   both prove that they know the secret
       | Proven, or HandshakeRefused ----> |

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

HANDSHAKE_SECONDS: Final = 5.0  # seconds that a handshake may take
_MAX_MESSAGE_BYTES: Final = 4096  # bytes of a message
_NONCE_BYTES: Final = 16  # bytes
_LISTENING_SIDE, _DIALLING_SIDE = "listens", "dials"


class Challenge(Struct, tag=True, frozen=True):
    """The random number that the connecting process answers with its proof."""

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


class HandshakeRefused(Struct, tag="Refused", frozen=True):
    """Why the listening process refuses the connection."""

    why: str


ToDialler: TypeAlias = Challenge | Proven | HandshakeRefused
_to_dialler_decoder: "Final[msgspec.msgpack.Decoder[ToDialler]]" = (
    msgspec.msgpack.Decoder(ToDialler)
)
_hello_decoder: Final = msgspec.msgpack.Decoder(Hello)


@frozen(kw_only=True)
class Terms:
    """What both sides have to have in common."""

    purpose: str  # of the connection
    version: str  # of its protocol
    layout: bytes  # a digest of what KV depends on: the model, or how pages are stored
    secret: bytes = field(repr=False)  # of the deployment

    def proof(self, side: str, challenge: bytes, nonce: bytes) -> bytes:
        """Proves that one side of a connection knows the secret."""
        content = b"\0".join((f"{self.purpose} {side}".encode(), challenge, nonce))
        return hmac.digest(self.secret, content, "sha256")


def secret_key(secret: str) -> bytes:
    """The key of proofs, of the deployment's secret."""
    data = secret.encode("utf-8", "surrogateescape")
    return hashlib.sha256(b"minfer: between processes\0" + data).digest()


def accept_handshake(sock: Socket, terms: Terms) -> str:
    """Perform the listening side's handshake: check the connecting process and return its
    name. Raises PeerError and OSError.
    """
    deadline, nonce = (
        time.monotonic() + HANDSHAKE_SECONDS,
        secrets.token_bytes(_NONCE_BYTES),
    )
    sock.settimeout(HANDSHAKE_SECONDS)
    sock.sendall(framed(Challenge(nonce)))
    hello = read_message(sock, _hello_decoder, _MAX_MESSAGE_BYTES, deadline=deadline)
    expected_mac = terms.proof(_DIALLING_SIDE, nonce, hello.nonce)
    if len(hello.nonce) != _NONCE_BYTES or not hmac.compare_digest(
        hello.mac, expected_mac
    ):
        _refuse(sock, "the secret is another one")
    if hello.version != terms.version:
        _refuse(sock, f"version {terms.version} is spoken, not {hello.version}")
    if hello.layout != terms.layout:
        _refuse(sock, "the model, or how its KV is stored, is another one")
    sock.sendall(framed(Proven(terms.proof(_LISTENING_SIDE, nonce, hello.nonce))))
    sock.settimeout(None)
    return hello.name


def initiate_handshake(sock: Socket, terms: Terms, name: str) -> None:
    """Perform the handshake of this side, which has dialled, and check the other one.
    Raises PeerError and OSError.
    """
    deadline, nonce = (
        time.monotonic() + HANDSHAKE_SECONDS,
        secrets.token_bytes(_NONCE_BYTES),
    )
    challenge = _read(sock, deadline)
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != _NONCE_BYTES:
        raise PeerError("it is no engine of minfer")
    mac = terms.proof(_DIALLING_SIDE, challenge.nonce, nonce)
    sock.sendall(framed(Hello(terms.version, name, terms.layout, nonce, mac)))
    reply = _read(sock, deadline)
    if isinstance(reply, HandshakeRefused):
        raise PeerError(f"it refuses: {reply.why[:200]!r}")
    expected_mac = terms.proof(_LISTENING_SIDE, challenge.nonce, nonce)
    if not isinstance(reply, Proven) or not hmac.compare_digest(reply.mac, expected_mac):
        raise PeerError("it does not know the secret")
    sock.settimeout(None)


class RefusedError(PeerError):
    """The other side was refused."""


def _refuse(sock: Socket, reason: str) -> NoReturn:
    sock.sendall(framed(HandshakeRefused(reason)))
    raise RefusedError(reason)


def _read(sock: Socket, deadline: float) -> ToDialler:
    return read_message(sock, _to_dialler_decoder, _MAX_MESSAGE_BYTES, deadline=deadline)
