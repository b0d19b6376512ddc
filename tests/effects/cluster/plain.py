"""An API server's end of a real link that does only what it is told to."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from attrs import define, field

from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.link_terms import own_terms
from minfer.effects.net.framing import FrameReader, frame
from minfer.effects.net.listener import connect


@define(eq=False)
class Plain:
    """An API server that does only what it is told to."""

    socket: socket.socket
    reader: FrameReader = field(factory=lambda: FrameReader(wire.MAX_MESSAGE_BYTES))

    def say(self, *messages: wire.ToEngine) -> None:
        for message in messages:
            self.socket.sendall(frame(wire.encode(message)))

    def hear(self) -> list[wire.ToApiServer]:
        data = self.socket.recv(2**16)
        return [wire.read_to_api_server(message) for message in self.reader.feed(data)]

    def rest(self) -> list[wire.ToApiServer]:
        """What is still sent until the other end closes."""
        self.socket.settimeout(10)
        messages = list[wire.ToApiServer]()
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(2**16):
                messages += [
                    wire.read_to_api_server(message) for message in self.reader.feed(data)
                ]
        return messages

    def is_cut(self) -> bool:
        """Whether the other end has closed, once all was read that was sent."""
        self.socket.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(2**20):
                pass
        return True


@contextlib.contextmanager
def plain(path: Path, *messages: wire.ToEngine) -> Iterator[Plain]:
    """An API server at the engine of a path, once that has let it in."""
    with connect(path, own_terms(), "plain") as link:
        front = Plain(link)
        front.say(*messages)
        yield front
