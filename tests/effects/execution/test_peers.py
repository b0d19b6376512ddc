"""Blocks that engines send each other, over local sockets and TCP."""

import errno
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minfer.effects.execution.tiers.peers import inbox as inboxes
from minfer.effects.execution.tiers.peers import peers as peering
from minfer.effects.execution.tiers.peers import remote_memory
from minfer.effects.execution.tiers.peers import sender as senders
from minfer.effects.execution.tiers.peers.block_receiver import BlockReceiver
from minfer.effects.execution.tiers.peers.inbox import Inbox, NotSentError
from minfer.effects.execution.tiers.peers.peer_messages import (
    PeerBlock,
    RemoteMemory,
    copy_bytes,
    terms_of,
)
from minfer.effects.execution.tiers.peers.peer_plan import PeerPlan
from minfer.effects.execution.tiers.peers.peers import Peers
from minfer.effects.execution.tiers.peers.remote_memory import is_installed
from minfer.effects.net import listener
from minfer.effects.net.addresses import Address, port_text
from minfer.effects.net.framing import (
    PeerError,
    framed,
    read_message,
)
from minfer.effects.net.handshake import Challenge, Hello

SIZE = 1000
KEYS = tuple([bytes([i]) * 32 for i in range(20)])
SECRET, LAYOUT = b"secret", b"layout"


def contents_of(key: bytes) -> bytes:
    return (key * SIZE)[:SIZE]


def views(data: bytes) -> list[memoryview]:
    """In two parts, as a cache with scales has them."""
    return [memoryview(bytearray(data[:300])), memoryview(bytearray(data[300:]))]


def fetched(box: Inbox, key: bytes, length: int = SIZE) -> bytes:
    pieces = views(bytes(length))
    box.fetch(key, pieces)
    return b"".join(pieces)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(senders, "SLOT_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(senders, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(peering, "MAX_INBOX_SLOTS", 64)


@pytest.fixture(
    params=[
        "local",
        "tcp",
        pytest.param(
            "nixl",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(not is_installed(), reason="nixl-cu13 is not there"),
            ],
        ),
    ]
)
def decode(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Receiving"]:
    receiving = Receiving(request.param, tmp_path)
    yield receiving
    receiving.peers.close()


class Receiving:
    """An engine that gets blocks."""

    def __init__(self, transport: str, folder: Path, **changes: Any) -> None:
        self.address: Address = folder / "peer"
        if transport != "local":
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.address = free.getsockname()
        listens, nixl = (self.address,), transport == "nixl"
        self.how = transport
        self.peers = Peers(plan("d", listens=listens, nixl=nixl, **changes), 1)
        self.peers.open(LAYOUT, SIZE)
        assert self.peers.inbox is not None
        self.box = self.peers.inbox

    def sender(self, layout: bytes = LAYOUT, groups: int = 1, **changes: Any) -> Peers:
        name = changes.pop("name", "p")
        peers = Peers(plan(name, sends={"d": self.address}, **changes), groups)
        peers.open(layout, SIZE)
        return peers


def plan(name: str, **changes: Any) -> PeerPlan:
    return PeerPlan(**({"name": name, "role": "", "secret": SECRET} | changes))


def send(peers: Peers, key: bytes, data: bytes = b"") -> None:
    peers.write(key, b"", views(data or contents_of(key)))


def test_blocks_that_are_wanted_are_sent(decode: Receiving) -> None:
    prefill = decode.sender()
    prefill.want(KEYS, "d")
    for key in KEYS:
        send(prefill, key)
    send(prefill, KEYS[0])  # nobody wants it
    for key in reversed(KEYS):
        assert fetched(decode.box, key) == contents_of(key)
    assert decode.box.received_bytes == SIZE * len(KEYS)
    [sender] = prefill._senders.values()
    assert (sender.sent, sender.sent_bytes, sender.dropped) == (20, SIZE * 20, 0)
    assert sender._connected
    ways = (sender._connected.memory is not None, sender._connected.writer is not None)
    assert ways == (decode.how == "local", decode.how == "nixl")
    with pytest.raises(NotSentError):
        fetched(decode.box, KEYS[0])  # it was fetched, and its slot is free
    prefill.close()


def test_a_state_is_sent_in_parts_as_large_as_blocks(decode: Receiving) -> None:
    """It needs several slots; and a block beside it one."""
    prefill, size = decode.sender(), 3 * SIZE + 17
    prefill.want(KEYS[:2], "d")
    state, block = random.Random(1).randbytes(size), contents_of(KEYS[1])
    send(prefill, KEYS[0], state)
    send(prefill, KEYS[1])
    for key, contents in ((KEYS[1], block), (KEYS[0], state)):
        pieces = views(bytes(len(contents)))
        decode.peers.read(key, b"", pieces)
        assert b"".join(pieces) == contents
    assert decode.box.received == 5
    assert decode.box.received_bytes == size + SIZE
    prefill.close()


def test_a_state_without_one_of_its_parts_has_not_come(decode: Receiving) -> None:
    prefill = decode.sender()
    prefill.want(KEYS[:1], "d")
    send(prefill, KEYS[0], bytes(3 * SIZE))
    part = KEYS[0] + (2).to_bytes(peering.PART_BYTES)
    assert fetched(decode.box, part) == bytes(SIZE)
    with pytest.raises(NotSentError):
        decode.peers.read(KEYS[0], b"", views(bytes(3 * SIZE)))
    prefill.close()


def test_a_block_is_waited_for(decode: Receiving) -> None:
    prefill, received = decode.sender(), list[bytes]()
    prefill.want(KEYS[:1], "d")
    waits = threading.Thread(target=lambda: received.append(fetched(decode.box, KEYS[0])))
    waits.start()
    assert not received
    send(prefill, KEYS[0])
    waits.join(5)
    assert received == [contents_of(KEYS[0])]
    prefill.close()


def test_a_lost_block_is_not_waited_for_as_long_as_others_come(
    decode: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other blocks would be fetched behind it."""
    monkeypatch.setattr(inboxes, "MAX_WAIT_SECONDS", 0.8)
    prefill, over = decode.sender(), threading.Event()

    def others_come() -> None:
        while not over.wait(0.1):
            prefill.want(KEYS[1:2], "d")
            send(prefill, KEYS[1])

    busy = threading.Thread(target=others_come)
    busy.start()
    timer = threading.Timer(20, over.set)
    timer.start()
    with pytest.raises(NotSentError):
        fetched(decode.box, KEYS[0])
    assert not over.is_set()
    timer.cancel()
    over.set()
    busy.join()
    prefill.close()


def test_after_a_block_did_not_come_others_are_hardly_waited_for(
    decode: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sender may be gone, with the blocks of many requests."""
    monkeypatch.setattr(inboxes, "SILENT_WAIT_SECONDS", 0.1)
    times = list[float]()
    prefill = decode.sender()
    prefill.want(KEYS[:1], "d")
    for key in (*KEYS[1:4], KEYS[0], KEYS[4]):
        began = time.monotonic()
        if key == KEYS[0]:
            send(prefill, key)
            fetched(decode.box, key)
            continue
        with pytest.raises(NotSentError):
            fetched(decode.box, key)
        times.append(time.monotonic() - began)
    first, *middle, last = times
    assert first >= 0.5 > max(middle)
    assert last >= 0.5  # one came meanwhile
    prefill.close()


def test_old_blocks_make_room_and_slots_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peering, "MIN_INBOX_SLOTS", 3)
    monkeypatch.setattr(peering, "MAX_INBOX_SLOTS", 3)
    small = Receiving("local", tmp_path)
    prefill = small.sender()
    prefill.want(KEYS, "d")
    for key in KEYS[:8]:
        send(prefill, key)
    assert fetched(small.box, KEYS[7]) == contents_of(KEYS[7])
    assert small.box.evicted
    for key in KEYS[8:]:
        send(prefill, key)
        assert fetched(small.box, key) == contents_of(key)
    prefill.close()
    small.peers.close()


def test_blocks_that_nobody_fetches_cost_no_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine gets all blocks of a prompt, and has computed most of them before."""
    monkeypatch.setattr(inboxes, "OLD_SECONDS", 0.1)
    monkeypatch.setattr(senders, "SLOT_WAIT_SECONDS", 5.0)
    decode = Receiving("local", tmp_path)
    prefill = decode.sender()
    keys = [number.to_bytes(32, "big") for number in range(120)]
    prefill.want(tuple(keys), "d")
    for key in keys[:48]:
        send(prefill, key)
    time.sleep(0.2)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: send(prefill, key), keys[60:]))
    assert time.monotonic() - began < 5
    assert prefill.totals()["kv_unsent_blocks"] == 0
    for key in keys[100:]:
        assert fetched(decode.box, key) == contents_of(key)
    prefill.close()
    decode.peers.close()


def test_two_engines_send_and_one_dies(decode: Receiving) -> None:
    first, second = decode.sender(name="1"), decode.sender(name="2")
    for sender, keys in ((first, KEYS[:10]), (second, KEYS[10:])):
        sender.want(keys, "d")
        for key in keys[:9]:
            send(sender, key)
    first.close()
    for key in (*KEYS[:9], *KEYS[10:19]):
        assert fetched(decode.box, key) == contents_of(key)
    send(second, KEYS[19])
    assert fetched(decode.box, KEYS[19]) == contents_of(KEYS[19])
    second.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": b"another"}, "the secret is another one"),
        ({"layout": b"8 bits"}, "the model, or how its KV is stored, is another one"),
    ],
)
def test_strangers_are_refused(
    decode: Receiving,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    reason: str,
) -> None:
    stranger = decode.sender(**changes)
    stranger.want(KEYS[:2], "d")
    for key in KEYS[:2]:  # the second one is not even tried
        send(stranger, key)
    assert f"it refuses: {reason!r}" in caplog.text
    assert not decode.box.received
    [sender] = stranger._senders.values()
    assert sender.dropped == 2


def test_an_engine_that_is_not_there_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = Peers(plan("p", sends={"d": tmp_path / "peer"}), 1)
    prefill.open(LAYOUT, SIZE)
    prefill.want(KEYS, "d")
    send(prefill, KEYS[0])
    assert "No such file" in caplog.text
    decode = Receiving("local", tmp_path)
    [sender] = prefill._senders.values()
    sender._failed = -9.0
    send(prefill, KEYS[1])
    assert fetched(decode.box, KEYS[1]) == contents_of(KEYS[1])
    prefill.want(KEYS[2:3], "nobody")
    with pytest.raises(PeerError, match="nobody"):
        send(prefill, KEYS[2], b"x" * SIZE)
    prefill.close()
    decode.peers.close()


def test_an_engine_that_starts_again_elsewhere_leaves_no_sender_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peering, "GONE_SECONDS", 0.0)
    prefill = Peers(plan("p", dials=True), 1)
    prefill.open(LAYOUT, SIZE)
    for key in KEYS[:3]:
        decode = Receiving("tcp", tmp_path)
        assert isinstance(decode.address, tuple)
        prefill.want((key,), port_text(decode.address))
        send(prefill, key)
        assert fetched(decode.box, key) == contents_of(key)
        decode.peers.close()
        at_end = time.monotonic() + 5
        *_, last = prefill._senders.values()
        while not last.has_been_broken(0.0):
            assert time.monotonic() < at_end
            time.sleep(0.01)
    assert len(prefill._senders) == 1
    totals = prefill.totals()
    assert (totals[peering.SENT], totals[peering.SENT_BYTES]) == (3, 3 * SIZE)
    prefill.close()


def raw(address: Address) -> tuple[socket.socket, Challenge]:
    if isinstance(address, Path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(address))
    else:
        sock = socket.create_connection(address)
    sock.settimeout(5)
    return sock, read_message(sock, msgspec.msgpack.Decoder(Challenge), 100)


def greeted(challenge: Challenge, **changes: Any) -> bytes:
    nonce, terms = bytes(16), terms_of(LAYOUT, SECRET)
    mac = terms.proof("dials", challenge.nonce, nonce)
    fields: dict[str, Any] = {
        "version": terms.version,
        "name": "x",
        "layout": LAYOUT,
        "nonce": nonce,
        "mac": mac,
    }
    return framed(Hello(**(fields | changes)))


@pytest.mark.parametrize(
    "greeting",
    [
        lambda _: b"\xff" * 8,  # a length beyond the largest
        lambda _: b"\x03\x00\x00\x00abc",
        lambda _: (
            framed(PeerBlock(KEYS[0], 0, 4, 0, True)) + b"abcd"
        ),  # before the introduction
        lambda said: greeted(said, version="1"),
        lambda said: greeted(said, mac=b""),
        lambda said: greeted(said) + framed(PeerBlock(KEYS[0], 31, 4, 0, True)) + b"abcd",
        lambda said: (
            greeted(said) + framed(PeerBlock(KEYS[0], 999, 4, 0, True)) + b"abcd"
        ),
        lambda said: greeted(said) + framed(PeerBlock(KEYS[0], 31, 10**9, 0, True)),
        lambda said: greeted(said) + framed(PeerBlock(KEYS[0], 31, -1, 0, True)),
        lambda said: greeted(said) + greeted(said),
    ],
)
def test_a_broken_sender_harms_nobody(
    decode: Receiving, greeting: Callable[[Challenge], bytes]
) -> None:
    sock, challenge = raw(decode.address)
    with sock, suppress(ConnectionResetError):
        sock.sendall(greeting(challenge))
        while sock.recv(4096):  # until it is cut
            pass
    assert not decode.box.received
    prefill = decode.sender()
    prefill.want(KEYS, "d")
    for key in KEYS:
        send(prefill, key)
        assert fetched(decode.box, key) == contents_of(key)
    prefill.close()


def test_nobody_writes_to_a_slot_of_another_sender(decode: Receiving) -> None:
    """Not even a block that is refused then: a slot may hold one already."""
    prefill = decode.sender()
    prefill.want(KEYS[:1], "d")
    send(prefill, KEYS[0])
    while not decode.box.received:
        time.sleep(0.001)
    [slot] = [slot_holder.slot for slot_holder in decode.box._blocks.values()]
    sock, challenge = raw(decode.address)
    with sock, suppress(ConnectionError):
        sock.sendall(
            greeted(challenge) + framed(PeerBlock(KEYS[1], slot, 4, 0)) + b"abcd"
        )
        while sock.recv(4096):
            pass
    assert fetched(decode.box, KEYS[0]) == contents_of(KEYS[0])
    prefill.close()


def test_senders_are_taken_again_after_there_were_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_ERROR_PAUSE_SECONDS", 0.01)
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many files")]

    def flaky(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", flaky)
    decode = Receiving("local", tmp_path)
    prefill = decode.sender()
    prefill.want(KEYS[:1], "d")
    send(prefill, KEYS[0])
    assert fetched(decode.box, KEYS[0]) == contents_of(KEYS[0])
    assert not failures
    prefill.close()
    decode.peers.close()


def test_an_engine_that_is_gone_keeps_no_block_from_another(decode: Receiving) -> None:
    sends = {"a": Path("/nowhere"), "d": decode.address}
    prefill = Peers(plan("p", sends=sends), 1)
    prefill.open(LAYOUT, SIZE)
    prefill.want(KEYS[:2], "a")
    prefill.want(KEYS[1:3], "d")
    for key in KEYS[:3]:  # of one transfer, which ends with the first error
        send(prefill, key)
    for key in KEYS[1:3]:
        assert fetched(decode.box, key) == contents_of(key)
    assert prefill.totals()["kv_unsent_blocks"] == 2
    prefill.close()


def test_a_slot_is_nobody_elses_while_a_block_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks in another thread meanwhile."""
    writes, goes_on = threading.Event(), threading.Event()

    def slow(into: memoryview, contents: memoryview) -> None:
        writes.set()
        goes_on.wait(5)
        copy_bytes(into, contents)

    monkeypatch.setattr(senders, "copy_bytes", slow)
    decode = Receiving("local", tmp_path)
    prefill = decode.sender()
    prefill.want(KEYS[:1], "d")
    thread = threading.Thread(target=lambda: send(prefill, KEYS[0]))
    thread.start()
    assert writes.wait(5)
    [sender] = prefill._senders.values()
    sender._fail("it broke")
    time.sleep(0.1)  # in which its slots would be granted to others
    assert decode.box._connections
    goes_on.set()
    thread.join()
    while decode.box._connections:
        time.sleep(0.001)
    prefill.close()
    decode.peers.close()


def test_a_receiver_that_reads_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "_SEND_TIMEOUT", struct.pack("@ll", 0, 100_000))
    monkeypatch.setattr(BlockReceiver, "_receive", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(peering, "MAX_INBOX_SLOTS", 4096)
    decode = Receiving("local", tmp_path)
    prefill = decode.sender()
    keys = [number.to_bytes(32, "big") for number in range(1024)]  # a connection's share
    prefill.want(tuple(keys), "d")
    for key in keys:
        send(prefill, key)
    [sender] = prefill._senders.values()
    assert sender.dropped
    prefill.close()
    decode.peers.close()


def test_an_engine_without_room_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang, and blocks for other engines wait meanwhile."""
    monkeypatch.setattr(Inbox, "make_room", lambda *_: None)
    monkeypatch.setattr(peering, "MIN_INBOX_SLOTS", 2)
    monkeypatch.setattr(peering, "MAX_INBOX_SLOTS", 2)
    decode = Receiving("local", tmp_path)
    monkeypatch.setattr(senders, "SLOT_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(senders, "FULL_SECONDS", 60.0)
    waits, wait = list[float](), senders._Connected._wait_for_slot

    def counted(link: senders._Connected, patience: float) -> int | None:
        waits.append(patience)
        return wait(link, patience)

    monkeypatch.setattr(senders._Connected, "_wait_for_slot", counted)
    prefill = decode.sender()
    prefill.want(KEYS, "d")
    for key in KEYS:
        send(prefill, key)
    # Two blocks find room. The third one waits, and waits again after its complaint.
    assert waits == [0.2] * 4 + [0.0] * (len(KEYS) - 3)
    assert fetched(decode.box, KEYS[0]) == contents_of(KEYS[0])
    prefill.close()
    decode.peers.close()


def test_a_block_of_another_size_is_not_taken(
    decode: Receiving, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = decode.sender()
    prefill.want(KEYS, "d")
    send(prefill, KEYS[0], b"x" * 500)
    with pytest.raises(NotSentError, match="500"):
        fetched(decode.box, KEYS[0])
    box = decode.box
    granted = [
        slot for connection in box._connections.values() for slot in connection.slots
    ]
    assert sorted([*box._free, *granted]) == [*range(box.slots)]  # its slot came back
    prefill._slot_bytes = 2 * SIZE  # it has larger blocks
    send(prefill, KEYS[1], b"x" * 1001)
    assert "a block of 1001 bytes" in caplog.text
    prefill.close()


def test_what_is_written_to_a_slot_too_late_is_found_out(tmp_path: Path) -> None:
    decode = Receiving("tcp", tmp_path)
    prefill = decode.sender()
    prefill.want(KEYS, "d")
    send(prefill, KEYS[0])
    while not decode.box.received:
        time.sleep(0.001)
    decode.box.memory[:] = b"x" * len(decode.box.memory)
    with pytest.raises(NotSentError, match="a block was changed on its way"):
        fetched(decode.box, KEYS[0])
    send(prefill, KEYS[1])
    assert fetched(decode.box, KEYS[1]) == contents_of(KEYS[1])
    prefill.close()
    decode.peers.close()


@pytest.mark.long
@pytest.mark.skipif(not is_installed(), reason="nixl-cu13 is not there")
def test_nixl_writes_nothing_to_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Receiving("nixl", tmp_path).peers.close()
    assert not capfd.readouterr().out


def test_without_nixl_blocks_go_over_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_memory, "MODULE", "not_there")
    decode = Receiving("tcp", tmp_path)
    decode.peers._listeners[0].remote = RemoteMemory(b"", 0)
    prefill = decode.sender()
    prefill.want(KEYS, "d")
    for key in KEYS:
        send(prefill, key)
        assert fetched(decode.box, key) == contents_of(key)
    [record] = caplog.records
    assert "KV blocks go over TCP alone: NIXL cannot be used" in record.message
    prefill.close()
    decode.peers.close()


def test_groups_have_keys_of_their_own(decode: Receiving) -> None:
    prefill = decode.sender(groups=2)
    prefill.want(KEYS[:1], "d")
    second = b"\x01" + KEYS[0]
    send(prefill, second)
    assert fetched(decode.box, second) == contents_of(second)
    prefill.close()
