"""Messages between a server and its workers, in msgpack.

They have a schema (`WorkerRequest`, `WorkerReply`, both attrs records), so that no data
from a socket can become any other object. `minfer.effects.net.framing` frames them.
"""

from typing import Final

import msgspec
from attrs import frozen

from minfer.effects.serving.input_workers.task import PreparedRequest, QueryResult

MAX_MESSAGE_BYTES: Final = 2**30  # of a message
# What a worker makes of a body: a request, the answer to a question, or, in a
# program of its own, a record that its reader decodes.
WorkResult = PreparedRequest | QueryResult | bytes


@frozen(kw_only=True)
class WorkerRequest:
    """A body, and the path it was posted to."""

    path: str  # of the endpoint or question
    data: bytes
    tenant: str = ""  # the sender, where templates are kept by tenant


@frozen(kw_only=True)
class Refusal:
    """A refusal for the client: the parts of an ApiError."""

    message: str
    param: str | None
    code: str | None
    status: int


@frozen(kw_only=True)
class WorkerReply:
    """The result of a body; `last` if the worker ends now, having grown."""

    prepared: PreparedRequest | None = None
    answer: QueryResult | None = None
    record: bytes | None = None
    refusal: Refusal | None = None
    last: bool = False

    @property
    def result(self) -> WorkResult | None:
        """What the worker made; None if it refused the body."""
        return self.prepared or self.answer or self.record


request_decoder: Final = msgspec.msgpack.Decoder(WorkerRequest)
_reply_decoder: Final = msgspec.msgpack.Decoder(WorkerReply)


def encode(message: WorkerRequest | WorkerReply) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode_reply(data: bytes) -> WorkerReply:
    """The `WorkerReply` of a message. Raises msgspec.DecodeError."""
    return _reply_decoder.decode(data)
