"""Who is let in by a process of the deployment, and who cannot harm it."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from attrs import define, evolve, field

from minfer.effects.net import handshake, listener
from minfer.effects.net.addresses import (
    dial,
    listen_at,
    port_text,
    read_port,
)
from minfer.effects.net.framing import (
    PeerError,
    Socket,
    framed,
    read_message,
)
from minfer.effects.net.handshake import (
    Challenge,
    Hello,
    Proven,
    Terms,
    initiate_handshake,
    secret_key,
)
from minfer.effects.net.listener import Listener

TERMS = Terms(purpose="x", version="1", layout=b"model", secret=secret_key("s"))
CHALLENGES = msgspec.msgpack.Decoder(Challenge)
TIMES: Final = 100  # how often, where a thread may be late


@define(eq=False)
class Opened:
    """A listener, and who came in."""

    names: list[str] = field(factory=list)
    sock: Socket = field(init=False)
    listening: Listener = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.sock = listen_at(("127.0.0.1", 0))
        self.listening = Listener(self.sock, TERMS, self.enter, "somebody")
        self.listening.start()

    def enter(self, connection: Socket, name: str) -> None:
        self.names.append(name)
        connection.sendall(b"in")
        connection.close()

    def dial(self) -> Socket:
        return dial(self.sock.getsockname())

    def come(self, terms: Terms = TERMS, name: str = "a") -> None:
        with self.dial() as sock:
            initiate_handshake(sock, terms, name)
            assert sock.recv(2) == b"in"


@pytest.fixture
def opened() -> Iterator[Opened]:
    running = Opened()
    yield running
    running.listening.close()


def test_who_knows_the_secret_comes_in(opened: Opened) -> None:
    opened.come(name="a")
    opened.come(name="b")
    assert opened.names == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": secret_key("t")}, "the secret is another one"),
        ({"purpose": "y"}, "the secret is another one"),  # a proof for another listener
        ({"version": "2"}, "version 1 is spoken, not 2"),
        ({"layout": b"other"}, "the model, or how its KV is stored, is another one"),
    ],
)
def test_who_differs_is_refused_and_both_say_why_once(
    opened: Opened,
    changes: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(PeerError, match=reason):
                opened.come(evolve(TERMS, **changes))
    [warning] = [record.message for record in caplog.records]
    assert warning == f"somebody at 127.0.0.1 is refused: {reason}"
    opened.come()


@define(eq=False)
class Late:
    """A socket that accepts a connection once it has been closed."""

    connection: Socket
    accepting: threading.Event = field(factory=threading.Event)
    closed: threading.Event = field(factory=threading.Event)

    def accept(self) -> tuple[Socket, None]:
        self.accepting.set()
        assert self.closed.wait(5)
        return self.connection, None

    def listen(self) -> None:
        """It does already."""

    def shutdown(self, how: int) -> None:
        """It wakes nobody: the connection is there."""

    def close(self) -> None:
        self.closed.set()


def test_one_that_comes_when_the_listener_closes_is_not_let_in() -> None:
    accepted, client = socket.socketpair()
    names, sock = list[str](), Late(accepted)
    listening = Listener(sock, TERMS, lambda _, name: names.append(name), "x")  # type: ignore[arg-type]  # it stands in
    listening.start()
    assert sock.accepting.wait(5)
    listening.close()
    client.settimeout(5)
    with client, pytest.raises((PeerError, OSError)):
        initiate_handshake(client, TERMS, "a")
    assert not names


def test_the_next_process_of_the_same_socket_lets_in_after_a_close() -> None:
    """As an engine that breaks is restarted, whose parent keeps the socket."""
    with listen_at(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    names = list[str]()

    def enter(connection: Socket, name: str) -> None:
        names.append(name)
        connection.close()

    with listen_at(address) as sock:
        for _ in range(TIMES):
            first = Listener(sock.dup(), TERMS, lambda *_: None, "x")
            first.start()
            first.close()
            second = Listener(sock.dup(), TERMS, enter, "x")
            second.start()
            with dial(address) as connection:
                initiate_handshake(connection, TERMS, "a")
                assert connection.recv(1) == b""
            second.close()
    assert names == ["a"] * TIMES


def test_who_has_no_secret_learns_no_version(opened: Opened) -> None:
    stranger = evolve(TERMS, secret=b"", version="2", layout=b"")
    with pytest.raises(PeerError, match="the secret is another one"):
        opened.come(stranger)


def test_a_proof_is_worth_nothing_a_second_time(opened: Opened) -> None:
    sent = list[bytes]()
    for _ in range(2):
        with opened.dial() as sock:
            challenge = read_message(sock, CHALLENGES, 100)
            if not sent:
                nonce = bytes(16)
                mac = TERMS.proof("dials", challenge.nonce, nonce)
                sent.append(framed(Hello("1", "a", b"model", nonce, mac)))
            sock.sendall(sent[0])
            while sock.recv(100):
                pass
    assert opened.names == ["a"]


def test_who_listens_without_the_secret_is_not_trusted() -> None:
    dialing, listening = socket.socketpair()

    def listen() -> None:
        listening.sendall(framed(Challenge(bytes(16))))
        hello = read_message(listening, msgspec.msgpack.Decoder(Hello), 1000)
        listening.sendall(framed(Proven(hello.mac)))  # the one proof that it has

    thread = threading.Thread(target=listen)
    thread.start()
    with dialing, listening, pytest.raises(PeerError, match="does not know the secret"):
        initiate_handshake(dialing, TERMS, "a")
    thread.join()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00abcde",
        framed(Challenge(b"")),
        framed(Hello("1", "a", b"model", b"", b"")),
    ],
)
def test_nonsense_is_cut_off(opened: Opened, data: bytes) -> None:
    with opened.dial() as sock:
        sock.sendall(data)
        with suppress(OSError):  # it may be cut off by now
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(100):
                pass
    opened.come()
    assert opened.names == ["a"]


def test_who_says_nothing_or_dribbles_keeps_nobody_out(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_UNAUTHENTICATED", 8)
    sockets = [opened.dial() for _ in range(30)]
    for sock in sockets:
        with suppress(OSError):
            sock.sendall(b"\x20")
    opened.come()
    end = time.monotonic() + 3
    while len(opened.listening._unauthenticated) > 8 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(opened.listening._unauthenticated) <= 8
    for sock in sockets:
        sock.close()


def test_a_greeting_has_an_end_however_it_comes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    with opened.dial() as sock, suppress(OSError):  # it is cut off
        sock.sendall(b"\x00\x10\x00\x00")  # 4,096 bytes follow
        for _ in range(400):
            sock.sendall(b"\x00")
            time.sleep(0.05)
        raise AssertionError("400 bytes were waited for")


# Programs of another user.
CONNECT = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    print(sock.recv(100))
"""
LISTEN = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(sys.argv[1])
    sock.listen()
    print("listens", flush=True)
    sys.stdin.read()
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts another user's process")


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a local socket, in a folder that all users can write to."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name) / "socket"


@as_root
def test_another_user_is_refused_at_a_local_socket(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = list[str]()

    def enter(connection: Socket, name: str) -> None:
        names.append(name)
        connection.close()

    listening = Listener(listen_at(path), TERMS, enter, "a rank")
    listening.start()
    path.chmod(0o777)
    command = [sys.executable, "-c", CONNECT, str(path)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert read == "b''\n", "it gets nothing"
    with dial(path) as sock:
        initiate_handshake(sock, TERMS, "own")
        assert sock.recv(1) == b"", "its end, after `enter`"
    listening.close()
    assert names == ["own"]
    assert "a rank is refused: it is a process of user 65534, not of 0" in caplog.text


@as_root
def test_another_user_s_local_socket_is_refused(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        with pytest.raises(PeerError, match="it is a process of user 65534, not of 0"):
            dial(path)
        process.communicate()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a:1", ("a", 1)),
        ("65535", ("", 65535)),
        ("[::1]:7", ("::1", 7)),
        ("0.0.0.0:7", ("0.0.0.0", 7)),  # noqa: S104 - it is read
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert read_port(text) == address
    assert read_port(port_text(address)) == address


@pytest.mark.parametrize("text", ["", "a", "a:", "a:0", "a:65536", "a:-1", "a:x", "a:1 "])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        read_port(text)
