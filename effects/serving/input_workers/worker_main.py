"""A worker: one process that prepares one body after the other, until it has grown.

    python -m minfer.effects.serving.input_workers.worker_main DESCRIPTOR

It reads its recipe from standard input and frames from the socket that it inherited; an
empty reply means that it is ready. It ends when the socket is closed, or when a body
takes far too long, so that it never outlives its server; its last reply announces its end
if it has grown by more than `GROWTH`: memory that tokenizers and interpreters keep of
large bodies returns to the system with the process.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
from attrs import evolve

from minfer.effects.live.errors import too_long
from minfer.effects.live.link.frames import FrameReader, FrameWriter
from minfer.effects.serving.endpoints import ENDPOINTS, QUESTIONS
from minfer.effects.serving.errors import INTERNAL, ApiError, told_of
from minfer.effects.serving.input_workers.task import Likeness, Prepared, Recipe, work
from minfer.effects.serving.input_workers.worker_messages import (
    READ,
    Ask,
    Refusal,
    Reply,
    encoded,
    read_ask,
)
from minfer.effects.serving.protocol import Endpoint, Question
from minfer.effects.serving.request_parsing.model_names import Models

GROWTH: Final = 2**27  # bytes that a worker may keep beyond what it had at first
CEILING: Final = 2**31  # bytes beyond that which preparing may take in between
ALARM: Final = 60  # seconds after which a body ends its worker, if the server has not
_NICE: Final = 5  # a lower priority than processes that serve streams


TOO_LARGE: Final = "the body takes too much memory to be read; send less at once"
_RSS, _DATA = 1, 5  # columns of /proc/self/statm, in pages


class Worker:
    """Prepares bodies by a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._grounds = Likeness(recipe)
        self._models = Models(recipe.names, 0, recipe.max_model_len)
        every: list[Endpoint | Question] = [*ENDPOINTS, *QUESTIONS]
        self._targets = {one.path: one for one in every}

    def reply(self, ask: Ask) -> Reply:
        """The reply for a body; never raises."""
        target = self._targets[ask.path]
        try:
            found = work(target, ask.data, self._grounds, self._models)
            if isinstance(found, Prepared):
                able = self._grounds.recipe.max_position_embeddings
                _check_lengths(found, self._models.max_model_len, able)
        except MemoryError:
            return Reply(refusal=_refusal(ApiError(TOO_LARGE, status=413)), last=True)
        except Exception as error:
            told = told_of(error, target.prompt_field)
            if told.status == INTERNAL:
                logging.getLogger(__name__).exception("%s: not prepared", ask.path)
            return Reply(refusal=_refusal(told))
        if isinstance(found, Prepared):
            return Reply(prepared=found)
        return Reply(answer=found)


def _check_lengths(found: Prepared, context: int, able: int) -> None:
    """Raise TooLongError already here: a request that cannot run is not sent."""
    longest = max((len(prompt.ids) for prompt in found.request.prompts), default=0)
    if longest >= context:
        raise too_long(longest, context, able)


def _refusal(told: ApiError) -> Refusal:
    return Refusal(
        message=str(told), param=told.param, code=told.code, status=told.status
    )


def _size(column: int) -> int:
    """Bytes of memory of this process; 0 where the system does not report it."""
    table = Path("/proc/self/statm")
    if not table.exists():
        return 0
    return int(table.read_text().split()[column]) * resource.getpagesize()


def serve(link: socket.socket, worker: Worker) -> None:
    """Prepare bodies from the socket until it is closed."""
    most = _size(_RSS) + GROWTH
    reader, writer = FrameReader(), FrameWriter()
    link.sendall(writer.frame(encoded(Reply())))
    while data := link.recv(READ):
        found = reader.feed(data)
        while found:
            signal.alarm(ALARM)  # has no handler: it ends the process in any state
            reply = worker.reply(read_ask(found.pop(0)))
            signal.alarm(0)
            last = reply.last or _size(_RSS) > most
            link.sendall(writer.frame(encoded(evolve(reply, last=last))))
            if last:
                return


def main() -> int:
    """Run as a worker; returns the exit code."""
    # Signals to the whole group are for the server: it ends this process by the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker = Worker(msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_size(_DATA) + CEILING, hard))
    # OSError: the server has gone, and needs no reply.
    with socket.socket(fileno=int(sys.argv[1])) as link, contextlib.suppress(OSError):
        serve(link, worker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
