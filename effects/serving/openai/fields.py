"""The fields that OpenAI's generating endpoints share, vLLM's additions, and minfer's."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

import attrs
from pydantic import BeforeValidator, Field, model_validator

from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.live.input_processing.input_processor import (
    MAX_CLIENT_CHARS,
    SchedulingHints,
)
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.protocol import GenerationRequest, Include, ModelInfo
from minfer.effects.serving.request_parsing.bodies import (
    ANYTHING,
    HINT,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.structured_fields import ConstrainedBody
from minfer.effects.serving.request_parsing.typed_hints import hint
from minfer.effects.serving.wire.request_ids import MAX_ID_CHARS as MAX_REQUEST_ID
from minfer.sampling.beam import MAX_BEAMS
from minfer.sampling.params import (
    ADVISED,
    MAX_ADJUSTMENTS,
    MAX_ALLOWED,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    RowValues,
    SamplingParams,
)
from minfer.values.checks import MAX_INT64, MAX_PRIORITY, MIN_INT64

MAX_ITEMS: Final = 4096  # messages; prompts of one request, times n
# Log-probabilities of prompts in one answer, which is made in memory: 1 GB, as objects.
MAX_PROMPT_LOGPROBS: Final = 2**21
# Fields that are not supported, with the values at which they change nothing.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": (ANYTHING,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (ANYTHING,),
    "prediction": (HINT,),
    "prompt_cache_options": (HINT,),
    "prompt_cache_retention": (HINT,),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's:
    "documents": ([],),
    "echo": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "chat_template": (),
    "spaces_between_special_tokens": (True,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
}
# Fields that SamplingParams has under the same name.
_SAMPLING_FIELDS: Final = {
    *ADVISED,
    "n",
    "prompt_logprobs",
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
}


# Fields that a beam search does not use, with the values at which they change nothing: it
# ranks tokens by the model's own probabilities, and all that end by themselves.
_UNUSED_IN_SEARCH: Final[Mapping[str, Any]] = {
    **{parameter.name: parameter.default for parameter in attrs.fields(RowValues)},
    "temperature": 0,
    "stop": [],
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
    "prompt_logprobs": None,
    **dict.fromkeys(ConstrainedBody.model_fields),
}
# Fields for the number of tokens to write.
_LENGTH_FIELDS: Final = ("max_tokens", "max_completion_tokens")


def _as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _biases_by_id(value: object) -> object:
    """Biases by token id: JSON's keys are strings."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_ADJUSTMENTS:
        raise invalid_value(f"must have at most {MAX_ADJUSTMENTS} token ids")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal()):
            raise invalid_value(
                f"names are token ids as whole numbers, not {short_json(key)}"
            )
        biases[int(key[:_MAX_ID_DIGITS])] = bias
    if len(biases) < len(value):
        raise invalid_value("a token id is in it twice")
    return biases


_MAX_ID_DIGITS: Final = 19  # digits: ids with more are out of range anyway

ItemLimit = Field(fail_fast=True, max_length=MAX_ITEMS)
WholeNumber = Annotated[int, Field(ge=MIN_INT64, lt=MAX_INT64 + 1)]
PriorityField = Annotated[int, Field(gt=-MAX_PRIORITY, lt=MAX_PRIORITY)]
StopStrings = Annotated[
    list[str],
    ItemLimit,
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
Biases = Annotated[
    dict[int, float],
    BeforeValidator(_biases_by_id, json_schema_input_type=dict[str, float]),
]
Client = Annotated[str, Field(max_length=MAX_CLIENT_CHARS)]
RequestId = Annotated[str, Field(max_length=MAX_REQUEST_ID)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


# Hints of OpenAI's API that have no effect: prefixes are cached anyway, streams are never
# padded, and there is one tier.
CacheKey = Annotated[str, hint("prompt_cache_key")]
Obfuscation = Annotated[bool, hint("stream_options.include_obfuscation", False)]
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "priority", "scale"],
    hint("service_tier", "auto", "default"),
]


class StreamOptions(StrictObject):
    """What a stream holds besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: in each chunk
    include_obfuscation: Obfuscation = False


class GenerationBody(ConstrainedBody):
    """The fields that generating endpoints share."""

    neutral = NEUTRAL
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: WholeNumber | None = None
    stop: StopStrings | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None  # without stream, they have no effect
    store: Annotated[bool | None, hint("store", False)] = None
    prompt_cache_key: CacheKey | None = None
    service_tier: ServiceTier | None = None
    user: Client = ""
    safety_identifier: Client = ""
    # vLLM's:
    top_k: WholeNumber | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[WholeNumber], ItemLimit] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: WholeNumber | None = None
    allowed_token_ids: (
        Annotated[list[WholeNumber], Field(fail_fast=True, max_length=MAX_ALLOWED)] | None
    ) = None
    bad_words: Annotated[list[str], ItemLimit] | None = None
    priority: PriorityField = 0
    cache_salt: str = ""
    use_beam_search: bool = False  # then `best_of`, or `n`, is its width
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=MAX_INT64)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in log-probabilities
    request_id: RequestId = ""
    # minfer's:
    typical_p: float | None = None
    deadline: Annotated[float, Field(gt=0)] = math.inf  # seconds from arrival
    timing: bool = False  # whether to answer with `timing`, too: see `timing_of`

    @model_validator(mode="after")
    def _fits(self) -> Self:
        lengths = (self.max_tokens, self.max_completion_tokens)
        if None not in lengths and len(set(lengths)) > 1:
            message = "differs from max_completion_tokens; leave one of them out"
            raise invalid_value(message, "max_tokens")
        if self.truncate_prompt_tokens == 0:
            raise invalid_value("must be at least 1, or -1", "truncate_prompt_tokens")
        if self.use_beam_search:
            self._check_search()
            return self
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise invalid_value("needs use_beam_search to be true", name)
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_value(
                "comes with whole answers; leave stream out", "prompt_logprobs"
            )
        return self

    def _check_search(self) -> None:
        """Refuse fields that a beam search does not use."""
        if self.stream:
            reason = "a beam search is not streamed, as it ends before anything is known"
            raise invalid_value(f"must be false: {reason}", "stream")
        if self.best_of is not None and self.best_of < self.n:
            raise invalid_value("must not be below n", "best_of")
        if self.width > MAX_BEAMS:
            field = "n" if self.best_of is None else "best_of"
            raise invalid_value(
                f"must be at most {MAX_BEAMS} with use_beam_search", field
            )
        requested = {name: getattr(self, name, None) for name in _UNUSED_IN_SEARCH}
        requested["logprobs"] = self.scored
        if self.response_format is not None and self.response_format.type == "text":
            requested["response_format"] = None
        for name, value in requested.items():
            if value is not None and value != _UNUSED_IN_SEARCH[name]:
                raise invalid_value(
                    "does not go with use_beam_search; leave it out", name
                )

    @property
    def width(self) -> int:
        """The number of beams of a search."""
        return self.n if self.best_of is None else self.best_of

    def search(self, max_tokens: int | None) -> BeamSearchParams | None:
        """The requested beam search, if any. Raises ParameterError."""
        if not self.use_beam_search:
            return None
        penalty = self.length_penalty
        return BeamSearchParams(
            beam_width=self.width,
            n=self.n,
            max_tokens=max_tokens,
            length_penalty=1.0 if penalty is None else penalty,
            early_stopping=self.early_stopping or False,
            ignore_eos=bool(self.ignore_eos),
        )

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are listed; None if no log-probability is
        requested.
        """
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names in SamplingParams.
        Raises ApiError.
        """
        sampling_args = self.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
        if self.max_completion_tokens is not None:
            sampling_args["max_tokens"] = self.max_completion_tokens
        if self.scored is not None:
            sampling_args["logprobs"] = self.scored
        if (constraint := self.constraint()) is not None:
            sampling_args["structured_outputs"] = constraint.build()
        return sampling_args

    def request(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        echo: Sequence[str] = (),
    ) -> GenerationRequest:
        """The request for tokenized prompts. Raises RequestError and ApiError."""
        self._check_scores(prompts, params)
        urgency = SchedulingHints(
            priority=self.priority,
            client=self.safety_identifier or self.user,
            deadline=self.deadline,
        )
        beams = self.search(params.max_tokens)
        options = self.stream_options
        include = Include(
            usage=options is not None and options.include_usage,
            usage_in_chunks=options is not None and options.continuous_usage_stats,
            token_ids=self.return_token_ids,
            tokens_as_ids=self.return_tokens_as_token_ids,
            timing=self.timing,
            top_logprobs=self.scored or 0,
            echo=tuple(echo),
            prompt_logprobs=self.prompt_logprobs,
        )
        constraint = self.constraint()
        return GenerationRequest(
            prompts=tuple(prompts),
            params=params if beams is None else beams.sampling,
            constraint_field="" if constraint is None else constraint.field,
            urgency=urgency,
            stream=self.stream,
            include=include,
            beams=beams,
            max_tokens_field=next(filter(self._is_given, _LENGTH_FIELDS), ""),
            chosen_id=self.request_id,
        )

    def truncated(self, ids: Sequence[int], llm: ModelInfo) -> Sequence[int]:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` has it keep;
        with -1, as many as fit beside the requested output. Raises ApiError.
        """
        max_tokens = self.truncate_prompt_tokens
        context = llm.setup.config.max_model_len
        field = "truncate_prompt_tokens"
        if max_tokens is None:
            return ids
        if max_tokens > context:
            message = f"must be at most {context}, the length of the context"
            raise ApiError(f"{field}: {message}, not {max_tokens}", field)
        if max_tokens == -1:
            output = self.max_completion_tokens or self.max_tokens or 1
            max_tokens = max(1, context - output)
        return ids[len(ids) - max_tokens :] if len(ids) > max_tokens else ids

    def _check_scores(
        self, prompts: Sequence[TokenizedPrompt], params: SamplingParams
    ) -> None:
        """Refuse an answer with too many log-probabilities of prompts."""
        if params.prompt_logprobs is None:
            return
        per_token = params.n * (1 + params.prompt_logprobs)
        count = per_token * sum(len(prompt.ids) for prompt in prompts)
        if count > MAX_PROMPT_LOGPROBS:
            field = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
            reason = f"{count} log-probabilities of prompts in one answer are too many"
            raise ApiError(
                f"{field}: {reason}: at most {MAX_PROMPT_LOGPROBS}; "
                "name fewer tokens, or fewer prompts",
                field,
            )

    def _is_given(self, name: str) -> bool:
        return getattr(self, name) is not None
