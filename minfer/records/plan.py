"""A plan: the work of one step, as the executor gets it; and its results.

A plan has positions. It names the device rows that take part, how many inputs each takes
from which position on, and how many tokens it may yield. It has token values only where
the host must supply them, in `fills` and `drafts`: so the next step can be planned before
the last one's tokens are known. What a row needs besides (known tokens, sampling values,
block tables) was sent when it was opened, or when it changed: an executor never sees a
request. All is plain data, so a plan has a wire form (`minfer.records.plan_wire`) for
executors in other processes.

Contract of an executor:

- Plans are executed in order. Within a plan: `opens`, then `grows`, then `copies`, then
  the rows, then `saves`.
- A row that is not in `fills` is a decode row: its input is the last token it sampled, at
  the position after its last input; `starts` is the latest position that is possible, and
  exact unless a plan in flight may yield less than its most.
- Row i yields from min(1, max_sampled_tokens[i]) to max_sampled_tokens[i] tokens; if that
is 0 it yields none (a
  prefill chunk that is not the last, or any of a request that ends with its prompt).
- A row in `drafts` is a decode row with drafts as further inputs: num_scheduled_tokens[i]
is 1 more
  than there are drafts. If the plan has no draft tokens for it, the executor's draft
  model makes them. At each input the row samples as it would without drafts, and it
  continues as long as that token is the next draft: it yields the accepted drafts and the
  token after them. The KV of rejected drafts is overwritten: the row's next input is at
  the position of the first of them.
- A row that was opened with `pooling` yields no token. The plan with the last input of
  its prompt yields a vector instead: the hidden state of that input, or the mean over all
  inputs since the row was opened, which then are the whole prompt. It is sent beside the
  tokens, as log-probabilities are.
- For a row that was opened with `prompt_logprobs`, each plan that has inputs of its
  prompt yields the log-probabilities of the prompt tokens that follow these inputs
  (`minfer.records.token_logprobs`): in the place of a vector, as such a row is never
  pooled.
- A row in `deferred` is sampled when the host sends `SampleDeferred`, with a mask of the
  allowed tokens (deferred sampling). The other rows do not wait for it, but the plan's
  results do. The next plan, with the row as a decode row, may have been made meanwhile;
  it is handed over once the host has sent the mask.
- A row in `deferred` and in `drafts` has drafts from the plan, and a mask for each place:
  for the token after its last one, and for the token after each draft. The core can plan
  such rows; the torch executor refuses them, and the engine's own host proposes no drafts
  for them.
- With a state group (recurrent layers, `CacheGroup.state`), the last table of each row
  begins with the pages of its *working state*, which each of its inputs changes. A row
  that is opened at position 0 starts from the state before any token (zero), whatever its
  pages have; one that is opened at a later position starts from the state that `copies`
  of the same plan put there, which was kept at exactly that position.
- `saves` keep working states: that of row `index` at the position `saved_at`, in `pages`.
  It is a multiple of the block size, after starts[index] and at most after the row's last
  input of this plan. It is exact: such a row has no drafts, and no plan in flight may
  yield less for it than its most. The state after a row's last input is copied at the
  end; one before it, of a row in `fills`, is written while the row's inputs are computed.
  A row has one save at most.
- After the step, the working state of a row in `drafts` has taken in the row's accepted
  inputs and no rejected one, because it cannot be overwritten by position. The executor
  ensures that before it executes `saves`, and before the next plan.
- A row that was opened with an `adapter_slot` computes with the adapter that is in that
  slot, until another generation takes over the row. The adapter is there before the plan
  is made (`LoadAdapter`), and stays until no plan in flight has such a row.
- A failure is reported once, for the earliest plan that failed, and after it no plan that
  had been handed over may touch the cache any more.
"""

from itertools import chain
from typing import Any

from attrs import frozen

from minfer.records.adapters import NO_SLOT
from minfer.records.sequence import SampleId
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.reference_sampler import RowSampling

Yields = tuple[tuple[int, ...], ...]  # token ids per row


def tokens_of(yields: Any) -> tuple[int, ...] | None:
    """All tokens of results, row after row; None if `yields` is not a tuple of tuples of
    integers.
    """
    if type(yields) is not tuple or not set(map(type, yields)) <= {tuple}:
        return None
    tokens = tuple(chain.from_iterable(yields))
    return tokens if set(map(type, tokens)) <= {int} else None


# Per row, the result of its prompt: a pooled vector, float32 in little-endian order, at
# its end; or log-probabilities of some of its tokens; or nothing.
Pooled = tuple[bytes, ...]


def flaw_beside(logprobs: Any, pooled: Any, sizes: tuple[int, ...]) -> str:
    """What is wrong with log-probabilities or pooled results, or nothing; `sizes` are the
    tokens that each row yielded.
    """
    if not _is_nothing(logprobs) and not _are_by_row(logprobs, sizes):
        return "log-probabilities must be none or one record for each token of a row"
    if not _is_nothing(pooled) and not _are_vectors(pooled, len(sizes)):
        return "pooled vectors must be none or bytes for each row"
    return ""


def _is_nothing(column: Any) -> bool:
    return type(column) is tuple and not column


def _are_vectors(column: Any, rows: int) -> bool:
    right = type(column) is tuple and len(column) == rows
    return right and set(map(type, column)) <= {bytes}


def _are_by_row(column: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a column has, for each row, nothing or one entry for each token."""
    if type(column) is not tuple or len(column) != len(sizes):
        return False
    pairs = zip(column, sizes, strict=True)
    if not all(
        type(entries) is tuple and len(entries) in (0, size) for entries, size in pairs
    ):
        return False
    return set(map(type, chain.from_iterable(column))) <= {TokenLogprobs}


@frozen
class PrefillTokens:
    """Prefill tokens for one row: `tokens` at positions starts[index] and on."""

    index: int  # in the plan's columns
    tokens: tuple[int, ...]


@frozen
class Draft:
    """Tokens that are expected to follow a row's last one, to be verified."""

    index: int  # in the plan's columns
    tokens: tuple[int, ...] = ()  # none: the executor's drafter makes them


@frozen
class NewRow:
    """A new generation takes over a row: all that the device keeps for it."""

    index: int  # in the plan's columns
    name: SampleId  # for messages about it; nothing depends on it
    known: tuple[int, ...]  # token ids of prompt and output that are known
    prompt: int  # how many of them are prompt tokens
    last_index: int  # of the last token that it may have
    sampling: RowSampling
    tables: tuple[tuple[int, ...], ...]  # blocks, for each group of layers
    # how its prompt is pooled to one vector; the row then yields no token
    pooling: str = ""
    # The slot of the adapter (LoRA) that is added to the model's weights; NO_SLOT: none.
    adapter_slot: int = NO_SLOT


@frozen
class Grow:
    """A row's table gets more blocks, from entry `at` on."""

    row: int
    at: int
    blocks: tuple[int, ...]
    group: int = 0  # the group of layers whose table it is


@frozen
class Copy:
    """The first `count` positions of block `source` are copied to block `target`."""

    source: int
    target: int
    count: int


@frozen
class SaveState:
    """A row's working state is kept in `pages`."""

    index: int  # in the plan's columns
    pages: tuple[int, ...]  # as many as a state takes
    # The position of the state, if it is before the row's last input; 0: it is after it.
    inside: int = 0


@frozen
class Plan:
    """One step. The columns have one entry for each row that takes part, in batch
    order.
    """

    step: int
    run_ids: tuple[int, ...]  # of the run of the sequence in the row
    rows: tuple[int, ...]  # device rows
    starts: tuple[int, ...]  # position of the first input, or the latest it may be
    num_scheduled_tokens: tuple[int, ...]  # inputs
    max_sampled_tokens: tuple[int, ...]  # that the row may yield
    fills: tuple[PrefillTokens, ...] = ()
    opens: tuple[NewRow, ...] = ()
    grows: tuple[Grow, ...] = ()
    copies: tuple[Copy, ...] = ()
    drafts: tuple[Draft, ...] = ()
    deferred: tuple[int, ...] = ()  # places in the columns: rows with deferred sampling
    saves: tuple[SaveState, ...] = ()

    def saved_at(self, save: SaveState) -> int:
        """The position of the state that a save keeps."""
        end = self.starts[save.index] + self.num_scheduled_tokens[save.index]
        return save.inside or end


@frozen
class Mask:
    """The tokens that one row may sample."""

    index: int  # in the plan's columns
    bits: bytes = b""  # a bit for each token id, the lowest first; none: all are allowed
    place: int = 0  # how many drafts of the row come before


@frozen
class SampleDeferred:
    """The host's message to sample the rows in `deferred` of a step now."""

    step: int
    masks: tuple[Mask, ...] = ()  # of some of these rows; the others may sample any token
    # Whether all masks are in memory that the executor lent for this step, one line for
    # each entry of `deferred`. An executor behind a wire lends none.
    written: bool = False
