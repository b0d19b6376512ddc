"""What clients may ask for, and how answers are written: the shapes of OpenAI's API.

A request is checked before anything runs, and every error names its field. What is known
but not supported is refused if it could change the output, and ignored if not. Null means
absent.
"""

import difflib
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from minfer.effects.live.edge import MAX_CLIENT
from minfer.effects.text.outputs import Logprob, RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.params import MAX_LOGPROBS

MAX_ITEMS: Final = 4096  # messages; prompts of one request, times n
_ANY: Final = object()
# Fields that are not supported, with the values at which they ask for nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "metadata": (_ANY,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (_ANY,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_options": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_SAMPLING: Final = {
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
}


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def _wrong(message: str, field: str | None = None) -> PydanticCustomError:
    """What is wrong with a value, or with a field of it."""
    return PydanticCustomError("wrong", "{said}", {"said": message, "field": field})


class _Object(BaseModel):
    """A JSON object: strict types, finite numbers, known fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse the first field that is unknown or unsupported: there may be a million
        of them.
        """
        if not isinstance(given, dict):
            raise _wrong("must be an object")
        for name, value in given.items():
            if name in cls.model_fields:
                continue
            if name not in cls.neutral:
                near = difflib.get_close_matches(name[:64], cls.model_fields, 1)
                hint = f"did you mean {near[0]}?" if near else "leave it out"
                raise _wrong(f"is not a field here; {hint}", name[:64])
            # False equals 0 in Python, but not in JSON.
            same = [(one, isinstance(one, bool)) for one in (None, *cls.neutral[name])]
            if (
                _ANY not in cls.neutral[name]
                and (value, isinstance(value, bool)) not in same
            ):
                raise _wrong("is not supported; leave it out", name)
        return {k: v for k, v in given.items() if v is not None and k in cls.model_fields}


def _prompts(given: Any) -> Any:
    single = not isinstance(given, list) or all(type(one) is int for one in given[:1])
    many = [given] if single else given
    for one in many[:MAX_ITEMS]:  # there may not be more
        # type() and not isinstance: true is no token id.
        if not isinstance(one, str) and (
            type(one) is not list or set(map(type, one)) - {int}
        ):
            raise _wrong("must be a string, a list of token ids, or a list of these")
    return many


def _text(value: Any) -> Any:
    """A message's text; parts are lines of it, as in vLLM."""
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise _wrong(f"must be 'text', not {json.dumps(kind)[:80]}", "type")
        if len(part) > 2 or not isinstance(part.get("text"), str):
            raise _wrong("must be a string, and the only field beside the type", "text")
    return "\n".join(part["text"] for part in value) if isinstance(value, list) else value


Few = Field(fail_fast=True, max_length=MAX_ITEMS)
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stops = Annotated[
    list[str], Few, BeforeValidator(lambda s: [s] if isinstance(s, str) else s)
]
Client = Annotated[str, Field(max_length=MAX_CLIENT)]
Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Scored = Sequence[dict[int, Logprob]]  # of tokens: by id, its own first


class Message(_Object):
    """One message; what is neutral is in what OpenAI's SDK hands back of an answer."""

    neutral = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": ("",),
        "tool_calls": ([],),
    }
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        # The name that models were trained with.
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None
    tool_call_id: str | None = None


class StreamOptions(_Object):
    """What a stream holds besides text; it is never padded."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Body(_Object):
    """The fields that both endpoints know; the last ones are vLLM's, the very last two
    minfer's.
    """

    neutral = _NEUTRAL
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Whole | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    stop: Stops | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Client = ""
    safety_identifier: Client = ""
    top_k: Whole | None = None
    min_p: float | None = None
    stop_token_ids: Annotated[list[Whole], Few] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(gt=-(2**53), lt=2**53)] = 0
    cache_salt: str = ""
    deadline: Annotated[float, Field(gt=0)] = math.inf  # seconds from arrival
    timing: bool = (
        False  # whether to answer with `timing`, too: for each prompt see `timing_of`
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("needs stream to be true", "stream_options")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _wrong("leave it out; max_completion_tokens is set", "max_tokens")
        if self.best_of not in (None, self.n):
            raise _wrong("is not supported; leave it out", "best_of")
        if self.n * len(getattr(self, "prompt", ())) > MAX_ITEMS:
            raise _wrong(f"times prompts must not exceed {MAX_ITEMS}", "n")
        if getattr(self, "top_logprobs", 0) and self.scored is None:
            raise _wrong("needs logprobs to be true", "top_logprobs")
        if getattr(self, "echo", False) and self.scored is not None:
            raise _wrong("is not supported with echo; leave one of them out", "logprobs")
        return self

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are to be named; None if no log-probability
        is.
        """
        told = getattr(self, "logprobs", None)
        return (
            None if told is None or told is False else getattr(self, "top_logprobs", told)
        )

    @classmethod
    def read(cls, data: bytes) -> Self:
        """The request in a body. Raises ApiError, which names the field."""
        try:
            return cls.model_validate(
                from_json(data, allow_inf_nan=False, cache_strings="none")
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            said, given, field = (
                first["msg"],
                first["input"],
                first.get("ctx", {}).get("field"),
            )
            place = (*first["loc"], *([] if field is None else [field]))
            where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)[
                1:
            ]
            if isinstance(given, str | int | float) and said.startswith("Input"):
                shown = given[:64] if isinstance(given, str) else given
                said += f", not {json.dumps(shown)[:80]}"
            said = said.replace("Field required", "is missing").replace(
                "Input should", "must"
            )
            raise ApiError(f"{where or 'the body'}: {said}", where or None) from None
        except ValueError as error:
            raise ApiError(f"the body is not valid JSON: {error}") from None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names in SamplingParams."""
        found = self.model_dump(include=_SAMPLING, exclude_none=True)
        more = {"max_tokens": self.max_completion_tokens, "logprobs": self.scored}
        return {
            **found,
            **{name: value for name, value in more.items() if value is not None},
        }


class Completion(Body):
    """POST /v1/completions."""

    prompt: Annotated[
        list[Any], Few, BeforeValidator(_prompts)
    ]  # strings and lists of token ids
    echo: bool = False
    logprobs: Annotated[
        Top | None, BeforeValidator(lambda k: None if k is False else k)
    ] = None


class Chat(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Few, Field(min_length=1)]
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Top = 0


def timing_of(output: RequestOutput) -> dict[str, Any]:
    """Where a request's time went, in seconds; null is what did not come to be."""
    names = ("queue_times", "ttft", "tpot", "latency", "preemptions")
    told = {name: getattr(output.metrics, name) for name in names}
    return {**told, "cached_tokens": output.num_cached_tokens}


class Writer:
    """Writes the answer to one request, whole or as server-sent events."""

    def __init__(
        self, name: str, model: str, body: Body, tokenizer: Tokenizer | None = None
    ) -> None:
        self.tokenizer, self.top = tokenizer, body.scored or 0
        self.lengths: dict[int, int] = {}  # characters of choices whose tokens are told
        self.chat, self.stream, options = (
            isinstance(body, Chat),
            body.stream,
            body.stream_options,
        )
        self.counts = options is not None and options.include_usage
        self.timing: dict[int, Any] | None = (
            {} if body.timing else None
        )  # by first choice
        self.begun: set[int] = set()  # choices whose role was sent
        self.whole: dict[int, dict[str, Any]] = {}  # choices, where nothing is streamed
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if self.chat and self.stream else ""
        self.head: dict[str, Any] = {
            "id": name,
            "object": kind,
            "created": int(time.time()),
        }
        self.head |= {"model": model, "usage": None} if self.counts else {"model": model}

    def write(
        self, index: int, text: str, end: str | None, scores: Scored | None = None
    ) -> str:
        """What to send for what is new of a choice; `end` is its finish reason."""
        found = {"logprobs": self._scores(index, scores) if scores else None}
        if not self.chat:
            said: list[dict[str, Any]] = [{"text": text, **found}]
        elif not self.stream:
            said = [
                {
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    **found,
                }
            ]
        else:
            said = (
                []
                if index in self.begun
                else [{"delta": {"role": "assistant", "content": ""}}]
            )
            said += [{"delta": {"content": text}, **found}] if text or scores else []
            said += [{"delta": {}}] if end else []
            self.begun.add(index)
        choices = [
            {"index": index, "logprobs": None, **one, "finish_reason": None}
            for one in said
        ]
        if end:
            choices[-1]["finish_reason"] = end
        if self.stream:
            return "".join([self._event([one]) for one in choices])
        self.whole[index] = choices[0]
        return ""

    def _scores(self, index: int, scores: Scored) -> dict[str, Any]:
        """Log-probabilities of tokens in the shape of the endpoint."""
        every = [[self._score(*one) for one in by_id.items()] for by_id in scores]
        if self.chat:
            tops = [
                sorted(one, key=lambda s: -float(s["logprob"]))[: self.top]
                for one in every
            ]
            said = [
                {**one[0], "top_logprobs": top}
                for one, top in zip(every, tops, strict=True)
            ]
            return {"content": said, "refusal": None}
        sizes = [
            sum(byte & 0xC0 != 0x80 for byte in one[0]["bytes"] or ()) for one in every
        ]
        *offsets, self.lengths[index] = accumulate(
            sizes, initial=self.lengths.get(index, 0)
        )
        # Of tokens spelled alike, the drawn or else the likelier one is told of.
        named = [
            {one["token"]: one["logprob"] for one in reversed(all_of)} for all_of in every
        ]
        return {
            "tokens": [one[0]["token"] for one in every],
            "token_logprobs": [one[0]["logprob"] for one in every],
            "top_logprobs": named,
            "text_offset": offsets,
        }

    def _score(self, token: int, one: Logprob) -> dict[str, Any]:
        spelled = None if self.tokenizer is None else [*self.tokenizer.token_bytes(token)]
        # Without a text, vLLM's name; no lower than OpenAI goes, as JSON has no infinity.
        text = one.decoded_token or f"token_id:{token}"
        return {"token": text, "logprob": max(one.logprob, -9999.0), "bytes": spelled}

    def last(self, prompt: int, output: int, cached: int) -> str:
        """The end of a stream, or the answer in one piece. Numbers are tokens."""
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        more: dict[str, Any] = {"usage": usage} if self.counts or not self.stream else {}
        if self.timing is not None:
            more["timing"] = [self.timing[i] for i in sorted(self.timing)]
        if self.stream:
            return (self._event([], **more) if more else "") + "data: [DONE]\n\n"
        choices = [self.whole[i] for i in sorted(self.whole)]
        return json.dumps({**self.head, "choices": choices, **more})

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self.head, 'choices': choices, **more})}\n\n"
