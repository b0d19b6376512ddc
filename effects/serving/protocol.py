"""What an endpoint is: a body becomes one inner request, outputs become events.

    bytes --read--> Inquiry --generation--> GenerationRequest --> engine
    Event <----------- Writer.write, Writer.end <----- RequestOutput

An endpoint is a module that has an `Endpoint`, and `endpoints.py` has a row for it.
What needs no tokens, as counting those of a prompt, is a `Question` instead: its body is
answered at once, with one object.
Reading has two steps: `read` checks fields, `generation` renders and tokenizes. Both may
take a while where a body is long, and then happen in a process of their own
(`preparing`), where there is no engine: a body is held against `Grounds`, and nothing
else. Nothing here, and nothing in an endpoint's module, knows how events reach a client.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen
from pydantic import BaseModel

from minfer.effects.live.beam_search import BeamSearchParams
from minfer.effects.live.edge import Urgency
from minfer.effects.live.prompts import Asked
from minfer.effects.serving.errors import ApiError
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Event, Failure
from minfer.effects.text.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsers, Parsing
from minfer.plan import LAST
from minfer.request import SamplingParams
from minfer.structured import StructuredOutputs

if TYPE_CHECKING:
    from minfer.effects.text.chat import Conversation, Tools


@frozen(kw_only=True)
class Include:
    """What an answer holds besides text and ends."""

    usage: bool = False  # at the end of a stream; a whole answer always tells
    timing: bool = False  # where the time of each prompt went
    top_logprobs: int = 0  # likeliest tokens named beside each one, if any is scored
    echo: tuple[str, ...] = ()  # by prompt: what comes before the text of its samples
    prompt_logprobs: int | None = None  # likeliest tokens at each place of a prompt
    repeat: Mapping[str, object] = field(factory=dict)  # fields that the answer has too


@frozen(kw_only=True)
class Pooled:
    """What is asked for instead of tokens: a vector of each prompt."""

    how: str = LAST
    normalize: bool = True  # to a length of 1
    base64: bool = False  # float32 in little-endian order, instead of a list


@frozen
class Part:
    """Something that an answer has to match in a part of it, and the field that says so.
    If the whole cannot be compiled, errors of its parts say why.
    """

    field: str
    asked: StructuredOutputs


@frozen(kw_only=True)
class GenerationRequest:
    """What a client of any protocol asks the engine for."""

    prompts: tuple[Asked, ...]
    params: SamplingParams  # of every prompt; sample s of prompt p is choice p * n + s
    urgency: Urgency
    stream: bool
    include: Include
    pooled: Pooled | None = None  # then nothing is generated
    beams: BeamSearchParams | None = None  # then nothing is drawn
    constrained_by: str = ""  # the field that says what the answer must look like
    parts: tuple[Part, ...] = ()  # of what the answer must look like
    parsing: Parsing | None = None  # what is looked for in each answer, if anything is
    wanted_by: str = ""  # the field that says how many tokens to write, if one does

    @property
    def width(self) -> int:
        """Sequences that each prompt takes in the engine."""
        return self.params.samples if self.beams is None else self.beams.beam_width


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


class Vocabulary(Protocol):
    """A model's spec, as far as prompts are concerned."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def hidden_size(self) -> int:
        """Elements of a vector that a prompt is pooled to."""


class Context(Protocol):
    """An engine's configuration, as far as prompts are concerned."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output."""


class Sizes(Protocol):
    """A model's setup, as far as prompts are concerned."""

    @property
    def spec(self) -> Vocabulary:
        """What the model is."""

    @property
    def config(self) -> Context:
        """How its engine is configured."""

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The makers' advice, changed by `overrides`. Raises ParameterError."""


class Grounds(Protocol):
    """What bodies are held against: a `ServedModel`, or its likeness with no engine."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""

    @property
    def setup(self) -> Sizes:
        """The model's sizes."""

    @property
    def parsers(self) -> Parsers:
        """How the model writes calls of tools and reasoning."""

    def render(
        self,
        messages: "Conversation",
        *,
        tools: "Tools | None" = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; see `ServedModel.render`."""


class Inquiry(Protocol):
    """A body whose fields are good, not yet held against a model."""

    @property
    def model(self) -> str | None:
        """The name of the model that is asked for; None: whichever there is."""

    @property
    def stream(self) -> bool:
        """Whether the answer is to come in parts."""

    def generation(self, llm: Grounds) -> GenerationRequest:
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

    def answer(self, llm: Grounds) -> Mapping[str, object]:
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
