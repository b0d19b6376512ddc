"""POST /v1/completions: continues texts."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

import attrs
from pydantic import BeforeValidator, model_validator

from minfer.effects.live.input_processing.prompts import TokenizedPrompt, read_prompt
from minfer.effects.serving.openai.fields import (
    MAX_ITEMS,
    GenerationBody,
    ItemLimit,
    TopLogprobs,
)
from minfer.effects.serving.openai.logprob_formats import (
    CompletionLogprobs,
    CompletionScores,
    format_prompt_logprobs,
    join_scores,
)
from minfer.effects.serving.openai.writing import ChunkWriter, JsonObject, ObjectWriter
from minfer.effects.serving.protocol import (
    AnswerWriter,
    Endpoint,
    GenerationRequest,
    ModelInfo,
)
from minfer.effects.serving.request_parsing.bodies import invalid_value, read_body
from minfer.effects.serving.wire.error_form import failure
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer


def _split_prompts(value: Any) -> Any:
    """Prompts as a list: one is a string or a list of token ids."""
    single = not isinstance(value, list) or all(
        type(prompt) is int for prompt in value[:1]
    )
    prompts = [value] if single else value
    for prompt in prompts[:MAX_ITEMS]:  # there may not be more
        # type() and not isinstance: true is no token id.
        is_ids = type(prompt) is list and not set(map(type, prompt)) - {int}
        if not isinstance(prompt, str) and not is_ids:
            raise invalid_value(
                "must be a string, a list of token ids, or a list of these"
            )
    return prompts


def _false_to_none(logprobs: object) -> object:
    """None for false, which requests nothing."""
    return None if logprobs is False else logprobs


PromptsField = BeforeValidator(
    _split_prompts, json_schema_input_type=str | list[int] | list[str | list[int]]
)


class CompletionBody(GenerationBody):
    """Texts, and the parameters of their continuation."""

    prompt: Annotated[list[Any], ItemLimit, PromptsField]  # strings, lists of ids
    echo: bool = False
    logprobs: Annotated[
        TopLogprobs | None,
        BeforeValidator(
            _false_to_none, json_schema_input_type=TopLogprobs | Literal[False]
        ),
    ] = None

    @model_validator(mode="after")
    def _all_fit(self) -> Self:
        num_samples = self.n if self.best_of is None else self.best_of
        if num_samples < self.n:
            raise invalid_value(f"must be at least n, which is {self.n}", "best_of")
        if num_samples * len(self.prompt) > MAX_ITEMS:
            name = "n" if self.best_of is None else "best_of"
            raise invalid_value(f"times prompts must not exceed {MAX_ITEMS}", name)
        if num_samples > self.n and self.stream:
            message = (
                "the best are known once all have ended; leave stream or best_of out"
            )
            raise invalid_value(message, "best_of")
        return self

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are listed; None if no log-probability is
        requested.
        """
        return self.logprobs

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters; an echoed prompt is scored as the output is."""
        sampling_args = super().sampling()
        if not self.use_beam_search and self.best_of not in (None, self.n):
            sampling_args["best_of"] = self.best_of
        if self.echo and self.logprobs is not None:
            num_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
            sampling_args["prompt_logprobs"] = num_logprobs
        return sampling_args

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """Its prompts as token ids. Raises RequestError and ParameterError."""
        size = llm.setup.spec.vocab_size
        salt = self.cache_salt.encode()
        special = self.add_special_tokens is not False
        prompts = [
            self._cut(read_prompt(entry, llm.tokenizer, size, salt, special), llm)
            for entry in self.prompt
        ]
        skip = self.skip_special_tokens is not False
        echo = _prompt_texts(prompts, llm.tokenizer, skip=skip) if self.echo else []
        params = llm.setup.default_sampling_params(**self.sampling())
        return self.request(prompts, params, echo)

    def _cut(self, prompt: TokenizedPrompt, llm: ModelInfo) -> TokenizedPrompt:
        """A prompt with at most as many tokens as are requested. Raises ApiError."""
        ids = self.truncated(prompt.ids, llm)
        return prompt if ids is prompt.ids else attrs.evolve(prompt, text=None, ids=ids)


def _prompt_texts(
    prompts: Sequence[TokenizedPrompt], tokenizer: Tokenizer | None, *, skip: bool
) -> list[str]:
    """The texts of prompts, as given or decoded from their ids; with `skip`, without
    special tokens.
    """
    if tokenizer is None:
        return [""] * len(prompts)
    return [
        tokenizer.decode(prompt.ids, skip_special_tokens=skip)
        if prompt.text is None
        else prompt.text
        for prompt in prompts
    ]


class _ChoiceFormat:
    """The format of a completion's choices, whole or in parts."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        as_ids = request.include.tokens_as_ids
        self._logprobs = CompletionLogprobs(tokenizer, as_ids=as_ids)
        self._with_ids: set[int] = set()  # choices whose prompt's tokens are written
        self._prompts = request.prompts
        self._samples = samples = request.params.n
        self._include = request.include
        self._scored = request.params.logprobs is not None
        echo = request.include.echo
        # Prompts by choice, until they are written.
        self._echo = {i: echo[i // samples] for i in range(len(echo) * samples)}

    def to_json(self, choice: int, delta: CompletionOutput) -> JsonObject:
        echo = self._echo.pop(choice, None)
        choice_json: JsonObject = {
            "index": choice,
            "logprobs": self._scores(choice, echo, delta),
            "text": (echo or "") + delta.text,
            "finish_reason": delta.finish_reason,
        }
        if self._include.token_ids:
            choice_json |= self._token_ids(choice, delta)
        if self._include.prompt_logprobs is not None:
            choice_json["prompt_logprobs"] = format_prompt_logprobs(delta, self._include)
        return choice_json

    def _token_ids(self, choice: int, delta: CompletionOutput) -> JsonObject:
        """The tokens of an output, and in the first part of a choice those of its prompt,
        too.
        """
        fields: JsonObject = {"token_ids": [*delta.token_ids]}
        if choice not in self._with_ids:
            self._with_ids.add(choice)
            fields["prompt_token_ids"] = [*self._prompts[choice // self._samples].ids]
        return fields

    def _scores(
        self, choice: int, echoed_text: str | None, delta: CompletionOutput
    ) -> CompletionScores | None:
        """Log-probabilities of new tokens, and before them of the prompt if it is echoed
        now."""
        prompt_logprobs = delta.prompt_logprobs
        echo_scores = None
        if echoed_text is not None and prompt_logprobs is not None and self._scored:
            ids = self._prompts[choice // self._samples].ids
            top = self._include.top_logprobs
            echo_scores = self._logprobs.echo_scores(
                choice, echoed_text, ids, prompt_logprobs, top
            )
        output_scores = None
        if delta.logprobs:
            output_scores = self._logprobs.next_scores(choice, delta.logprobs)
        return (
            join_scores(echo_scores, output_scores)
            if echo_scores and output_scores
            else echo_scores or output_scores
        )


class CompletionChunks(ChunkWriter):
    """A streamed completion: a chunk for each output of a choice."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "text_completion", request)
        self._format = _ChoiceFormat(request, tokenizer)

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """The chunk for the new output of a choice."""
        self.count(delta)
        return [self.chunk(self._format.to_json(choice, delta))]


class CompletionObject(ObjectWriter):
    """A completion as one object."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(stamp, "text_completion", request)
        self._format = _ChoiceFormat(request, tokenizer)

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """Keep a choice, which is complete."""
        return self.keep(choice, self._format.to_json(choice, delta))


def writer(
    stamp: Stamp, request: GenerationRequest, tokenizer: Tokenizer | None
) -> AnswerWriter:
    """The writer of an answer, by the request's `stream`."""
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
