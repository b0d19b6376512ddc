"""POST /v1/completions: texts are continued."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, model_validator

from minfer.effects.live.prompts import Asked, read_prompt
from minfer.effects.serving.bodies import read_body, wrong
from minfer.effects.serving.openai.errors import failure
from minfer.effects.serving.openai.fields import MAX_ITEMS, Few, GenerationBody, Top
from minfer.effects.serving.openai.logprobs import CompletionLogprobs
from minfer.effects.serving.openai.writing import ChunkWriter, JsonObject, ObjectWriter
from minfer.effects.serving.protocol import Endpoint, GenerationRequest, Grounds, Writer
from minfer.effects.serving.stamp import Stamp
from minfer.effects.serving.transports.transport import Event
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer


def _prompts(given: Any) -> Any:
    """Prompts as a list: one is a string or a list of token ids."""
    single = not isinstance(given, list) or all(type(one) is int for one in given[:1])
    many = [given] if single else given
    for one in many[:MAX_ITEMS]:  # there may not be more
        # type() and not isinstance: true is no token id.
        ids = type(one) is list and not set(map(type, one)) - {int}
        if not isinstance(one, str) and not ids:
            raise wrong("must be a string, a list of token ids, or a list of these")
    return many


def _no_false(logprobs: object) -> object:
    """None for false, which asks for nothing."""
    return None if logprobs is False else logprobs


Prompts = BeforeValidator(
    _prompts, json_schema_input_type=str | list[int] | list[str | list[int]]
)


class CompletionBody(GenerationBody):
    """Texts, and how they are to be continued."""

    prompt: Annotated[list[Any], Few, Prompts]  # strings, lists of ids
    echo: bool = False
    logprobs: Annotated[
        Top | None,
        BeforeValidator(_no_false, json_schema_input_type=Top | Literal[False]),
    ] = None

    @model_validator(mode="after")
    def _all_fit(self) -> Self:
        if self.n * len(self.prompt) > MAX_ITEMS:
            raise wrong(f"times prompts must not exceed {MAX_ITEMS}", "n")
        if self.echo and self.scored is not None:
            raise wrong("is not supported with echo; leave one of them out", "logprobs")
        return self

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are to be named; None if no log-probability
        is.
        """
        return self.logprobs

    def generation(self, llm: Grounds) -> GenerationRequest:
        """Its prompts as token ids. Raises RequestError and ParameterError."""
        size = llm.setup.spec.vocab_size
        salt = self.cache_salt.encode()
        prompts = [read_prompt(one, llm.tokenizer, size, salt) for one in self.prompt]
        echo = _spelled(prompts, llm.tokenizer) if self.echo else []
        params = llm.setup.default_sampling_params(**self.sampling())
        return self.request(prompts, params, echo)


def _spelled(prompts: Sequence[Asked], tokenizer: Tokenizer | None) -> list[str]:
    """The texts of prompts, as they were given or as their ids spell them."""
    if tokenizer is None:
        return []
    return [
        tokenizer.decode(one.ids) if one.text is None else one.text for one in prompts
    ]


class _Shape:
    """What choices of a completion look like, whether they come whole or in parts."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self._logprobs = CompletionLogprobs(tokenizer)
        samples = request.params.n
        echo = request.include.echo
        # Prompts by choice, until they were written.
        self._echo = {i: echo[i // samples] for i in range(len(echo) * samples)}

    def told(self, choice: int, delta: CompletionOutput) -> JsonObject:
        scored = delta.logprobs
        return {
            "index": choice,
            "logprobs": self._logprobs.told(choice, scored) if scored else None,
            "text": self._echo.pop(choice, "") + delta.text,
            "finish_reason": delta.finish_reason,
        }


class CompletionChunks(ChunkWriter):
    """A streamed completion: a chunk for all that is new of a choice."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "text_completion", request.include)
        self._shape = _Shape(request, tokenizer)

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """The chunk for what is new of a choice."""
        return [self.chunk(self._shape.told(choice, delta))]


class CompletionObject(ObjectWriter):
    """A completion in one piece."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "text_completion", request.include)
        self._shape = _Shape(request, tokenizer)

    def write(self, choice: int, delta: CompletionOutput) -> list[Event]:
        """Keep a choice, which comes whole."""
        return self.keep(choice, self._shape.told(choice, delta))


def writer(
    stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
) -> Writer:
    """What writes an answer as it was asked for."""
    kind = CompletionChunks if request.stream else CompletionObject
    return kind(stamp, request, tokenizer)


ENDPOINT: Final = Endpoint(
    name="completions",
    path="/v1/completions",
    summary="Continue texts.",
    body=CompletionBody,
    id_prefix="cmpl",
    prompt_field="prompt",
    read=partial(read_body, CompletionBody),
    writer=writer,
    failure=failure,
)
