"""A plan: the work of one step, as the executor gets it; and its results.

A plan speaks positions. It says which device rows take part, how many inputs each takes
from which position on, and how much it may yield; token values are in it only where the
host must supply them, in `fills` and `drafts`: the next step can be planned before the
last one's tokens are known. What a row needs besides (what it knows, its sampling values,
its block tables) was sent when it was opened, or as it changed: an executor never sees a
request. All is plain data, so a plan has a wire form (`minfer.runs.wire`) for executors
in other processes.

Contract of an executor:

- Plans are executed in order. Within a plan: `moves`, then `opens`, then `grows`, then
  `copies`, then the rows.
- A row that is not in `fills` feeds itself: its input is the last token it sampled, at
  the position after its last input; `starts` then is the latest position that can be, and
  exact unless a plan in flight may yield less than its most.
- Row i yields from min(1, most[i]) to most[i] tokens; where most is 0 it yields none (a
  chunk of a prompt that goes on, or any of a request that ends with its prompt).
- A row in `drafts` feeds itself, and takes drafts as further inputs: counts[i] is 1 more
  than there are. Those that the plan does not say, the executor's draft model makes. At
  each of its inputs it samples as it would without drafts, and it goes on as long as that
  token is the next draft: it yields the drafts that were accepted and the token after
  them. KV that was written for the others is nobody's: the row's next input takes the
  place of the first of them.
- A row that was opened with `pooling` yields no token. With the plan that has the last
  input of its prompt comes a vector of what the model made of it: of that input, or of
  all since the row was opened, which then are the whole prompt. It travels beside the
  tokens, as log-probabilities do.
- A row that was opened with `prompt_logprobs` is told, with each plan that has inputs of
  its prompt, the log-probabilities of the tokens of the prompt that follow these inputs
  (`minfer.prompt_logprobs`): in the place of a vector, as it is never pooled.
- A row in `apart` is not sampled until the host says so (`SampleApart`), with a mask of
  the tokens that are allowed. The other rows do not wait for it, but the plan's results
  do. A plan that follows may have been made meanwhile in which the row feeds itself; it
  is handed over once the host has said so.
- A row in `apart` and in `drafts` has drafts that the plan says, from where it exactly
  is. It has a mask for each of its places: for what follows its last token, and for what
  follows each draft. The host may let it have fewer drafts than it was planned with: it
  yields no more tokens than it has masks for. Of one such plan all was drawn before the
  next is handed over.
- A failure is reported once, for the earliest plan that failed, and after it no plan that
  had been handed over will touch the cache any more.
"""

from itertools import chain
from math import isfinite
from typing import Any, Final

from attrs import frozen

from minfer.sample import RowSampling
from minfer.sequence import SampleId

Yields = tuple[tuple[int, ...], ...]  # token ids per row
Scores = tuple[tuple[float, ...], ...]  # per row, one for each token it yielded, or none
DEVICE: Final = "device"  # the tier of the blocks that rows read and write


def tokens_of(yields: Any) -> tuple[int, ...] | None:
    """All tokens of results, row after row; None of what is no tuple of tuples of whole
    numbers.
    """
    if type(yields) is not tuple or not set(map(type, yields)) <= {tuple}:
        return None
    tokens = tuple(chain.from_iterable(yields))
    return tokens if set(map(type, tokens)) <= {int} else None


@frozen
class TokenLogprobs:
    """What a client may ask of a token: how likely it was, and what else was."""

    logprob: float  # natural
    rank: int  # 1: it was the likeliest
    likeliest: tuple[int, ...] = ()  # token ids, the likeliest first
    logprobs: tuple[float, ...] = ()  # theirs


Logprobs = tuple[tuple[TokenLogprobs, ...], ...]  # per row, one for each token
LAST: Final = "last"  # ways of pooling: what the model made of the last input,
MEAN: Final = "mean"  # or the mean of what it made of all
POOLINGS: Final = (LAST, MEAN)
# Per row, what is said of its prompt: the vector of one that ended, float32 in
# little-endian order; or log-probabilities of some of its tokens; or nothing.
Pooled = tuple[bytes, ...]


def flaw_beside(scores: Any, logprobs: Any, pooled: Any, sizes: tuple[int, ...]) -> str:
    """What is wrong with what comes beside the tokens of rows that yielded so many, or
    nothing.
    """
    if not _is_nothing(scores) and not _are_scores(scores, sizes):
        return "scores must be none or one finite number for each token of a row"
    if not _is_nothing(logprobs) and not _are_by_row(logprobs, sizes):
        return "log-probabilities must be none or one for each token of a row"
    if not _is_nothing(pooled) and not _are_vectors(pooled, len(sizes)):
        return "pooled vectors must be none or bytes for each row"
    return ""


def _is_nothing(column: Any) -> bool:
    return type(column) is tuple and not column


def _are_vectors(column: Any, rows: int) -> bool:
    right = type(column) is tuple and len(column) == rows
    return right and set(map(type, column)) <= {bytes}


def _are_by_row(column: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a column has, for each row, nothing or something for each token."""
    if type(column) is not tuple or len(column) != len(sizes):
        return False
    each = zip(column, sizes, strict=True)
    return all(type(some) is tuple and len(some) in (0, size) for some, size in each)


def _are_scores(scores: Any, sizes: tuple[int, ...]) -> bool:
    if not _are_by_row(scores, sizes):
        return False
    every = tuple(chain.from_iterable(scores))
    return set(map(type, every)) <= {float} and all(map(isfinite, every))


@frozen
class Fill:
    """Inputs from history for one row: `tokens` at positions starts[index] and on."""

    index: int  # in the plan's columns
    tokens: tuple[int, ...]


@frozen
class Draft:
    """Tokens that are expected to follow a row's last one, to be verified."""

    index: int  # in the plan's columns
    tokens: tuple[int, ...] = ()  # none: the executor's draft model says them


@frozen
class Open:
    """A row is taken over by a new generation: all that the device keeps for it."""

    index: int  # in the plan's columns
    name: SampleId  # for messages about it; nothing depends on it
    known: tuple[int, ...]  # token ids of prompt and output, as far as they are known
    prompt: int  # how many of them are the prompt's
    last: int  # the index of the last token that it may have
    sampling: RowSampling
    tables: tuple[tuple[int, ...], ...]  # blocks, for each group of layers
    # fine-tuned weights that are added to the model's; none is loaded yet
    adapter: str = ""
    pooling: str = ""  # how its prompt becomes one vector; it then yields no token


@frozen
class Grow:
    """A row's table gets more blocks, from entry `at` on."""

    row: int
    at: int
    blocks: tuple[int, ...]
    group: int = 0  # of layers, whose table it is


@frozen
class Copy:
    """The first `count` positions of block `source` are copied to block `target`."""

    source: int
    target: int
    count: int


@frozen
class Move:
    """A whole block is copied from one tier to another: from the device, or to it."""

    source: int  # its number in the tier it comes from
    target: int  # and in the one it goes to
    origin: str = DEVICE  # names of tiers
    tier: str = DEVICE


@frozen
class Plan:
    """One step. The columns have one entry per row that takes part, in batch order."""

    step: int
    gens: tuple[int, ...]  # generation of the sequence in the row
    rows: tuple[int, ...]  # device rows
    starts: tuple[int, ...]  # position of the first input, or the latest it may be
    counts: tuple[int, ...]  # inputs
    most: tuple[int, ...]  # tokens the row may yield
    fills: tuple[Fill, ...] = ()
    opens: tuple[Open, ...] = ()
    grows: tuple[Grow, ...] = ()
    copies: tuple[Copy, ...] = ()
    drafts: tuple[Draft, ...] = ()
    moves: tuple[Move, ...] = ()
    apart: tuple[int, ...] = ()  # places in the columns: rows that are sampled apart


@frozen
class Mask:
    """The tokens that one row may draw."""

    index: int  # in the plan's columns
    bits: bytes = b""  # a bit for each token id, the lowest first; none: all are allowed
    place: int = 0  # how many drafts of the row come before


@frozen
class Stand:
    """How many drafts of a row may stand: behind more the host has made no masks."""

    index: int  # in the plan's columns
    most: int


@frozen
class SampleApart:
    """The host's word that the rows in `apart` of a step are to be sampled now."""

    step: int
    masks: tuple[Mask, ...] = ()  # of some of these rows; the others may draw any token
    # Whether all masks lie in memory that the executor lent for this step, in a line for
    # each entry of `apart`. Whoever is told over a wire lends none.
    written: bool = False
    stands: tuple[Stand, ...] = ()  # of some that have drafts; all of the others' may
