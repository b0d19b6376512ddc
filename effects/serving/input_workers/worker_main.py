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

from minfer.effects.live.errors import check_prompt
from minfer.effects.live.link.frames import FrameReader, FrameWriter
from minfer.effects.serving.client_errors import INTERNAL, ApiError, to_api_error
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.serving.input_workers.task import (
    ModelFacts,
    Prepared,
    WorkerModel,
    work,
)
from minfer.effects.serving.input_workers.worker_messages import (
    READ,
    Refusal,
    WorkerReply,
    WorkerRequest,
    decode_request,
    encode,
)
from minfer.effects.serving.protocol import Endpoint, QueryEndpoint
from minfer.effects.serving.request_parsing.model_names import Models

GROWTH: Final = 2**27  # bytes that a worker may keep beyond what it had at first
CEILING: Final = 2**31  # bytes beyond that which preparing may take in between
ALARM: Final = 60  # seconds after which a body ends its worker, if the server has not
_NICE: Final = 5  # a lower priority than processes that serve streams


TOO_LARGE: Final = "the body takes too much memory to be read; send less at once"
_RSS, _DATA = 1, 5  # columns of /proc/self/statm, in pages


class InputWorker:
    """Prepares bodies by a recipe."""

    def __init__(self, facts: ModelFacts) -> None:
        self._model_info = WorkerModel(facts)
        self._models = Models(facts.names, 0, facts.max_model_len)
        endpoints: list[Endpoint | QueryEndpoint] = [*ENDPOINTS, *QUERY_ENDPOINTS]
        self._targets = {endpoint.path: endpoint for endpoint in endpoints}

    def reply(self, request: WorkerRequest) -> WorkerReply:
        """The reply for a body; never raises."""
        target = self._targets[request.path]
        try:
            result = work(target, request.data, self._model_info, self._models)
            if isinstance(result, Prepared):
                supported = self._model_info.facts.max_position_embeddings
                _check_lengths(result, self._models.max_model_len, supported)
        except MemoryError:
            return WorkerReply(
                refusal=_refusal(ApiError(TOO_LARGE, status=413)), last=True
            )
        except Exception as error:
            api_error = to_api_error(error, target.prompt_field)
            if api_error.status == INTERNAL:
                logging.getLogger(__name__).exception("%s: not prepared", request.path)
            return WorkerReply(refusal=_refusal(api_error))
        if isinstance(result, Prepared):
            return WorkerReply(prepared=result)
        return WorkerReply(answer=result)


def _check_lengths(result: Prepared, context: int, supported: int) -> None:
    """Raise TooLongError already here: a request that cannot run is not sent."""
    request = result.request
    longest = max((len(prompt.ids) for prompt in request.prompts), default=0)
    output = request.pooled is None and request.params.max_tokens != 0
    check_prompt(longest, context, supported, output=output)


def _refusal(error: ApiError) -> Refusal:
    return Refusal(
        message=str(error), param=error.param, code=error.code, status=error.status
    )


def _size(column: int) -> int:
    """Bytes of memory of this process; 0 where the system does not report it."""
    table = Path("/proc/self/statm")
    if not table.exists():
        return 0
    return int(table.read_text().split()[column]) * resource.getpagesize()


def serve(link: socket.socket, worker: InputWorker) -> None:
    """Prepare bodies from the socket until it is closed."""
    most = _size(_RSS) + GROWTH
    reader, writer = FrameReader(), FrameWriter()
    link.sendall(writer.frame(encode(WorkerReply())))
    while data := link.recv(READ):
        result = reader.feed(data)
        while result:
            signal.alarm(ALARM)  # has no handler: it ends the process in any state
            reply = worker.reply(decode_request(result.pop(0)))
            signal.alarm(0)
            last = reply.last or _size(_RSS) > most
            link.sendall(writer.frame(encode(evolve(reply, last=last))))
            if last:
                return


def main() -> int:
    """Run as a worker; returns the exit code."""
    # Signals to the whole group are for the server: it ends this process by the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker = InputWorker(msgspec.json.decode(sys.stdin.buffer.read(), type=ModelFacts))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_size(_DATA) + CEILING, hard))
    # OSError: the server has gone, and needs no reply.
    with socket.socket(fileno=int(sys.argv[1])) as link, contextlib.suppress(OSError):
        serve(link, worker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
