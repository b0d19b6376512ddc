"""The request as it enters the engine."""

import math
from array import array
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.blocks.keys import Key, Keys, Tails
from minfer.records.adapters import check_adapter
from minfer.sampling.beam import BeamRound
from minfer.sampling.params import MAX_ADJUSTMENTS
from minfer.sampling.params import MAX_SAMPLES as MAX_SAMPLES
from minfer.sampling.params import SamplingParams as SamplingParams
from minfer.sampling.reference_sampler import RowSampling
from minfer.values.checks import (
    LARGEST_TOKEN,
    MAX_INT64,
    MAX_PRIORITY,
    check_number,
    check_text,
    check_whole,
)
from minfer.values.checks import ParameterError as ParameterError

LAST: Final = "last"  # ways of pooling: the hidden state of the last input,
MEAN: Final = "mean"  # or the mean over all inputs
POOLINGS: Final = (LAST, MEAN)


@frozen
class PromptOnly:
    """What makes a request end with its prompt and yield no token: the prompt is pooled,
    or scored (`SamplingParams.prompt_logprobs`), or only fills the cache.
    """

    # How the prompt is pooled to one vector, for the executor; "": not at all.
    pooling: str = ""

    def __attrs_post_init__(self) -> None:
        check_text(self.pooling, "prompt_only.pooling")


@frozen(kw_only=True)
class Continuation:
    """What a request takes over from an earlier one; by default nothing. Each beam of a
    search is a request of its own, which continues one of the round before.
    """

    # The place in the waiting queue of an earlier request that this one continues: rank,
    # number of arrival, and a number that separates those that share both. It then counts
    # as having run before: it is neither rejected nor deferred for others. None: it comes
    # last in its rank.
    place: tuple[tuple[float, ...], int, int] | None = None
    # For a request that yields one token at most: the keys of its partial last block,
    # without its last token and with it (`keys.tail_keys`), trusted as `Request.keys`
    # are. It begins with a copy of the block cached under the first key, and its own
    # block is cached under the second. So a tree of prompts costs one input for each
    # node.
    tail_keys: Tails | None = None
    beam_round: BeamRound | None = None  # set for a beam of a search

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.beam_round, BeamRound | None):
            raise ParameterError("continuation.beam_round", "must be a BeamRound or None")
        if self.place is not None and not _is_place(self.place):
            reason = (
                "must be a rank (numbers, in a tuple) and two whole numbers, in a tuple"
            )
            raise ParameterError("continuation.place", reason)
        if not (self.tail_keys is None or _are_keys(self.tail_keys)):
            reason = "must be two of bytes, in a tuple"
            raise ParameterError("continuation.tail_keys", reason)


@frozen(kw_only=True)
class KvTransfer:
    """Where blocks of a prompt are besides this engine, or go (`minfer.tiers`)."""

    # How many leading full blocks of the prompt the external store has, as far as the
    # sender knows; what is not there is computed.
    num_stored_blocks: int = 0
    # The engine that the blocks of the prompt are pushed to, by its name in the external
    # store: those that are cached at once and others as they are computed, even those
    # that the store is believed to have.
    push_to: str = ""
    # The first block of the prompt that is pushed, or that was stored: the engine that
    # gets them has those before it.
    first_block: int = 0

    def __attrs_post_init__(self) -> None:
        check_text(self.push_to, "kv_transfer.push_to")
        for name in ("num_stored_blocks", "first_block"):
            value = getattr(self, name)
            check_number(value, f"kv_transfer.{name}", 0, MAX_INT64, whole=True)


@frozen(kw_only=True)
class Request:
    """A request as the engine takes it: all parameters are resolved, and it has no text.

    `keys` are the content keys of the prompt's first full blocks; the engine computes the
    others from `root`. `output` holds the tokens already produced for the only sample,
    when a request is resumed. Raises ParameterError for values of a wrong type, for token
    ids that are not from 0 to 2^32 - 1, and for numbers out of range; whether a request
    can be served is decided by the engine.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int = 0  # of the output; 0 if and only if it has none
    prompt_only: PromptOnly | None = None  # set if it has no output
    # token ids that end a sample, and are part of it
    stop_ids: frozenset[int] = frozenset()
    # Token sequences that it may not output: the words of `sampling.bad_words`.
    bad_words: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    # The number of its first sample in the noise of the seed: so one of several samples
    # can be resumed with its own noise.
    first_sample: int = 0
    seed: int = 0
    # for the executor; the engine does not look inside
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # lower runs first, under a policy that uses it
    client: str = ""  # the client; used by fair shares
    deadline: float = math.inf  # seconds after its arrival; used by earliest deadline
    # The key before the first block: of fingerprint, salt and adapter.
    root: Key = b""
    # Trusted: a wrong key gives this request the KV of another one, and keys that
    # contradict those of others break the pool, which no other field can do. They are
    # computed once, where the prompt becomes token ids, and the API server processes send
    # them to the engines of their own server: processes that the same supervisor started,
    # over Unix sockets in a folder that only their user can open, or with Ray over TCP
    # with a secret of that server. Whatever comes from elsewhere has its keys computed
    # again by its receiver: requests of other servers, and those in a journal.
    keys: Keys = ()
    output: tuple[int, ...] = ()
    # Its next token depends on the host: its sampling is deferred, so that a mask may
    # come late, and it is never more than one token ahead of its known tokens.
    needs_host_mask: bool = False
    continuation: Continuation = Continuation()
    kv_transfer: KvTransfer | None = None
    # Whether another engine took it before: it enters the waiting queue even if that is
    # full, as its client was told no such thing.
    taken: bool = False
    # The digest of the adapter that is added to the model's weights, in hex digits; "":
    # none. `root` was made with it.
    adapter: str = ""
    # token id: computed once, on creation
    largest: int = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        reason = "token ids must be whole numbers from 0, in a tuple"
        for param in ("prompt", "output"):
            if type(getattr(self, param)) is not tuple:
                raise ParameterError(param, reason)
        largest = -1
        for param, tokens in (("prompt", self.prompt), ("output", self.output)):
            try:
                array("I", tokens)
                # The tuple has its ints already; the array would make each of them anew.
                largest = max(largest, int(max(tokens, default=-1)))
            except (TypeError, OverflowError):
                raise ParameterError(param, reason) from None
        object.__setattr__(self, "largest", largest)
        self._check_types()

    def _check_types(self) -> None:
        for param in ("id", "client"):
            check_text(getattr(self, param), param)
        for param in ("max_tokens", "n", "seed"):
            check_whole(getattr(self, param), param)
        check_number(self.first_sample, "first_sample", 0, MAX_SAMPLES, whole=True)
        check_number(self.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY, whole=True)
        if type(self.deadline) is not float or not self.deadline >= 0:
            check_number(self.deadline, "deadline", 0, MAX_INT64)
            object.__setattr__(self, "deadline", float(self.deadline))
        for param, kind in _RECORDS.items():
            if not isinstance(getattr(self, param), kind):
                raise ParameterError(param, f"must be {getattr(kind, '__name__', kind)}")
        if not isinstance(self.stop_ids, frozenset):
            raise ParameterError("stop_ids", "must be a frozenset of token ids")
        for token in self.stop_ids:
            check_number(token, "stop_ids", 0, LARGEST_TOKEN, whole=True)
        self._check_bad_words()
        self._check_output()
        for param in ("needs_host_mask", "taken"):
            if not isinstance(getattr(self, param), bool):
                raise ParameterError(param, "must be true or false")
        check_adapter(self.adapter, "adapter", may_be_empty=True)
        if not isinstance(self.root, bytes):
            raise ParameterError("root", "must be bytes")
        if not isinstance(self.keys, tuple) or not set(map(type, self.keys)) <= {bytes}:
            raise ParameterError("keys", "must be a tuple of bytes")

    @property
    def pooling(self) -> str:
        """How its prompt is pooled to one vector, or nothing."""
        return "" if self.prompt_only is None else self.prompt_only.pooling

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be read from the cache. A mean is over all positions,
        and prompt log-probabilities are of each: such a request computes all of them.
        """
        return self.sampling.prompt_logprobs is None and self.pooling != MEAN

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt: the tokens after them in the prompt of a beam
        are its output.
        """
        beam_round = self.continuation.beam_round
        return len(self.prompt) if beam_round is None else beam_round.prompt

    @property
    def continues(self) -> bool:
        """Whether it continues an earlier request, at the place of that one."""
        return self.continuation.place is not None

    @property
    def recomputes_prompt(self) -> bool:
        """Whether its whole prompt must be computed in one generation, after every
        restart again: its pooled result is not in the cache.
        """
        return self.prompt_only is not None and self.prompt_only.pooling == MEAN

    def _check_output(self) -> None:
        """Check that it yields tokens, or none and no more than its prompt needs."""
        if self.prompt_only is None:
            if self.max_tokens < 1:
                raise ParameterError(
                    "max_tokens", "must be at least 1 without prompt_only"
                )
        elif self.max_tokens or self.n != 1 or self.output or self.needs_host_mask:
            raise ParameterError(
                "prompt_only",
                "yields no token: max_tokens must be 0 and n 1, without output and "
                "needs_host_mask",
            )
        if self.continuation.tail_keys is not None and self.max_tokens > 1:
            reason = "are for a request that yields one token at most"
            raise ParameterError("continuation.tail_keys", reason)

    def _check_bad_words(self) -> None:
        """Check that words are not empty, and that a device has room for all changes of
        tokens.
        """
        words = self.bad_words
        if type(words) is not tuple or not all(type(word) is tuple for word in words):
            raise ParameterError("bad_words", "must be tuples of token ids, in a tuple")
        for word in words:
            if not word:
                raise ParameterError("bad_words", "a word has no token")
            for token in word:
                check_number(token, "bad_words", 0, LARGEST_TOKEN, whole=True)
        sampling = self.sampling
        stops = len(self.stop_ids) if sampling.min_tokens else 0
        count = len(sampling.logit_bias) + stops + sum(map(len, words))
        if count > MAX_ADJUSTMENTS:
            raise ParameterError(
                "bad_words" if words else "logit_bias",
                f"{count} single tokens are to be changed (biases, stop ids until "
                f"min_tokens, tokens of bad words); at most {MAX_ADJUSTMENTS} can be",
            )

    def most_known(self, max_model_len: int) -> int:
        """The tokens that a sample may have at most, with the prompt.

        For one of its prompt only, one more, which it never gets: so its last input is
        due as that of any other request is, for the token after it.
        """
        if self.prompt_only is not None:
            return len(self.prompt) + 1
        return min(len(self.prompt) + self.max_tokens, max_model_len)


# Fields that are records, and the type of each.
_RECORDS: Final[dict[str, Any]] = {
    "sampling": SamplingParams,
    "prompt_only": PromptOnly | None,
    "continuation": Continuation,
    "kv_transfer": KvTransfer | None,
}


def _is_place(value: Any) -> bool:
    """Whether a value can be compared with places in the waiting queue."""
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not tuple:
        return False
    rank, *numbers = value
    are_whole = all(
        type(number) is int and 0 <= number <= MAX_INT64 for number in numbers
    )
    return are_whole and all(
        type(number) in (int, float) and number == number for number in rank
    )


def _are_keys(value: Any) -> bool:
    """Whether a value is a pair of keys of partial blocks."""
    pair = type(value) is tuple and len(value) == 2
    return pair and set(map(type, value)) == {bytes}


def row_sampling(request: Request, sample: int) -> RowSampling:
    """The sampling values of one sample of a request."""
    number = request.first_sample + sample
    params = request.sampling
    values = RowSampling.of(
        params, request.seed, number, request.stop_ids, request.bad_words
    )
    if params.chooses and params.logprobs is None:
        values = evolve(values, logprobs=0)  # by which the best samples are found
    # Only once per request: its first sample computes the prompt, before it has output.
    once = sample == 0 and not request.output
    scored = params.prompt_logprobs if once else None
    return values if scored is None else evolve(values, prompt_logprobs=scored)
