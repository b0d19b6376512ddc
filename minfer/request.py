"""The request that carries what a user asks for into the engine."""

import math
from array import array
from typing import Any

from attrs import field, frozen

from minfer.beam import BeamRound
from minfer.checks import (
    LARGEST_TOKEN,
    MAX_PRIORITY,
    MOST,
    check_number,
    check_text,
    check_whole,
)
from minfer.checks import ParameterError as ParameterError
from minfer.keys import Key, Keys, Tails
from minfer.params import MAX_ADJUSTMENTS
from minfer.params import MAX_SAMPLES as MAX_SAMPLES
from minfer.params import SamplingParams as SamplingParams


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
    # token ids that end a sample, and are part of it
    stop_ids: frozenset[int] = frozenset()
    # Token sequences that it may not output: the words of `sampling.bad_words`.
    bad_words: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    # The number, in the draws of the seed, of its first sample: who resumes one of
    # several samples has it go on with its own.
    first_sample: int = 0
    seed: int = 0
    # for the executor; the engine does not look inside
    sampling: SamplingParams = SamplingParams()
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
    # Its next token depends on the host: it is sampled apart, so that a mask may come
    # late, and it is never more than one token ahead of what is known.
    lockstep: bool = False
    # How what the model makes of its prompt becomes one vector ("last", "mean"): for the
    # executor. The engine knows that it yields no token and ends with its prompt.
    pooling: str = ""
    # Whether what is cached of its prompt need not be computed. A mean is over all
    # positions, and log-probabilities are wanted of each: such a request computes them
    # all.
    reads_cache: bool = True
    # Of one that yields one token at most: the keys of the beginning of its last block,
    # up to its last token and with that (`keys.tail_keys`), trusted as `keys` are. Then
    # it begins with a copy of what is cached under the first, and what it computes is
    # cached under the other. So a tree of prompts costs one input for each node.
    tails: Tails | None = None
    # Its place in the waiting queue, where an earlier request has held it whose work this
    # one goes on with: rank, number of arrival, and what tells apart those that share
    # both. Then it counts as one that has run before: it is neither refused nor held back
    # for others. None: it comes last in its rank.
    place: tuple[tuple[float, ...], int, int] | None = None
    search: BeamRound | None = None  # it is a beam of a round of a search
    # token id: looked up once, at the edge
    largest: int = field(init=False, eq=False, repr=False)

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
        for param in ("id", "client", "pooling"):
            check_text(getattr(self, param), param)
        for param in ("max_tokens", "n", "seed"):
            check_whole(getattr(self, param), param)
        check_number(self.first_sample, "first_sample", 0, MAX_SAMPLES, whole=True)
        check_number(self.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY, whole=True)
        if type(self.deadline) is not float or not self.deadline >= 0:
            check_number(self.deadline, "deadline", 0, MOST)
            object.__setattr__(self, "deadline", float(self.deadline))
        if not isinstance(self.sampling, SamplingParams):
            raise ParameterError("sampling", "must be SamplingParams")
        if not isinstance(self.stop_ids, frozenset):
            raise ParameterError("stop_ids", "must be a frozenset of token ids")
        for token in self.stop_ids:
            check_number(token, "stop_ids", 0, LARGEST_TOKEN, whole=True)
        self._check_bad_words()
        for param in ("lockstep", "reads_cache"):
            if not isinstance(getattr(self, param), bool):
                raise ParameterError(param, "must be true or false")
        if not isinstance(self.root, bytes):
            raise ParameterError("root", "must be bytes")
        if not isinstance(self.keys, tuple) or not set(map(type, self.keys)) <= {bytes}:
            raise ParameterError("keys", "must be a tuple of bytes")
        self._check_search()

    def _check_search(self) -> None:
        if not (self.search is None or isinstance(self.search, BeamRound)):
            raise ParameterError("search", "must be a BeamRound or None")
        if self.place is not None and not _is_place(self.place):
            why = "must be a rank (numbers, in a tuple) and two whole numbers, in a tuple"
            raise ParameterError("place", why)
        if not (self.tails is None or _are_keys(self.tails)):
            raise ParameterError("tails", "must be two of bytes, in a tuple")

    @property
    def ends_with_prompt(self) -> bool:
        """Whether it yields no token: it is pooled or scored, or fills the cache."""
        return not self.max_tokens

    @property
    def given(self) -> int:
        """Tokens of the prompt that was asked for: what follows them in the prompt of a
        beam is its output.
        """
        return len(self.prompt) if self.search is None else self.search.prompt

    @property
    def begins_anew(self) -> bool:
        """Whether all of its prompt is computed in one generation, however often that
        begins: what was made of it is in no cache.
        """
        return bool(self.pooling) and not self.reads_cache

    def _check_bad_words(self) -> None:
        """Words are not empty, and a device has room for all that is done to tokens."""
        words = self.bad_words
        if type(words) is not tuple or not all(type(word) is tuple for word in words):
            raise ParameterError("bad_words", "must be tuples of token ids, in a tuple")
        for word in words:
            if not word:
                raise ParameterError("bad_words", "a word has no token")
            for token in word:
                check_number(token, "bad_words", 0, LARGEST_TOKEN, whole=True)
        said = self.sampling
        stops = len(self.stop_ids) if said.min_tokens else 0
        count = len(said.logit_bias) + stops + sum(map(len, words))
        if count > MAX_ADJUSTMENTS:
            raise ParameterError(
                "bad_words" if words else "logit_bias",
                f"{count} single tokens are to be changed (biases, stop ids until "
                f"min_tokens, tokens of bad words); at most {MAX_ADJUSTMENTS} can be",
            )

    def most_known(self, max_model_len: int) -> int:
        """Tokens that a sample may come to know, the prompt's included.

        Of one that ends with its prompt: one more, which it never gets. So its last input
        is due as that of any other is, for the token after it.
        """
        if self.ends_with_prompt:
            return len(self.prompt) + 1
        return min(len(self.prompt) + self.max_tokens, max_model_len)


def _is_place(value: Any) -> bool:
    """Whether a value can be compared with places in the waiting queue."""
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not tuple:
        return False
    rank, *numbers = value
    whole = all(type(one) is int and 0 <= one <= MOST for one in numbers)
    return whole and all(type(one) in (int, float) and one == one for one in rank)


def _are_keys(value: Any) -> bool:
    """Whether a value can be keys of tails."""
    pair = type(value) is tuple and len(value) == 2
    return pair and set(map(type, value)) == {bytes}
