"""What a user asks for: sampling parameters and the request that carries them into the
engine.
"""

import math
from array import array
from collections.abc import Iterable
from typing import Any, Final

from attrs import field, frozen

from minfer.keys import Key, Keys

MAX_SAMPLES: Final = 128  # of one request; every number that sizes something has a cap
MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 20
LEAST: Final = -(2**63)  # whole numbers are those that journals and drivers can hold
MOST: Final = 2**63 - 1
MAX_PRIORITY: Final = (
    2**53
)  # beyond it ranks, which are floats, would not tell levels apart


class ParameterError(ValueError):
    """A parameter is out of its range; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def check_number(
    value: Any, param: str, low: float, high: float, *, whole: bool = False
) -> None:
    """Raise ParameterError unless `value` is a number, `whole` or not, from `low` to
    `high`.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        plain = isinstance(
            value, str | float | bool
        )  # what else there is may not be printable
        given = repr(value) if plain else f"a {type(value).__name__}"
        raise ParameterError(param, f"must be a {'whole ' * whole}number, not {given}")
    if not low <= value <= high:  # NaN is not
        # Python refuses to write out integers of thousands of digits.
        huge = isinstance(value, int) and value.bit_length() > 200
        given = "a number that large" if huge else repr(value)
        raise ParameterError(param, f"must be from {low} to {high}, not {given}")


def check_whole(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is a whole number that fits into 64 bits."""
    check_number(value, param, LEAST, MOST, whole=True)


def check_text(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is a string; a subclass of it may
    do anything.
    """
    if type(value) is not str:
        raise ParameterError(param, f"must be a string, not a {type(value).__name__}")


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
class SamplingParams:
    """How to choose tokens and when to stop, in vLLM's names. Raises ParameterError.

    Log-probabilities are natural, before temperature and filters (vLLM's `raw_logprobs`).
    """

    n: int = 1  # samples of one prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the likeliest tokens that hold this share of probability
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least so likely in relation to the likeliest
    seed: int | None = None  # None: the caller's entropy, drawn once and recorded
    # output tokens at most; None: as many as the context holds
    max_tokens: int | None = 16
    stop: tuple[str, ...] = field(default=(), converter=_strings)  # the text layer's
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    ignore_eos: bool = False
    # each output token's, and of so many likeliest; None: none
    logprobs: int | None = None

    def __attrs_post_init__(self) -> None:
        check_number(self.n, "n", 1, MAX_SAMPLES, whole=True)
        check_number(self.temperature, "temperature", 0, 100)
        check_number(self.top_p, "top_p", 0, 1)
        if self.top_p == 0:
            raise ParameterError(
                "top_p", "must be above 0; use temperature=0 for greedy decoding"
            )
        check_number(self.top_k, "top_k", -1, 2**31, whole=True)
        check_number(self.min_p, "min_p", 0, 1)
        if self.seed is not None:
            check_whole(self.seed, "seed")
        if self.logprobs is not None:
            check_number(self.logprobs, "logprobs", 0, MAX_LOGPROBS, whole=True)
        if self.max_tokens is not None:
            check_number(self.max_tokens, "max_tokens", 1, 2**31, whole=True)
        good = all(isinstance(s, str) and 0 < len(s) <= 1024 for s in self.stop)
        if len(self.stop) > MAX_STOPS or not good:
            why = f"at most {MAX_STOPS} non-empty strings of up to 1,024 characters"
            raise ParameterError("stop", why)
        if len(self.stop_token_ids) > 256:
            raise ParameterError("stop_token_ids", "at most 256 token ids")
        for token in self.stop_token_ids:
            check_number(token, "stop_token_ids", 0, 2**31, whole=True)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(
                "ignore_eos", f"must be true or false, not {self.ignore_eos!r}"
            )


@frozen(kw_only=True)
class Request:
    """A request as the engine takes it: everything is decided, nothing is text.

    `keys` are the content keys of the prompt's full blocks; the engine computes what is
    left out from `root`. `output` holds tokens that were already produced for the only
    sample, when a request is resumed. Raises ParameterError for values of a wrong type,
    for token ids that are not from 0 to 2^32 - 1, and for numbers that nothing could
    hold; whether a request can be served is the engine's to say.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = (
        frozenset()
    )  # token ids that end a sample, and are part of it
    n: int = 1
    seed: int = 0
    sampling: SamplingParams = (
        SamplingParams()
    )  # for the executor; the engine does not look inside
    priority: int = 0  # lower runs first, under a policy that heeds it
    client: str = ""  # who asks; heeded by fair shares
    deadline: float = math.inf  # seconds after its arrival; heeded by earliest deadline
    root: Key = b""  # the key before the first block: fingerprint and salt
    # Trusted: a wrong key gives this request another one's KV, and keys that contradict
    # those of others break the pool, which nothing else that is said can do. So they are
    # made where the prompt is, within this process; whatever crosses a border of
    # processes (a journal, a wire) carries tokens, and keys are computed from them again
    # on the other side.
    keys: Keys = ()
    output: tuple[int, ...] = ()
    # Its next input depends on the host (a grammar, the choice of a beam): it never runs
    # ahead of a token that is not known, and is sampled apart, so that a mask may come
    # late.
    lockstep: bool = False
    largest: int = field(
        init=False, eq=False, repr=False
    )  # token id: looked up once, at the edge

    def __attrs_post_init__(self) -> None:
        why = "token ids must be whole numbers from 0, in a tuple"
        if not type(self.prompt) is type(self.output) is tuple:
            raise ParameterError("prompt", why)
        try:
            ids = array("I", self.prompt + self.output)
        except (TypeError, OverflowError):
            raise ParameterError("prompt", why) from None
        object.__setattr__(self, "largest", max(ids, default=-1))
        self._check_types()

    def _check_types(self) -> None:
        for param in ("id", "client"):
            check_text(getattr(self, param), param)
        for param in ("max_tokens", "n", "seed"):
            check_whole(getattr(self, param), param)
        check_number(self.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY, whole=True)
        if type(self.deadline) is not float or not self.deadline >= 0:
            check_number(self.deadline, "deadline", 0, MOST)
            object.__setattr__(self, "deadline", float(self.deadline))
        if not isinstance(self.sampling, SamplingParams):
            raise ParameterError("sampling", "must be SamplingParams")
        if not isinstance(self.stop_ids, frozenset):
            raise ParameterError("stop_ids", "must be a frozenset of token ids")
        for token in self.stop_ids:
            check_number(token, "stop_ids", 0, 2**32 - 1, whole=True)
        if not isinstance(self.lockstep, bool):
            raise ParameterError("lockstep", "must be true or false")
        if not isinstance(self.root, bytes):
            raise ParameterError("root", "must be bytes")
        if not isinstance(self.keys, tuple) or not set(map(type, self.keys)) <= {bytes}:
            raise ParameterError("keys", "must be a tuple of bytes")
