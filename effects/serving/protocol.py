"""The protocol of an endpoint: a body becomes one request, outputs become events.

    bytes --read--> ParsedBody --generation--> GenerationRequest --> engine
    StreamEvent <---- AnswerWriter.write, AnswerWriter.end <---- RequestOutput

An endpoint is a module that has an `Endpoint`, and `endpoints.py` has a row for it. One
that needs no generated tokens, such as counting a prompt's tokens, is a `QueryEndpoint`
instead: its body is answered at once, with one object. Reading has two steps: `read`
checks fields, `generation` renders and tokenizes. Both may take a while for a long body,
and then run in a process of their own (`input_workers`), without an engine: a body is
checked against `ModelInfo` only. Nothing here, and nothing in an endpoint's module,
depends on how events reach a client.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from attrs import field, frozen
from pydantic import BaseModel

from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import Failure, StreamEvent
from minfer.effects.text.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsers, Parsing
from minfer.records.request import LAST, SamplingParams
from minfer.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    from minfer.effects.text.chat_templates import Conversation, Tools


@frozen(kw_only=True)
class CallTarget:
    """The tool of the client that a call is of: the model may see another name."""

    name: str
    namespace: str = ""  # that the tool is in, if any
    custom: bool = False  # whether its input is text


@frozen(kw_only=True)
class Include:
    """The contents of an answer besides text and finish reasons."""

    usage: bool = False  # at the end of a stream; a whole answer always has it
    usage_in_chunks: bool = False  # by then, in each chunk of a stream
    timing: bool = False  # where the time of each prompt went
    top_logprobs: int = 0  # likeliest tokens named beside each one, if any is scored
    echo: tuple[str, ...] = ()  # by prompt: the text before that of its samples
    token_ids: bool = False  # of the prompt and of the output
    tokens_as_ids: bool = False  # names of tokens in log-probabilities: "token_id:7"
    reasoning: bool = True
    prompt_logprobs: int | None = None  # likeliest tokens at each place of a prompt
    repeat: Mapping[str, object] = field(factory=dict)  # that the answer repeats
    # By the name that the model sees: of tools that clients know otherwise.
    call_targets: Mapping[str, CallTarget] = field(factory=dict)
    # The key with which reasoning is encrypted, if that is requested.
    reasoning_key: bytes = field(default=b"", repr=False)


@frozen(kw_only=True)
class PoolingOptions:
    """A request for a vector of each prompt, instead of tokens."""

    pooling_type: str = LAST
    normalize: bool = True  # to a length of 1
    base64: bool = False  # float32 in little-endian order, instead of a list


@frozen
class PartConstraint:
    """A constraint of a part of an answer, and the field it comes from. If the whole
    constraint cannot be compiled, errors of its parts explain why.
    """

    field: str
    constraint: StructuredOutputs


@frozen(kw_only=True)
class GenerationRequest:
    """A request to the engine, from a client of any protocol."""

    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams  # of every prompt; sample s of prompt p is choice p * n + s
    urgency: SchedulingHints
    stream: bool
    include: Include
    pooled: PoolingOptions | None = None  # then nothing is generated
    beams: BeamSearchParams | None = None  # then nothing is sampled
    constraint_field: str = ""  # the field with the answer's constraint
    parts: tuple[PartConstraint, ...] = ()  # of the answer's constraint
    # In the place of a constraint that cannot be compiled, and the field that it ignores.
    fallback: PartConstraint | None = None
    parsing: Parsing | None = None  # what is parsed in each answer, if anything
    max_tokens_field: str = ""  # the field with the number of tokens to write, if any
    chosen_id: str = ""  # the id that the client chose in the body, if any
    ignored: tuple[str, ...] = ()  # fields without effect: `ignored_hints`
    adapter: str = ""  # the digest of the adapter that its model's name is of, if any

    @property
    def width(self) -> int:
        """Sequences of each prompt in the engine."""
        return self.params.samples if self.beams is None else self.beams.beam_width


@frozen
class PromptUsage:
    """The tokens of one prompt, known once all its samples have ended."""

    prompt_tokens: int
    cached_tokens: int  # of these, in the prefix cache
    metrics: RequestMetrics

    @classmethod
    def of(cls, last: RequestOutput) -> "PromptUsage":
        """The `PromptUsage` of a prompt's last output."""
        return cls(len(last.prompt_ids), last.num_cached_tokens, last.metrics)


class SpecInfo(Protocol):
    """A model's spec, as far as prompts need it."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def hidden_size(self) -> int:
        """Elements of a prompt's vector."""


class ConfigInfo(Protocol):
    """An engine's configuration, as far as prompts need it."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output."""


class SetupInfo(Protocol):
    """A model's setup, as far as prompts need it."""

    @property
    def spec(self) -> SpecInfo:
        """The model's spec."""

    @property
    def config(self) -> ConfigInfo:
        """The engine's configuration."""

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's defaults, changed by `overrides`. Raises ParameterError."""


class ModelInfo(Protocol):
    """The model that bodies are checked against: a `ServedModel`, or a `WorkerModel`."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""

    @property
    def setup(self) -> SetupInfo:
        """The model's sizes."""

    @property
    def parsers(self) -> Parsers:
        """The model's formats of tool calls and reasoning."""

    @property
    def reasoning_key(self) -> bytes:
        """The key of reasoning that clients keep."""

    @property
    def refuses_hosted_tools(self) -> bool:
        """Whether tools that run on OpenAI's servers are refused, and not left out."""

    def with_request_template(self, template: str) -> Self:
        """This model with the chat template of a request; see `ChatRenderer`."""

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


class ParsedBody(Protocol):
    """A body with valid fields, not yet checked against a model."""

    @property
    def model(self) -> str | None:
        """The name of the requested model; None: any."""

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """The request to that model. Raises the errors of `to_api_error`."""


class AnswerWriter(Protocol):
    """Writes one answer; called in the order of the outputs."""

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """The events for the new output of a choice."""

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The events after the last choice has ended; `served` is by prompt."""


@frozen(kw_only=True)
class Endpoint:
    """One endpoint that generates."""

    name: str  # among all endpoints that share one path
    path: str
    summary: str = ""  # a line about it, for the description of all
    body: type[BaseModel] | None = None  # what is read, likewise
    id_prefix: str  # of its answers' ids
    prompt_field: str  # that errors of a prompt are about
    streams: bool = True  # whether an answer can come in parts
    read: Callable[[bytes], ParsedBody]  # raises ApiError
    writer: Callable[[Stamp, GenerationRequest, Tokenizer | None], AnswerWriter]
    failure: Callable[[ApiError], Failure]  # how the protocol spells an error


class ParsedQuery(Protocol):
    """A body with a question to a model."""

    @property
    def model(self) -> str | None:
        """The name of the requested model; None: any."""

    def answer(self, llm: ModelInfo) -> Mapping[str, object]:
        """The answer. It may take a while. Raises errors of `to_api_error`."""


@frozen(kw_only=True)
class QueryEndpoint:
    """One endpoint that answers without the engine."""

    path: str
    summary: str
    prompt_field: str  # that errors of a prompt are about
    body: type[BaseModel]
    read: Callable[[bytes], ParsedQuery]  # raises ApiError
    failure: Callable[[ApiError], Failure]
