"""Parameters of vLLM that minfer does not have, and records that take them where they
ask for nothing.

Programs that were written for vLLM name parameters at values that change nothing, such as
`extra_args=None`. A record decorated with `takes_neutral` takes those, refuses other
values with a reason and a remedy, and names the nearest parameter where a name is wrong.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, NoReturn, TypeVar

import attrs
from attrs import frozen
from attrs.exceptions import FrozenInstanceError

from minfer.values.checks import ParameterError

Record = TypeVar("Record")


@frozen
class Absent:
    """A parameter that minfer does not have."""

    reason: str  # why not, and what would do
    neutral: tuple[Any, ...] = (None,)  # values at which it asks for nothing


_NO_LOGITS_CODE: Final = (
    "no code of a request's runs on logits; use logit_bias, allowed_token_ids, bad_words "
    "or structured_outputs"
)
_NO_REPLAY: Final = "tokens are not forced while decoding; give them as the prompt"
_BEAM_SEARCH: Final = "use LLM.beam_search with BeamSearchParams"
SAMPLING: Final[Mapping[str, Absent]] = {
    # Of vLLM's earlier releases, from here on.
    "early_stopping": Absent(_BEAM_SEARCH, (False,)),
    "guided_decoding": Absent(
        "use structured_outputs=StructuredOutputsParams(...), with the same fields"
    ),
    "length_penalty": Absent(_BEAM_SEARCH, (1,)),
    "truncate_prompt_tokens": Absent("give the last tokens of the prompt as its ids"),
    "use_beam_search": Absent(_BEAM_SEARCH, (False,)),
    # Of its present one, from here on.
    "extra_args": Absent(_NO_LOGITS_CODE, (None, {})),
    "logits_processors": Absent(_NO_LOGITS_CODE, (None, [], ())),
    "flat_logprobs": Absent(
        "log-probabilities are a list of mappings; leave it out", (False,)
    ),
    "logprob_token_ids": Absent(
        "log-probabilities are those of the likeliest tokens; use logprobs", (None, [])
    ),
    "output_text_buffer_length": Absent(
        "text that may begin a stop string is held back by itself; leave it out", (0,)
    ),
    "prompt_logprob_start": Absent(
        "log-probabilities are of the whole prompt; take the part that you need",
        (None, 0),
    ),
    "prompt_logprob_token_ids": Absent(
        "log-probabilities are those of the likeliest tokens; use prompt_logprobs"
    ),
    "repetition_detection": Absent(
        "repetitions do not end an output; use repetition_penalty, frequency_penalty or "
        "stop"
    ),
    "routed_experts_prompt_start": Absent(
        "the experts that tokens were routed to are not returned; leave it out", (0,)
    ),
    # Parameters are frozen: there is nothing to copy.
    "skip_clone": Absent("leave it out", (True, False)),
    "skip_reading_prefix_cache": Absent(
        "give the prompt a cache_salt of its own, {'prompt': ..., 'cache_salt': ...}: "
        "then it finds no cached blocks",
        (None, False),
    ),
    "spaces_between_special_tokens": Absent(
        "special tokens are written as the tokenizer writes them; leave it out",
        (True, None),
    ),
    "stream_interval": Absent(
        "outputs come as steps end; a reader that waits gets several at once", (None, 1)
    ),
    "thinking_token_budget": Absent(
        "a thinking budget is a field of requests over HTTP (thinking_token_budget, or "
        "Anthropic's thinking.budget_tokens); here use max_tokens"
    ),
    "trace_decode_token_ids": Absent(_NO_REPLAY),
    "watermarking": Absent("outputs have no watermark; leave it out", (None, False)),
}
STRUCTURED: Final[Mapping[str, Absent]] = {
    "disable_additional_properties": Absent(
        'write "additionalProperties": false into the schema', (False, None)
    ),
    "whitespace_pattern": Absent(
        "whitespace between tokens of JSON is free; disable_any_whitespace leaves none"
    ),
}
BEAMS: Final[Mapping[str, Absent]] = {
    "allowed_token_ids": Absent("a search is over all tokens; filter its outputs"),
    "include_stop_str_in_output": Absent(
        "a search has no stop strings; leave it out", (False,)
    ),
    "skip_special_tokens": Absent(
        "the text is without special tokens; decode the sequence's tokens", (True,)
    ),
    "structured_outputs": Absent("a search has no constraint; use SamplingParams"),
    "temperature": Absent(
        "a search ranks tokens by the model's own probabilities, temperature 1", (0, 1)
    ),
    "watermarking": Absent("outputs have no watermark; leave it out", (None, False)),
}


def is_neutral(value: Any, absent: Absent) -> bool:
    """Returns whether a value of a parameter asks for nothing."""
    return any(
        type(value) is type(neutral) and value == neutral
        for neutral in (*absent.neutral, None)
    ) or (type(value) is float and value in absent.neutral)


def takes_neutral(
    absent: Mapping[str, Absent],
) -> Callable[[type[Record]], type[Record]]:
    """Returns a decorator of a frozen attrs class: its constructor takes the parameters
    that are `absent`, too, at values that ask for nothing, and an assignment to one of
    its fields says what to do instead.

    The constructor raises ParameterError for other values of these, and TypeError with
    the nearest name for an unknown parameter.
    """

    def decorate(cls: type[Record]) -> type[Record]:
        own_init: Callable[..., None] = cls.__init__
        fields = attrs.fields(cls)  # type: ignore[arg-type]  # attrs classes alone
        names = {field.name for field in fields}

        @wraps(own_init)
        def init(self: Record, *values: Any, **named: Any) -> None:
            if not names.issuperset(named):
                named = _without_absent(cls.__name__, named, names, absent)
            own_init(self, *values, **named)

        cls.__init__ = init  # type: ignore[assignment]  # its signature is the same
        cls.__setattr__ = _refuse_assignment  # type: ignore[method-assign]  # attrs has its own
        return cls

    return decorate


def _without_absent(
    owner: str,
    named: Mapping[str, Any],
    names: set[str],
    absent: Mapping[str, Absent],
) -> dict[str, Any]:
    """Returns the arguments that are parameters."""
    for name in named.keys() - names:
        if name not in absent:
            from difflib import get_close_matches  # its import takes a while

            near = get_close_matches(name, [*names, *absent], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{owner} has no parameter {name!r}{hint}")
        if not is_neutral(named[name], absent[name]):
            raise ParameterError(name, f"is not supported: {absent[name].reason}")
    return {name: value for name, value in named.items() if name in names}


def _refuse_assignment(self: object, name: str, value: object) -> NoReturn:
    kind = type(self).__name__
    error = FrozenInstanceError()
    error.args = (
        f"{kind} is frozen; make another one: attrs.evolve(params, {name}={value!r:.80})",
    )
    raise error
