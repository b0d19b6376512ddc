"""Sends batches of KV events over ZeroMQ, as vLLM's publisher does.

    PUB      topic, number (8 bytes, big-endian), batch
    ROUTER   a first number --> the batches from there on that are kept, then number -1

Batches are numbered from 0. A batch that does not fit into the queue is lost, and its
number with it, so that subscribers see the gap.

A thread of its own sends: the engine's thread never waits for a socket.
"""

import logging
import threading
from collections import deque
from queue import Empty, Full, Queue
from typing import Any, Final

import msgspec
import zmq
from attrs import frozen

from minfer.effects.live.kv_events.event_messages import EventBatch
from minfer.effects.setup.kv_events_settings import SETTING, KvEventsConfig
from minfer.values.checks import ConfigError

_NUMBER_BYTES: Final = 8
_END_OF_REPLAY: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_REPLAY_REQUEST_FRAMES: Final = 3  # who asks, nothing, the first number
_POLL_SECONDS: Final = 0.05  # from one look at requests for missed batches to the next
_CLOSE_SECONDS: Final = 2.0  # that the last batches may take to be handed to ZeroMQ
_LINGER_MS: Final = 500  # that ZeroMQ may take to send them
_log: Final = logging.getLogger("minfer.engine")


@frozen
class _Numbered:
    number: int
    batch: EventBatch


class ZmqPublisher:
    """Publishes batches at the addresses of the settings. Raises ConfigError if it cannot
    listen there.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._queue = Queue[_Numbered | None](config.max_queue_size)
        self._kept = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._next = 0
        self._lost = False  # whether the last batch was
        self._context = zmq.Context()
        try:
            self._publisher = self._open_publisher()
            self._replay = self._open_replay()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # A program may end without closing its model.
        self._thread = threading.Thread(
            target=self._run, name="minfer-kv-events", daemon=True
        )
        self._thread.start()

    @property
    def rank(self) -> int:
        """The number of the engine among those of a server."""
        return self._config.rank

    def publish(self, batch: EventBatch) -> None:
        """Send a batch soon; in one thread at a time."""
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait(_Numbered(number, batch))
        except Full:
            if not self._lost:
                _log.warning(
                    "KV events are lost: %d batches wait to be sent (max_queue_size)",
                    self._config.max_queue_size,
                )
            self._lost = True
        else:
            self._lost = False

    def close(self) -> None:
        """Send what waits, and close the sockets. May be called again."""
        if self._context.closed:
            return
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        except Full:  # it is stuck
            return
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._context.destroy(linger=_LINGER_MS)

    def _open_publisher(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUB)
        socket.set_hwm(self._config.hwm)
        address = self._config.endpoint
        listens = "*" in address or "::" in address or not address.startswith("tcp://")
        _connect(socket, address, listens=listens)
        return socket

    def _open_replay(self) -> "zmq.Socket[bytes] | None":
        if self._config.replay_endpoint is None:
            return None
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)  # all kept batches may be asked for at once
        _connect(socket, self._config.replay_endpoint, listens=True)
        return socket

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            self._answer_replays()
            try:
                numbered = self._queue.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if numbered is None:
                return
            number = numbered.number.to_bytes(_NUMBER_BYTES, "big")
            payload = encoder.encode(numbered.batch)
            self._kept.append((number, payload))
            self._publisher.send_multipart((self._topic, number, payload))

    def _answer_replays(self) -> None:
        """Send the batches that subscribers ask for again."""
        while self._replay is not None and self._replay.poll(0):
            frames: list[Any] = self._replay.recv_multipart()
            if len(frames) != _REPLAY_REQUEST_FRAMES or len(frames[2]) != _NUMBER_BYTES:
                _log.warning("a request for missed KV events is invalid: %r", frames[1:])
                continue
            subscriber, _, first = frames
            for number, payload in self._kept:
                if number >= first:
                    self._replay.send_multipart((subscriber, b"", number, payload))
            self._replay.send_multipart((subscriber, b"", _END_OF_REPLAY, b""))


def _connect(socket: "zmq.Socket[bytes]", address: str, *, listens: bool) -> None:
    """Listen at an address, or connect to it. Raises ConfigError."""
    socket.setsockopt(zmq.IPV6, "::" in address)
    try:
        if listens:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        verb = "listen at" if listens else "connect to"
        raise ConfigError(
            f"{SETTING}: cannot {verb} {address}: {error}; choose another address"
        ) from None
