"""The parameters of sampling and of stopping, each defined once.

Theory. `RowValues` is the table: each field has its range, its help text, and its type on
the device. All else is derived from it: the parameters of users (`SamplingParams`), the
values with which a device row is opened
(`minfer.sampling.reference_sampler.RowSampling`), the options of the command line, the
fields of HTTP requests, the words of the device's rows and the columns of kernels. The
effect of a field on logits is in `minfer.sampling.logits` and
`minfer.sampling.reference_sampler`, and nowhere else.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, Self

import attrs
from attrs import field, frozen

from minfer.sampling.structured import StructuredOutputs
from minfer.sampling.vllm_names import SAMPLING, takes_neutral
from minfer.values.checks import ParameterError, check_number, check_whole

MAX_SAMPLES: Final = 128  # of one request; every number that sizes something has a cap
MAX_STOPS: Final = 64
MAX_STOP_IDS: Final = 256
MAX_STOP_LENGTH: Final = 1024  # characters of a stop string
MAX_LOGPROBS: Final = 20
# Changes to single tokens: a bias, a hidden stop id, a token of a bad word.
MAX_ADJUSTMENTS: Final = 1024
MAX_BIAS: Final = 100.0
MAX_ALLOWED: Final = 1 << 16  # token ids: more take milliseconds on a device's host
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_LENGTH: Final = 128  # characters


class RequestOutputKind(StrEnum):
    """What `AsyncLLM.generate` yields while an output grows. Names are vLLM's."""

    CUMULATIVE = "cumulative"  # all output so far
    DELTA = "delta"  # what is new
    FINAL_ONLY = "final_only"  # one output, at the end


@frozen(kw_only=True)
class Meaning:
    """The metadata of a field of `RowValues` besides its name, type and default."""

    low: float
    high: float
    help: str  # for `--help`
    metavar: str
    word: str  # the type on the device: "float32" or "int32"
    above: bool = False  # `low` itself is out of range
    otherwise: str = ""  # the advice in the error for a value at `low`
    advised: bool = True  # generation_config.json may set it


def _value(default: Any, **meaning: Any) -> Any:
    return field(default=default, metadata={"meaning": Meaning(**meaning)})


@frozen(kw_only=True)
class RowValues:
    """The sampling values of one row, in vLLM's names."""

    temperature: float = _value(
        1.0,
        low=0,
        high=100,
        help="how freely tokens are drawn; 0 always takes the likeliest",
        metavar="T",
        word="float32",
    )
    # Keep the likeliest tokens that hold this share of probability.
    top_p: float = _value(
        1.0,
        low=0,
        high=1,
        above=True,
        otherwise="use temperature=0 for greedy decoding",
        help="draw from the likeliest tokens that together have this probability",
        metavar="P",
        word="float32",
    )
    # Keep the k likeliest tokens; 0 or -1 keeps all.
    top_k: int = _value(
        0,
        low=-1,
        high=2**31,
        help="draw from the K likeliest tokens; 0: from all",
        metavar="K",
        word="int32",
    )
    # Keep tokens with at least this probability relative to the likeliest.
    min_p: float = _value(
        0.0,
        low=0,
        high=1,
        help="draw from tokens at least P times as likely as the likeliest",
        metavar="P",
        word="float32",
    )
    # Of the tokens left, keep those whose surprise is closest to the expected one and
    # that hold this share of probability (locally typical sampling, Meister et al. 2022).
    typical_p: float = _value(
        1.0,
        low=0,
        high=1,
        above=True,
        otherwise="1 keeps all tokens",
        help="draw from the most typical tokens that together have this probability",
        metavar="P",
        word="float32",
    )
    # Logits of tokens of prompt and output are divided by it, or multiplied if negative.
    repetition_penalty: float = _value(
        1.0,
        low=0,
        high=2,
        above=True,
        otherwise="1 penalizes nothing",
        help="above 1, tokens of prompt and output become less likely",
        metavar="R",
        word="float32",
    )
    # Subtracted from a token's logit once for each time that the output has it.
    frequency_penalty: float = _value(
        0.0,
        low=-2,
        high=2,
        help="taken off a token's logit each time that the output has it",
        metavar="F",
        word="float32",
    )
    # Subtracted once from the logits of the output's tokens.
    presence_penalty: float = _value(
        0.0,
        low=-2,
        high=2,
        help="taken off the logits of tokens that the output has",
        metavar="F",
        word="float32",
    )
    # The log-probability of each output token, and of this many likeliest; None: none.
    # Natural, before temperature and filters (vLLM's `raw_logprobs`).
    logprobs: int | None = _value(
        None,
        low=0,
        high=MAX_LOGPROBS,
        help="log-probabilities of each token and of the N likeliest",
        metavar="N",
        word="int32",
        advised=False,
    )


ROW_FIELDS: Final = {
    attribute.name: attribute.metadata["meaning"] for attribute in attrs.fields(RowValues)
}
# Fields that generation_config.json may set, and that the command line and HTTP take
# unchanged.
ADVISED: Final = tuple(name for name, meaning in ROW_FIELDS.items() if meaning.advised)


_read_row: Final = attrgetter(*ROW_FIELDS)


def row_values(row: RowValues) -> dict[str, Any]:
    """The values of a row, by name."""
    return dict(zip(ROW_FIELDS, _read_row(row), strict=True))


def _check_row_value(value: Any, name: str, meaning: Meaning, default: Any) -> None:
    if value is None and default is None:
        return
    is_integer = meaning.word == "int32"
    check_number(value, name, meaning.low, meaning.high, whole=is_integer)
    if meaning.above and value == meaning.low:
        raise ParameterError(name, f"must be above {meaning.low}; {meaning.otherwise}")


def _strings(param: str, value: Iterable[str] | str | None) -> tuple[str, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise ParameterError(param, f"must be strings, not a {type(value).__name__}")
    return (value,) if isinstance(value, str) else tuple(value or ())


def _stops(value: Iterable[str] | str | None) -> tuple[str, ...]:
    return _strings("stop", value)


def _bad_words(value: Iterable[str] | str | None) -> tuple[str, ...]:
    return _strings("bad_words", value)


def _ids(param: str, value: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(value, Iterable):
        raise ParameterError(param, f"must be a list of token ids, not {value!r}")
    return tuple(value)


def _stop_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else _ids("stop_token_ids", value)


def _allowed_ids(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else _ids("allowed_token_ids", value)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Biases as pairs by rising token id, from a mapping or from pairs."""
    name = "logit_bias"
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    try:
        biases = [(token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        raise ParameterError(name, "must map token ids to numbers") from None
    if len(biases) > MAX_ADJUSTMENTS:
        raise ParameterError(name, f"at most {MAX_ADJUSTMENTS} token ids")
    for token, bias in biases:
        check_number(token, name, 0, 2**31, whole=True)
        check_number(bias, name, -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in biases}) < len(biases):
        raise ParameterError(name, "a token id is in it twice")
    return tuple(sorted((token, float(bias)) for token, bias in biases))


def _output_kind(value: Any) -> RequestOutputKind:
    """A kind of outputs, also by its name."""
    try:
        return RequestOutputKind(value.lower() if isinstance(value, str) else value)
    except ValueError:
        kinds = ", ".join(kind.name for kind in RequestOutputKind)
        raise ParameterError(
            "output_kind", f"must be one of {kinds}, not {value!r:.80}"
        ) from None


def _check_texts(
    param: str, texts: tuple[Any, ...], max_count: int, max_length: int
) -> None:
    if len(texts) > max_count:
        message = f"must be at most {max_count} strings, not {len(texts)}"
        raise ParameterError(param, message)
    for text in texts:
        if not isinstance(text, str):
            raise ParameterError(param, f"must be strings, not a {type(text).__name__}")
        if not text:
            message = "must not be an empty string, which every text has; leave it out"
            raise ParameterError(param, message)
        if len(text) > max_length:
            message = (
                f"must be strings of at most {max_length} characters, not {len(text)}"
            )
            raise ParameterError(param, message)


_FLAGS: Final = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
)


@takes_neutral(SAMPLING)
@frozen(kw_only=True)
class SamplingParams(RowValues):
    """How to choose tokens and when to stop, in vLLM's names. Raises ParameterError if
    invalid.

    It is frozen: `attrs.evolve(params, temperature=0.5)` makes another one.
    """

    n: int = 1  # samples of one prompt
    # This many samples are made, and the `n` likeliest per token are returned; None: `n`.
    best_of: int | None = None
    # The log-probability of each token of the prompt but the first, and of this many
    # likeliest ones at its place; None: none.
    prompt_logprobs: int | None = None
    seed: int | None = None  # None: the caller's entropy, drawn once and recorded
    # Output tokens at most; None: as many as the context holds. 0: the prompt is
    # computed, for its log-probabilities or for the cache, and nothing is sampled.
    max_tokens: int | None = 16
    stop: tuple[str, ...] = field(default=(), converter=_stops)  # for the text layer
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_stop_ids)
    # Whether the text includes what ended it: a stop string, or the stop token unless it
    # is a special one that is skipped. For the text layer.
    include_stop_str_in_output: bool = False
    # Whether special tokens are left out of the text. For the text layer.
    skip_special_tokens: bool = True
    # Whether outputs have text, or token ids alone. For the text layer.
    detokenize: bool = True
    # For `AsyncLLM.generate`.
    output_kind: RequestOutputKind = field(
        default=RequestOutputKind.CUMULATIVE, converter=_output_kind
    )
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None  # a constraint of the text
    min_tokens: int = 0  # output tokens before one that ends it is allowed
    # Added to the logits of token ids: a mapping, kept as pairs.
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_bias)
    # The only allowed token ids; None: all.
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None, converter=_allowed_ids
    )
    # Texts that are not allowed, neither after a space nor without one.
    bad_words: tuple[str, ...] = field(default=(), converter=_bad_words)

    def __attrs_post_init__(self) -> None:
        check_number(self.n, "n", 1, MAX_SAMPLES, whole=True)
        for attribute in attrs.fields(RowValues):
            meaning = attribute.metadata["meaning"]
            _check_row_value(
                getattr(self, attribute.name), attribute.name, meaning, attribute.default
            )
        if self.seed is not None:
            check_whole(self.seed, "seed")
        if self.max_tokens is not None:
            check_number(self.max_tokens, "max_tokens", 0, 2**31, whole=True)
        if self.prompt_logprobs is not None:
            name = "prompt_logprobs"
            check_number(self.prompt_logprobs, name, 0, MAX_LOGPROBS, whole=True)
        self._check_samples()
        self._check_stops()
        structured: Any = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputs):
            raise ParameterError(
                "structured_outputs", "must be StructuredOutputs, of exactly one kind"
            )
        self._check_lengths()
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids)

    def clone(self) -> Self:
        """Returns the parameters themselves: they are frozen, so nothing can change
        them. vLLM's name.
        """
        return self

    def _check_lengths(self) -> None:
        check_number(self.min_tokens, "min_tokens", 0, 2**31, whole=True)
        high, low = self.max_tokens, self.min_tokens
        if high is not None and low > high:
            message = f"must be at most max_tokens, which is {high}, not {low}"
            raise ParameterError("min_tokens", message)

    @property
    def samples(self) -> int:
        """How many samples are made of a prompt, returned or not."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Whether more samples are made than returned."""
        return self.samples > self.n

    def _check_samples(self) -> None:
        if self.best_of is not None:
            check_number(self.best_of, "best_of", 1, MAX_SAMPLES, whole=True)
            if self.best_of < self.n:
                message = f"must be at least n ({self.n}), not {self.best_of}"
                raise ParameterError("best_of", message)
        if self.max_tokens == 0 and self.samples > 1:
            param = "n" if self.n > 1 else "best_of"
            message = "must be 1 where max_tokens is 0: samples would not differ"
            raise ParameterError(param, message)

    def _check_stops(self) -> None:
        _check_texts("stop", self.stop, MAX_STOPS, MAX_STOP_LENGTH)
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ParameterError("stop_token_ids", f"at most {MAX_STOP_IDS} token ids")
        for token in self.stop_token_ids:
            check_number(token, "stop_token_ids", 0, 2**31, whole=True)
        for name in _FLAGS:
            value: Any = getattr(self, name)
            if not isinstance(value, bool):
                raise ParameterError(name, f"must be true or false, not {value!r}")


def _check_allowed(ids: tuple[int, ...]) -> None:
    name = "allowed_token_ids"
    if not 0 < len(ids) <= MAX_ALLOWED:
        raise ParameterError(name, f"must be from 1 to {MAX_ALLOWED:,} token ids")
    if set(map(type, ids)) != {int}:
        raise ParameterError(name, "must be whole numbers")
    for token in (min(ids), max(ids)):
        check_number(token, name, 0, 2**31, whole=True)
