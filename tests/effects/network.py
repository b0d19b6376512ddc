"""A network between two processes, that can be slow, cut, or stall."""

import contextlib
import socket
import threading
import time
from typing import Final

from attrs import define, field

from minfer.effects.net.addresses import Port

_CHUNK: Final = 2**16
_POLL_SECONDS: Final = 0.01


@define(eq=False)
class Network:
    """Passes on what comes to `port` to another port, both ways."""

    to: Port
    at: Port = ("127.0.0.1", 0)  # where it listens; 0: any port
    delay: float = 0.0  # seconds that each piece takes
    stalled: bool = False  # nothing comes through, and no connection ends
    most: int | None = None  # bytes that still come through; then all is cut
    passed: int = 0  # bytes
    port: Port = field(init=False)
    _listener: socket.socket = field(init=False)
    _open: list[socket.socket] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self._listener = socket.create_server(self.at)
        self.port = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections."""
        open_sockets, self._open = self._open, []
        for sock in open_sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def heal(self) -> None:
        """Have all connections end that were hindered; new ones are not."""
        self.delay, self.most, self.stalled = 0.0, None, False

    def close(self) -> None:
        """Pass nothing on any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self.to)
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._pass, args=(source, target), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                while self.stalled:
                    time.sleep(_POLL_SECONDS)
                if self.delay:
                    time.sleep(self.delay)
                if self.most is not None:
                    data, self.most = data[: self.most], max(0, self.most - len(data))
                    target.sendall(data)
                    if not self.most:
                        self.cut()
                        return
                else:
                    target.sendall(data)
                self.passed += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
