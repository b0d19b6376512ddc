"""A front's end of a real link that does only what it is told to."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from attrs import define, field

from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.net.frames import FrameReader, FrameWriter


@define(eq=False)
class Plain:
    """A front that does only what it is told to."""

    socket: socket.socket
    writer: FrameWriter = field(factory=FrameWriter)
    reader: FrameReader = field(factory=FrameReader)

    def say(self, *messages: wire.ToEngine) -> None:
        for message in messages:
            self.socket.sendall(self.writer.frame(wire.encode(message)))

    def hear(self) -> list[wire.ToFront]:
        data = self.socket.recv(2**16)
        return [wire.read_to_front(one) for one in self.reader.feed(data)]

    def rest(self) -> list[wire.ToFront]:
        """What is still sent until the other end closes."""
        self.socket.settimeout(10)
        found = list[wire.ToFront]()
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(2**16):
                found += [wire.read_to_front(one) for one in self.reader.feed(data)]
        return found

    def is_cut(self) -> bool:
        """Whether the other end has closed, once all was read that was sent."""
        self.socket.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(2**20):
                pass
        return True


@contextlib.contextmanager
def plain(path: Path, *messages: wire.ToEngine) -> Iterator[Plain]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(str(path))
        made = Plain(link)
        made.say(*messages)
        yield made
