"""How to choose tokens and when to stop: the parameters of sampling, each defined once.

Theory. `RowValues` is the table: a field stands there with its range, what it means in
words, and how a device keeps it. What else speaks of a field is derived from it: what
users may say (`SamplingParams`), what a device row is opened with
(`minfer.sample.RowSampling`), the options of the command line, the fields of HTTP
requests, the words of the device's rows and the columns that kernels get. What a field
does to logits is in `minfer.sample`, and nowhere else.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

import attrs
from attrs import field, frozen

from minfer.checks import ParameterError, check_number, check_whole

MAX_SAMPLES: Final = 128  # of one request; every number that sizes something has a cap
MAX_STOPS: Final = 16
MAX_STOP_IDS: Final = 256
MAX_STOP_LENGTH: Final = 1024  # characters of a stop string
MAX_LOGPROBS: Final = 20


@frozen(kw_only=True)
class Meaning:
    """What there is to say of a field of `RowValues` besides its name, type, default."""

    low: float
    high: float
    help: str  # in the words of `--help`
    metavar: str
    word: str  # the type of the device row's word: "float32" or "int32"
    above: bool = False  # `low` itself is out of range
    otherwise: str = ""  # what to do instead of a value at `low`
    advised: bool = True  # a model's makers may advise it in generation_config.json


def _value(default: Any, **meaning: Any) -> Any:
    return field(default=default, metadata={"meaning": Meaning(**meaning)})


@frozen(kw_only=True)
class RowValues:
    """The values by which one row's tokens are chosen, in vLLM's names."""

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
    # Keep tokens at least so likely in relation to the likeliest.
    min_p: float = _value(
        0.0,
        low=0,
        high=1,
        help="draw from tokens at least P times as likely as the likeliest",
        metavar="P",
        word="float32",
    )
    # Each output token's log-probability, and of so many likeliest; None: none. Natural,
    # before temperature and filters (vLLM's `raw_logprobs`).
    logprobs: int | None = _value(
        None,
        low=0,
        high=MAX_LOGPROBS,
        help="log-probabilities of each token and of the N likeliest",
        metavar="N",
        word="int32",
        advised=False,
    )


ROW_FIELDS: Final = {one.name: one.metadata["meaning"] for one in attrs.fields(RowValues)}
# Those that a model's makers may advise, and that the command line and HTTP take as they
# are.
ADVISED: Final = tuple(name for name, meaning in ROW_FIELDS.items() if meaning.advised)


_read_row: Final = attrgetter(*ROW_FIELDS)


def row_values(said: RowValues) -> dict[str, Any]:
    """The values of a row, by name."""
    return dict(zip(ROW_FIELDS, _read_row(said), strict=True))


def _check_row_value(value: Any, name: str, meaning: Meaning, default: Any) -> None:
    if value is None and default is None:
        return
    whole = meaning.word == "int32"
    check_number(value, name, meaning.low, meaning.high, whole=whole)
    if meaning.above and value == meaning.low:
        raise ParameterError(name, f"must be above {meaning.low}; {meaning.otherwise}")


def _strings(value: Iterable[str] | str | None) -> tuple[str, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise ParameterError("stop", f"must be a string or several, not {value!r}")
    return (value,) if isinstance(value, str) else tuple(value or ())


def _ids(value: Iterable[int] | None) -> tuple[int, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise ParameterError(
            "stop_token_ids", f"must be a list of token ids, not {value!r}"
        )
    return tuple(value or ())


@frozen(kw_only=True)
class SamplingParams(RowValues):
    """How to choose tokens and when to stop, in vLLM's names. Raises ParameterError."""

    n: int = 1  # samples of one prompt
    # So many are made, and the `n` that are likeliest per token are given; None: `n`.
    best_of: int | None = None
    # The log-probability of each token of the prompt but the first, and of so many
    # likeliest ones at its place; None: none.
    prompt_logprobs: int | None = None
    seed: int | None = None  # None: the caller's entropy, drawn once and recorded
    # Output tokens at most; None: as many as the context holds. 0: the prompt is
    # computed, for its log-probabilities or for the cache, and nothing is sampled.
    max_tokens: int | None = 16
    stop: tuple[str, ...] = field(default=(), converter=_strings)  # the text layer's
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    ignore_eos: bool = False

    def __attrs_post_init__(self) -> None:
        check_number(self.n, "n", 1, MAX_SAMPLES, whole=True)
        for one in attrs.fields(RowValues):
            meaning = one.metadata["meaning"]
            _check_row_value(getattr(self, one.name), one.name, meaning, one.default)
        if self.seed is not None:
            check_whole(self.seed, "seed")
        if self.max_tokens is not None:
            check_number(self.max_tokens, "max_tokens", 0, 2**31, whole=True)
        if self.prompt_logprobs is not None:
            name = "prompt_logprobs"
            check_number(self.prompt_logprobs, name, 0, MAX_LOGPROBS, whole=True)
        self._check_samples()
        self._check_stops()

    @property
    def samples(self) -> int:
        """How many are made of a prompt, whether all of them are given or not."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Whether more samples are made than given."""
        return self.samples > self.n

    def _check_samples(self) -> None:
        if self.best_of is not None:
            check_number(self.best_of, "best_of", 1, MAX_SAMPLES, whole=True)
            if self.best_of < self.n:
                why = f"must be at least n ({self.n}), not {self.best_of}"
                raise ParameterError("best_of", why)
        if self.max_tokens == 0 and self.samples > 1:
            param = "n" if self.n > 1 else "best_of"
            why = "must be 1 where max_tokens is 0: samples would not differ"
            raise ParameterError(param, why)

    def _check_stops(self) -> None:
        good = all(
            isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop
        )
        if len(self.stop) > MAX_STOPS or not good:
            why = f"at most {MAX_STOPS} non-empty strings of up to 1,024 characters"
            raise ParameterError("stop", why)
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ParameterError("stop_token_ids", f"at most {MAX_STOP_IDS} token ids")
        for token in self.stop_token_ids:
            check_number(token, "stop_token_ids", 0, 2**31, whole=True)
        ignore_eos: Any = self.ignore_eos
        if not isinstance(ignore_eos, bool):
            raise ParameterError(
                "ignore_eos", f"must be true or false, not {ignore_eos!r}"
            )
