"""The servers that cases talk to; each is started when the first case needs it."""

import contextlib
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.effects.scripted import write_talker
from tests.effects.served import Serving, serving
from tests.effects.tiny_model import write_checkpoint

Client = TypeVar("Client", bound=contextlib.AbstractContextManager[Any])
KEY: Final = "secret"
# A server that takes a while, with made-up tokens.
_SLOW: Final[dict[str, Any]] = {
    "executor": "oracle",
    "num_gpu_blocks_override": 4000,
    "step": 0.002,
}


class Servers:
    """Servers by what is special about them; `folder` is theirs to write to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = contextlib.ExitStack()

    def close(self) -> None:
        """End all that were started."""
        self._open.close()

    def kept(self, client: Client) -> Client:
        """A client, closed before the servers are."""
        self._open.enter_context(client)
        return client

    @cached_property
    def bundled(self) -> Serving:
        """The bundled model; in float32, as else a batch would decide last bits."""
        names = ("bundled", "alias/of-it")
        settings: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 128}
        return self._open.enter_context(serving(names=names, **settings))

    @cached_property
    def slow(self) -> Serving:
        """A model that could write for minutes."""
        return self._open.enter_context(serving(self._tiny, **_SLOW))

    @cached_property
    def locked(self) -> Serving:
        """A server that wants a key."""
        service = {"api_key": KEY}
        return self._open.enter_context(serving(self._tiny, service=service, **_SLOW))

    @cached_property
    def narrow(self) -> Serving:
        """A server with room for one request that runs, and one in line."""
        room: dict[str, Any] = {"max_num_seqs": 1, "max_waiting": 1}
        return self._open.enter_context(serving(self._tiny, **room, **_SLOW))

    @cached_property
    def talker(self) -> Serving:
        """A model that knows tools and reasoning, and says what `say` has it say."""
        path = write_talker(self._folder / "talker")
        settings: dict[str, Any] = {"executor": "dry", "num_gpu_blocks_override": 400}
        return self._open.enter_context(serving(path, **settings))

    def doomed(self) -> contextlib.AbstractContextManager[Serving]:
        """A server that its case may shut down."""
        return serving(self._tiny, **_SLOW)

    @cached_property
    def _tiny(self) -> str:
        path = self._folder / "tiny"
        return str(write_checkpoint(path, max_position_embeddings=100_000))
