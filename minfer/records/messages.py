"""The engine's interface: events, commands, and reasons of decisions.

Events made by a client are checked when they are made: a wrong value raises
ParameterError there. Results of steps are not checked there, as their sender could not
correct them and the step would never end. The engine checks them, and counts a step with
invalid results as failed.
"""

import sys
from math import inf
from typing import ClassVar, Final, get_args

from attrs import field, frozen

from minfer.blocks.keys import Keys
from minfer.blocks.prefix import Pages
from minfer.records.adapters import check_adapter
from minfer.records.plan import Plan, Pooled, Yields
from minfer.records.request import Request
from minfer.records.sequence import SampleId, SampleIds
from minfer.records.speculation import MOST_DRAFTS
from minfer.records.tiers import TransferKind
from minfer.records.token_logprobs import Logprobs
from minfer.values.checks import (
    ParameterError,
    check_flag,
    check_number,
    check_text,
    check_tokens,
    check_whole,
)

# the engine's reasons of ends
OWN_ENDS: Final = frozenset({"cancelled", "rejected", "error"})
LARGEST: Final = sys.float_info.max  # times are finite


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


@frozen
class OfSample:
    """Base of messages about one sample of one request."""

    id: str  # the request's
    sample: int


@frozen
class Tick:
    """The time of this turn, in seconds on a clock that never goes back."""

    time: float

    def __attrs_post_init__(self) -> None:
        # the usual case first
        if type(self.time) is not float or not -inf < self.time < inf:
            check_number(self.time, "time", -LARGEST, LARGEST)
            # as a journal gives it back
            object.__setattr__(self, "time", float(self.time))


@frozen
class Submit:
    """A request arrives."""

    request: Request

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.request, Request):
            raise ParameterError(
                "request", f"must be a Request, not {_kind(self.request)}"
            )


@frozen
class Cancel:
    """The client cancels a request: all its samples end."""

    id: str

    def __attrs_post_init__(self) -> None:
        check_text(self.id, "id")


@frozen
class Finish(OfSample):
    """The text layer ends a sample after `length` output tokens, for example at a stop
    string; or because it cannot go on: then the reason is "error", and `error` explains
    it.
    """

    length: int
    reason: str = "stop"
    error: str = ""

    def __attrs_post_init__(self) -> None:
        check_text(self.id, "id")
        check_whole(self.sample, "sample")
        check_whole(self.length, "length")
        check_text(self.reason, "reason")
        check_text(self.error, "error")
        has_error = self.reason == "error" and self.error
        if self.error and not has_error:
            raise ParameterError("error", "needs the reason 'error'")
        if self.reason in OWN_ENDS and not has_error:
            raise ParameterError("reason", f"{self.reason!r} is the engine's own to give")


@frozen
class Pause(OfSample):
    """The host is not ready for a sample's next token, for example as its mask takes
    long: the sample is not planned any further until a `Pause` with `paused` false. Steps
    that are planned already are executed.
    """

    paused: bool = True

    def __attrs_post_init__(self) -> None:
        check_text(self.id, "id")
        check_whole(self.sample, "sample")
        check_flag(self.paused, "paused")


@frozen
class Propose(OfSample):
    """The host drafts for a sample: `tokens` may follow its first `known` tokens. The
    next step that is planned while nothing of the sample is in flight uses them, if no
    more tokens are known then.
    """

    known: int
    tokens: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        check_text(self.id, "id")
        check_whole(self.sample, "sample")
        check_whole(self.known, "known")
        check_tokens(self.tokens, "tokens", MOST_DRAFTS)


@frozen
class Executed:
    """A step is done: per row of its plan, the tokens it yielded.

    `logprobs`, and `pooled` (vectors or log-probabilities of prompts), are for clients:
    they pass through and no decision depends on them. Journals keep those of rows that
    are beams of a search, and no others.
    """

    step: int
    yields: Yields
    logprobs: Logprobs = field(default=(), eq=False, repr=False)
    pooled: Pooled = field(default=(), eq=False, repr=False)


@frozen
class Failed:
    """A step failed; no plan from it on has been or will be executed."""

    step: int
    error: str = ""


@frozen
class Moved:
    """A transfer between tiers is done: all its pages are written."""

    number: int


@frozen
class Lost:
    """A transfer between tiers failed: what is in the pages that it writes is
    undefined, and it will write no more.
    """

    number: int
    error: str = ""


@frozen
class AdapterLoaded:
    """The load of an adapter into a slot (`LoadAdapter`) is done."""

    adapter: str
    slot: int


@frozen
class AdapterFailed:
    """The load of an adapter into a slot failed: what is in the slot is undefined, and
    it will not be written any more. The samples that wait for the adapter end with the
    reason "error". A later request may have it loaded again.
    """

    adapter: str
    slot: int
    error: str = ""


@frozen
class DropAdapter:
    """The operator unloads an adapter: its slot is emptied once no running sample has it.
    Requests for it that are in the engine are served, or end with an error if it has to
    be loaded again and cannot.
    """

    adapter: str

    def __attrs_post_init__(self) -> None:
        check_adapter(self.adapter, "adapter")


AdapterEvent = AdapterLoaded | AdapterFailed | DropAdapter
Event = (
    Tick
    | Submit
    | Cancel
    | Finish
    | Pause
    | Propose
    | Executed
    | Failed
    | Moved
    | Lost
    | AdapterLoaded
    | AdapterFailed
    | DropAdapter
)
# A subclass of one is not an event: it could not be written to a journal and read again.
EVENTS: Final = frozenset(get_args(Event))


@frozen
class Finished(OfSample):
    """A sample has ended; the last message about it."""

    # "stop" (or the text layer's reason), "length", "cancelled", "rejected" (it could
    # never have run: see `error`) or "error" (its steps failed too often)
    reason: str
    length: int  # output tokens
    error: str = ""
    # prompt tokens that the prefix cache gave at the sample's first admission
    cached: int = 0


@frozen
class Execute:
    """Hand this plan to the executor."""

    plan: Plan


@frozen
class Emit:
    """New tokens by sample, as columns, then the samples that ended."""

    ids: SampleIds
    tokens: Yields
    finished: tuple[Finished, ...] = ()
    logprobs: Logprobs = field(default=(), eq=False, repr=False)  # a column too, or none
    # A column too, or none: results of prompts.
    pooled: Pooled = field(default=(), eq=False, repr=False)


@frozen
class Move:
    """Copy pages between the device and the host tier, beside the steps, and report
    `Moved` or `Lost`. Page i of `sources` is copied to page i of `targets`.

    No step in flight or to come reads the targets or writes the sources before the
    report, so no step has to wait for it, and it for none.
    """

    number: int
    kind: TransferKind  # to or from host memory
    sources: Pages
    targets: Pages


@frozen
class StoreBlocks:
    """Copy blocks of the device to the external store, under their content keys, beside
    the steps, and report `Moved` or `Lost`. No step writes the pages before the report.
    """

    kind: ClassVar = TransferKind.STORE_TO_EXTERNAL
    number: int
    keys: Keys
    pages: tuple[Pages, ...]  # that are read, by block


@frozen
class FetchBlocks:
    """Copy blocks from the external store to pages of the device, beside the steps, and
    report `Moved`, or `Lost` if not all of them are there, and as they were stored. No
    step uses the pages before the report.
    """

    kind: ClassVar = TransferKind.FETCH_FROM_EXTERNAL
    number: int
    keys: Keys
    pages: tuple[Pages, ...]  # that are written, by block


TransferCommand = Move | StoreBlocks | FetchBlocks


@frozen
class LoadAdapter:
    """Load an adapter into a slot of the device, in the place of what is there, beside
    the steps, and report `AdapterLoaded` or `AdapterFailed`, with the same fields.

    No step in flight, and none to come before the report, has a row that reads the slot.
    """

    adapter: str  # its digest
    slot: int


@frozen
class WakeAt:
    """No step can be planned now, but one can at `time` (seconds): send a Tick then."""

    time: float


Command = Execute | TransferCommand | LoadAdapter | Emit | WakeAt


@frozen
class Admitted(OfSample):
    """A sample starts to run, for the first time or again.

    A run's prefix-hit share is sum(cached) / sum(prompt) over all its admissions: tokens
    from the cache at each sample's first admission, over the prompt tokens of those
    samples. For an admission after a preemption both are 0, as its hits are blocks that
    it computed itself.
    """

    waited: float  # seconds since it arrived
    hit: int  # leading tokens whose KV was cached
    known: int  # tokens known, of which hit
    copied: int = 0  # tokens whose KV is copied from a sibling
    cached: int = 0  # of `hit`, tokens of the prompt, if it has not run before
    prompt: int = 0  # tokens of the prompt, if it has not run before


@frozen
class QueueBlocked(OfSample):
    """The head of the queue has to wait; reported once until the cause changes."""

    # "blocks", "rows", "budget", "sibling", "policy", "loading" (its cached blocks are on
    # their way, and so are those of all others), "adapter" (its adapter is not on the
    # device, and all others wait for theirs, or for blocks on their way) or "share": all
    # waiting clients are deferred, as each has its share of seats or joins
    cause: str
    needs: int = 0  # blocks, if that is the cause
    available: int = 0


@frozen
class Preempted(OfSample):
    """A sample released its blocks and its row, and waits at its old rank or a better
    one.
    """

    # The sequence that needed the blocks, row or tokens. It is the sample itself, too, if
    # a failed step lost the state of its recurrent layers.
    by: SampleId
    known: int  # tokens it keeps
    # positions of KV it releases; published ones may stay cached
    computed: int


@frozen
class Missed(OfSample):
    """An admitted sample found only `block` of its `blocks` full prefix blocks in the
    cache.
    """

    block: int
    blocks: int


@frozen
class WindowMissed(OfSample):
    """The prefix hit of an admitted sample ended at `block`, as that block was not cached
    in `group`, which has a window; groups without one had `cached` blocks.
    """

    group: int
    block: int
    cached: int


@frozen
class StateMissed(OfSample):
    """The prefix hit of an admitted sample has `block` blocks, because no later state of
    recurrent layers was kept; of the other layers `cached` blocks were cached.
    """

    block: int
    cached: int


@frozen
class Loading(OfSample):
    """A waiting sample has cached blocks in a tier, from which they are loaded: expected
    to take `seconds`, where computing their KV takes `recompute`.
    """

    blocks: int  # of its prefix that a hit is to have
    hit: int  # of these, blocks that the device has already
    seconds: float
    recompute: float
    kind: TransferKind


@frozen
class Recomputing(OfSample):
    """A waiting sample has cached blocks in a tier, but computing their KV again is
    expected to be faster. Fields are as in `Loading`.
    """

    blocks: int
    hit: int
    seconds: float
    recompute: float
    kind: TransferKind


@frozen
class AdapterLoading(OfSample):
    """A waiting sample's adapter is loaded into a slot of the device, where `evicted` was
    before ("": the slot was empty). Samples behind it pass it meanwhile.
    """

    adapter: str
    slot: int
    evicted: str


@frozen
class SlotBlocked(OfSample):
    """The first waiting sample whose adapter is not on the device waits for a slot: in
    each an adapter is being loaded, or is used by running samples. Reported once until
    another sample is the first.
    """

    adapter: str
    loading: int  # slots
    used: int


@frozen
class AdapterLost:
    """The load of an adapter failed: the samples that waited for it have ended."""

    adapter: str
    slot: int
    error: str
    ended: int  # samples


@frozen
class LostBlocks:
    """A transfer failed: its blocks could not be copied."""

    blocks: int
    error: str
    kind: TransferKind


@frozen
class SavesSkipped:
    """A step saves `saved` states of recurrent layers, as many as one step may; states of
    `skipped` more rows were due, and are not saved.
    """

    step: int
    saved: int
    skipped: int


@frozen
class Ended(OfSample):
    """A sample left the engine."""

    reason: str
    error: str = ""


@frozen
class Discarded:
    """A step failed: its results and those of the plans after it are discarded."""

    step: int
    error: str
    plans: int
    rows: int


@frozen
class Ignored:
    """An event had no meaning: an unknown step, an unknown request."""

    event: str
    detail: str


@frozen
class PolicyOverride:
    """The policy's answer to `question` could not be used: that of first come, first
    served was used instead.
    """

    question: str  # a method of minfer.records.policy.Policy
    why: str
    # Where it raised, what and in which line: for people, and no part of a decision.
    error: str = field(default="", eq=False)
    line: str = field(default="", eq=False)


Reason = (
    Admitted
    | QueueBlocked
    | Preempted
    | Missed
    | WindowMissed
    | StateMissed
    | Loading
    | Recomputing
    | AdapterLoading
    | SlotBlocked
    | AdapterLost
    | LostBlocks
    | SavesSkipped
    | Ended
    | Discarded
    | Ignored
    | PolicyOverride
)
MAX_TEXT: Final = 200  # characters of an error that are kept: errors may quote user data


def clip(text: object) -> str:
    """`text`, cut to the length that a record keeps; for other types, the name of the
    type.
    """
    if not isinstance(text, str):
        return _kind(text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
