"""A replica of the deployment `engine` of Ray Serve: an engine, in the replica's own
process, and the ASGI application that answers its requests.
"""

import argparse
import contextlib
from collections.abc import AsyncGenerator
from itertools import count
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import evolve
from ray import serve
from starlette.types import Message

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.application import Application
from minfer.effects.serving.distributed.asgi_calls import answers
from minfer.effects.serving.distributed.serve_router import NUMBER
from minfer.effects.serving.processes.server import read_options
from minfer.effects.serving.request_parsing.answer_parsing import log_unknown_format
from minfer.runs.replica_events import load_report

# Seconds between two parts of an answer. Each part passes through Ray twice: sent token
# by token, many streams at once would be slower than the engine.
PAUSE: Final = 0.02


class ServedEngine:
    """An engine for the options of `minfer serve`; `reasoning_key` is that of all
    replicas. Ray Serve calls all methods in one event loop, which has a thread of its
    own, and reports errors of the constructor.
    """

    def __init__(self, options: argparse.Namespace, reasoning_key: bytes) -> None:
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._reports = count(1)
        args, http = read_options(options)
        if args.journal is not None:
            args = evolve(args, journal=Path(args.journal) / self._name)
        self._llm = AsyncLLM(**attrs.asdict(args, recurse=False))
        self._llm.warm_grammars()
        log_unknown_format(self._llm)
        self._app = Application(
            self._llm,
            http.names,
            max_body=http.max_body,
            bounds=evolve(http.bounds, reasoning_key=reasoning_key),
        )

    async def http(
        self, head: dict[str, Any], body: bytes, home: str = ""
    ) -> AsyncGenerator[str | list[Message]]:
        """Answer a request whose scope is `head`: yields the name of this replica, and
        then the ASGI messages of the answer, in batches. `home` is only read by the
        router.
        """
        del home
        yield self._name
        async with contextlib.aclosing(answers(self._app, head, body, PAUSE)) as messages:
            async for each in messages:
                yield each

    def check_health(self) -> None:
        """Raise RuntimeError if the engine does not make progress: Ray Serve then
        replaces this replica.
        """
        if illness := self._app.health.illness():
            raise RuntimeError(illness)

    def record_routing_stats(self) -> dict[str, Any]:
        """The fields of a LoadReport for `serve_router`, and the number of the report."""
        driver = self._llm.worker.driver
        load = load_report(driver.config, self._name, driver.state)
        return {NUMBER: next(self._reports), **attrs.asdict(load)}

    def __del__(self) -> None:
        """Close the engine. Ray Serve calls this when all requests have been answered, or
        graceful_shutdown_timeout_s is over.
        """
        if app := getattr(self, "_app", None):
            app.close()
            self._llm.close()
