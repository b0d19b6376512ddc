"""Arrival of requests: those that could never run are rejected, the others get a place in
the waiting queue.

Consecutive requests enter at once: each is checked and ranked in turn, but the queue,
which is persistent, is rebuilt once.
"""

from collections.abc import Iterable

from minfer.blocks.keys import Keys, extend_keys, group_keys
from minfer.blocks.ownership import blocks_for
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Ended, Finished, Ignored, Reason, clip
from minfer.records.request import KvTransfer, Request
from minfer.records.sequence import Place, Sequence
from minfer.records.state import EngineState, LiveRequest, Transition, place_is_taken
from minfer.records.tiers import ExternalStore
from minfer.sampling.params import MAX_SAMPLES
from minfer.values.record import evolve


def longest_prompt(context: int, *, output: bool) -> int:
    """Returns the most tokens that a prompt may have; with `output`, one is left for
    that.
    """
    return context - output


def queue_is_full(waiting: int, new: int, max_waiting: int) -> bool:
    """Returns whether the waiting queue cannot take `new` samples."""
    return waiting + new > max_waiting


def rejection_reason(
    config: EngineConfig, state: EngineState, request: Request, coming: int = 0
) -> str:
    """Why a request could never run here, or nothing; `coming` samples arrive
    before it.
    """
    prompt = len(request.prompt)
    num_known = prompt + len(request.output)
    max_known = request.most_known(config.max_model_len)
    needs = config.most_pages(blocks_for(max_known, config.block_size))
    if not prompt:
        return "the prompt is empty"
    if not 1 <= request.n <= MAX_SAMPLES or (request.n > 1 and request.output):
        return f"n must be from 1 to {MAX_SAMPLES}, and 1 for a resumed request"
    output = request.prompt_only is None
    if prompt > longest_prompt(config.max_model_len, output=output):
        reason = (
            f"the prompt has {prompt} tokens; this model's maximum context length is "
            f"{config.max_model_len} tokens"
        )
        left = ", of which at least one must be left for the output"
        return reason + left if output else reason
    if num_known >= max_known:
        return (
            f"the request was resumed with all of its {max_known - prompt} output tokens"
        )
    if needs > config.num_blocks:
        reason = f"prompt and output of up to {max_known} tokens need {needs} KV blocks"
        return f"{reason}; the cache has {config.num_blocks}"
    if request.adapter and not config.adapter_slots:
        return "this engine has no slots for adapters (adapter_slots is 0)"
    full = queue_is_full(len(state.waiting) + coming, request.n, config.max_waiting)
    if full and not (request.continues or request.taken):
        return f"the waiting line is full ({config.max_waiting} samples)"
    if request.largest >= config.vocab_size:
        return f"token ids must be from 0 to {config.vocab_size - 1}"
    return ""


def submit_requests(
    config: EngineConfig, state: EngineState, requests: Iterable[Request]
) -> Transition:
    """Add requests to the waiting queue, in order; the queue and the requests are rebuilt
    once.
    """
    arrivals = _Arrivals(config, state)
    for request in requests:
        arrivals.submit(request)
    return arrivals.done()


def id_in_use(name: str) -> str:
    """The detail of `Ignored` for a request whose id is still in use."""
    return f"{clip(repr(name))} is being served"


class _Arrivals:
    """Requests being added to the queue. Never kept, never shared."""

    def __init__(self, config: EngineConfig, state: EngineState) -> None:
        self.config, self.state = config, state
        self.live, self.new = state.requests.mutate(), list[Sequence]()
        self.tiers = state.tiers
        self.places = set[Place]()  # of the new ones
        self.arrivals, self.last = state.arrivals, consult.last_rank(state)
        self.rejected, self.reasons = list[Finished](), list[Reason]()

    def submit(self, request: Request) -> None:
        """Place a request's samples in the queue, or reject it with a reason."""
        config = self.config
        if request.id in self.live:  # its end would be taken for that of the other one
            self.reasons.append(Ignored("submit", id_in_use(request.id)))
            return
        reason = rejection_reason(config, self.state, request, len(self.new))
        if reason:
            for sample in range(max(1, min(request.n, MAX_SAMPLES))):
                self.rejected.append(Finished(request.id, sample, "rejected", 0, reason))
                self.reasons.append(Ended(request.id, sample, "rejected", reason))
            return
        rank, self.state = consult.rank(config, self.state, request, self.last)
        place = self._earlier_place(request) or (rank, self.arrivals, 0)
        self.last = max(self.last, place[0])
        history = request.prompt + request.output
        sent_keys = request.keys[: len(request.prompt) // config.block_size]
        keys = extend_keys(sent_keys, request.root, history, config.block_size)
        for sample in range(request.n):
            sample_place = (*place[:2], place[2] + sample)
            self.new.append(
                Sequence(request, sample, sample_place, self.state.time, history, keys)
            )
            self.places.add(sample_place)
        self.live[request.id] = LiveRequest(place, request.n)
        self.arrivals += 1
        if config.external_store is not None and request.kv_transfer is not None:
            num_prompt = len(request.prompt)
            self._note_kv_transfer(
                config.external_store, request.kv_transfer, keys, num_prompt
            )

    def _note_kv_transfer(
        self, store: ExternalStore, transfer: KvTransfer, keys: Keys, num_prompt: int
    ) -> None:
        """Believe what the sender says of the external store; or have blocks of the
        prompt of `num_prompt` tokens stored there: those that are cached now, and others
        once they are. Of states of recurrent layers, only that at its end.
        """
        prompt = keys[: num_prompt // self.config.block_size]
        end = (num_prompt - 1) // self.config.block_size
        external_keys, queue = self.tiers.external_keys, self.tiers.external_queue
        push = self.tiers.push_keys
        blocks = prompt[: None if transfer.push_to else transfer.num_stored_blocks]
        for g, group in enumerate(self.config.groups):
            first = transfer.first_block
            of_group = (
                blocks[max(first, end - 1) : end] if group.state else blocks[first:]
            )
            own_keys = group_keys(of_group, g)
            if transfer.push_to:
                external_keys = external_keys.discard(own_keys)
                queue = queue.extended(own_keys, self.config.num_blocks)
                if store.push_only:
                    push = push.add(own_keys, store.max_known_keys)
            else:
                external_keys = external_keys.add(own_keys, store.max_known_keys)
        self.tiers = evolve(
            self.tiers, external_keys=external_keys, push_keys=push, external_queue=queue
        )

    def _earlier_place(self, request: Request) -> Place | None:
        """The place that a request brings along, if it can have that: one that was given
        before, and that no sequence has now.
        """
        place = request.continuation.place
        if place is None or place[1] >= self.arrivals or request.n > 1:
            return None
        is_taken = place in self.places or place_is_taken(self.state, place)
        return None if is_taken else place

    def done(self) -> Transition:
        """The state with all of them in the queue, and one `Emit` with those that were
        rejected.
        """
        state = evolve(
            self.state,
            waiting=self.state.waiting.insert_many(self.new),
            requests=self.live.finish(),
            arrivals=self.arrivals,
            tiers=self.tiers,
        )
        emits = (Emit((), (), tuple(self.rejected)),) if self.rejected else ()
        return Transition(state, emits, tuple(self.reasons))
