"""What an endpoint is: a body becomes one inner request, outputs become events.

    bytes --read--> Inquiry --generation--> GenerationRequest --> engine
    Event <----------- Writer.write, Writer.end <----- RequestOutput

An endpoint is a module that has an `Endpoint`, and `endpoints.py` has a row for it.
What needs no tokens, as counting those of a prompt, is a `Question` instead: its body is
answered at once, with one object.
Reading has two steps, because the second takes a while where a prompt is long, and then
happens in a thread: `read` checks fields, `generation` renders and tokenizes. Nothing
here, and nothing in an endpoint's module, knows how events reach the client.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import field, frozen
from pydantic import BaseModel

from minfer.effects.live.edge import Urgency
from minfer.effects.live.prompts import Asked
from minfer.effects.live.served import ServedModel
from minfer.effects.serving.errors import ApiError
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Event, Failure
from minfer.effects.text.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.plan import LAST
from minfer.request import SamplingParams


@frozen(kw_only=True)
class Include:
    """What an answer holds besides text and ends."""

    usage: bool = False  # at the end of a stream; a whole answer always tells
    timing: bool = False  # where the time of each prompt went
    top_logprobs: int = 0  # likeliest tokens named beside each one, if any is scored
    echo: tuple[str, ...] = ()  # by prompt: what comes before the text of its samples
    repeat: Mapping[str, object] = field(factory=dict)  # fields that the answer has too


@frozen(kw_only=True)
class Pooled:
    """What is asked for instead of tokens: a vector of each prompt."""

    how: str = LAST
    normalize: bool = True  # to a length of 1
    base64: bool = False  # float32 in little-endian order, instead of a list


@frozen(kw_only=True)
class GenerationRequest:
    """What a client of any protocol asks the engine for."""

    prompts: tuple[Asked, ...]
    params: SamplingParams  # of every prompt; sample s of prompt p is choice p * n + s
    urgency: Urgency
    stream: bool
    include: Include
    pooled: Pooled | None = None  # then nothing is generated


@frozen
class Served:
    """What serving one prompt took, known once all its samples have ended."""

    prompt_tokens: int
    cached_tokens: int  # of these, in the prefix cache
    metrics: RequestMetrics

    @classmethod
    def of(cls, last: RequestOutput) -> "Served":
        """What the last output of a prompt tells."""
        return cls(len(last.prompt_token_ids), last.num_cached_tokens, last.metrics)


class Inquiry(Protocol):
    """A body whose fields are good, not yet held against a model."""

    @property
    def model(self) -> str | None:
        """The name of the model that is asked for; None: whichever there is."""

    @property
    def stream(self) -> bool:
        """Whether the answer is to come in parts."""

    def generation(self, llm: ServedModel) -> GenerationRequest:
        """The request to that model. Raises errors of which `told_of` knows."""


class Writer(Protocol):
    """Writes one answer; it is called in the order in which outputs come."""

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """The events for what is new of a choice."""

    def end(self, served: Sequence[Served]) -> list[Event]:
        """The events after the last choice has ended; `served` is by prompt."""


@frozen(kw_only=True)
class Endpoint:
    """One endpoint that generates."""

    name: str  # where all endpoints are reached at one path
    path: str
    summary: str = ""  # a line about it, for the description of all
    body: type[BaseModel] | None = None  # what is read, likewise
    id_prefix: str  # of its answers' ids
    prompt_field: str  # that errors of a prompt are about
    streams: bool = True  # whether an answer can come in parts
    read: Callable[[bytes], Inquiry]  # raises ApiError
    writer: Callable[[Stamp, GenerationRequest, Tokenizer | None], Writer]
    failure: Callable[[ApiError], Failure]  # how the protocol spells an error


class Asking(Protocol):
    """A body that asks a question of a model."""

    @property
    def model(self) -> str | None:
        """The name of the model that is asked for; None: whichever there is."""

    def answer(self, llm: ServedModel) -> Mapping[str, object]:
        """The answer. It may take a while. Raises errors of which `told_of` knows."""


@frozen(kw_only=True)
class Question:
    """One endpoint that answers without the engine."""

    path: str
    summary: str
    prompt_field: str  # that errors of a prompt are about
    body: type[BaseModel]
    read: Callable[[bytes], Asking]  # raises ApiError
    failure: Callable[[ApiError], Failure]
