"""A state without token ids: the state of a replay of redacted events.

So a journal without token ids can begin anywhere, as others do: with a snapshot.

Theory. In such a journal a block's tokens are zeros and a mark, and the mark is a keyed
digest of the block's content key (`minfer.journal.redact`). So the key that a replay
computes for a block follows from the content keys of the block and of those before it,
without their tokens: each key of a state can be replaced by its key in a replay. With a
sliding window that is impossible: blocks are published alone, and the blocks before an
idle one are unknown.

A policy's state may have names of clients; every string in it is treated as one.
"""

from collections.abc import Iterable
from typing import Any, Final

import attrs
from attrs import define, field

from minfer.blocks.keys import (
    Key,
    Keys,
    block_key,
    extend_keys,
    group_key,
    is_state,
    is_tail,
)
from minfer.blocks.ownership import Blocks
from minfer.blocks.prefix import ROOT, PrefixIndex
from minfer.journal.redact import (
    STOP,
    redact_block,
    redact_tokens,
    redacted_adapter,
    redacted_client,
    redacted_request,
    redacted_root,
    redacted_tail,
)
from minfer.records.adapters import Adapters, UnreadyAdapters
from minfer.records.config import EngineConfig
from minfer.records.drafting import Drafting, Proposed
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.sequence import Chain, RowStates, Running, Sequence
from minfer.records.state import EngineState
from minfer.records.waiting import WaitingQueue
from minfer.values.log import Log
from minfer.values.pmap import Map
from minfer.values.record import evolve

_STOP_IDS: Final = frozenset({STOP})


def can_be_redacted(config: EngineConfig) -> bool:
    """Whether states of such an engine can be redacted."""
    return not config.has_tiers and not any(group.window for group in config.groups)


def redacted_state(
    config: EngineConfig, state: EngineState, secret: bytes
) -> EngineState:
    """The state in which a replay of redacted events would be. `can_be_redacted` must
    hold.
    """
    redaction = _Redaction(config, secret)
    blocks = Blocks(state.blocks.pool, redaction.index(state.blocks.prefix))
    fences = tuple(
        attrs.evolve(fence, published=tuple(map(redaction.key, fence.published)))
        for fence in state.fences
    )
    return evolve(
        state,
        adapters=redaction.adapters(state.adapters),
        blocks=blocks,
        policy=_rename_clients(state.policy, secret),
        waiting=redaction.queue(state.waiting),
        running=redaction.running(state.running),
        stops=_STOP_IDS if state.stops else frozenset(),
        deferred_clients=_rename_clients(state.deferred_clients, secret),
        inflight=tuple(map(_without_tokens, state.inflight)),
        fences=fences,
        drafting=_without_proposed_tokens(state.drafting),
    )


def _without_tokens(plan: Plan) -> Plan:
    """A plan in flight without token ids, which are not needed any more."""
    fills = [attrs.evolve(fill, tokens=(0,) * len(fill.tokens)) for fill in plan.fills]
    drafts = [attrs.evolve(d, tokens=(0,) * len(d.tokens)) for d in plan.drafts]
    return evolve(plan, fills=tuple(fills), drafts=tuple(drafts), opens=())


def _without_proposed_tokens(drafting: Drafting) -> Drafting:
    """Proposals without token ids: only their number matters."""
    proposals = Map(
        (name, Proposed(proposed.known, (0,) * len(proposed.tokens)))
        for name, proposed in drafting.proposals.items()
    )
    return evolve(drafting, proposals=proposals)


def _rename_clients(value: Any, secret: bytes) -> Any:
    """A policy's state with other names for clients."""
    match value:
        case str():
            return redacted_client(secret, value)
        case tuple():
            return tuple(_rename_clients(item, secret) for item in value)
        case frozenset():
            return frozenset(_rename_clients(item, secret) for item in value)
        case Map():
            pairs = value.items()
            return Map(
                (_rename_clients(key, secret), _rename_clients(item, secret))
                for key, item in pairs
            )
    if not attrs.has(type(value)):
        return value
    arguments = {
        attribute.alias: _rename_clients(getattr(value, attribute.name), secret)
        for attribute in attrs.fields(type(value))
        if attribute.init
    }
    return type(value)(**arguments)


@define
class _Redaction:
    """The redaction of one state. Never kept."""

    config: EngineConfig
    secret: bytes
    keys: dict[Key, Key] = field(factory=dict)  # content key -> its key in a replay
    requests: dict[str, Request] = field(factory=dict)

    def key(self, key: Key) -> Key:
        """The key of published content in a replay."""
        return self.keys[key] if key else ROOT

    def _after(self, parent: Key, key: Key) -> Key:
        """The key, in a replay, of content after `parent`, which is a key of the
        replay.
        """
        if key not in self.keys:
            if is_state(key, self.config.state_group or 0):
                self.keys[key] = group_key(parent, key[0])  # its block's content
            elif is_tail(key):
                self.keys[key] = redacted_tail(self.secret, key)
            else:
                tokens = redact_block(self.secret, key, self.config.block_size)
                self.keys[key] = block_key(parent, tokens)
        return self.keys[key]

    def chain(self, keys: Iterable[Key]) -> Keys:
        """The keys, in a replay, of the blocks of a prompt or a sequence from the first
        on.
        """
        parent = redacted_root(self.secret)
        out = []
        for key in keys:
            parent = self._after(parent, key)
            out.append(parent)
        return tuple(out)

    def index(self, prefix: PrefixIndex) -> PrefixIndex:
        """The cached blocks, under other keys."""
        for key in prefix.nodes:
            self._add_key(prefix, key)
        nodes = {
            self.keys[key]: (pages, self.key(parent), users, children, last_use)
            for key, (pages, parent, users, children, last_use) in prefix.nodes.items()
        }
        idle = {use: self.keys[key] for use, key in prefix.idle.items()}
        return attrs.evolve(prefix, nodes=Map(nodes), idle=Map(idle))

    def _add_key(self, prefix: PrefixIndex, key: Key) -> None:
        """Compute the key of a cached block, and of all before it."""
        path = []
        while key and key not in self.keys:
            path.append(key)
            key = prefix.nodes[key][1]
        above = self.keys[key] if key else redacted_root(self.secret)
        for path_key in reversed(path):
            above = self._after(above, path_key)

    def queue(self, queue: WaitingQueue) -> WaitingQueue:
        """The redacted waiting queue."""
        buckets = tuple(tuple(map(self.sequence, bucket)) for bucket in queue.buckets)
        counts = _rename_clients(queue.counts, self.secret)
        adapters = Map(
            (redacted_adapter(self.secret, adapter), count)
            for adapter, count in queue.adapters.items()
        )
        return attrs.evolve(queue, buckets=buckets, counts=counts, adapters=adapters)

    def adapters(self, adapters: Adapters) -> Adapters:
        """The slots, with other names for adapters."""
        slots = [
            attrs.evolve(slot, adapter=redacted_adapter(self.secret, slot.adapter))
            for slot in adapters.slots
        ]
        passed, ready = adapters.unready.passed, adapters.unready.ready
        unready = UnreadyAdapters(
            self._renamed(passed), None if ready is None else self._renamed(ready)
        )
        return evolve(adapters, slots=tuple(slots), unready=unready)

    def _renamed(self, adapters: frozenset[str]) -> frozenset[str]:
        return frozenset(redacted_adapter(self.secret, name) for name in adapters)

    def sequence(self, seq: Sequence) -> Sequence:
        """A sequence, as it entered the queue."""
        size, request = self.config.block_size, seq.request
        if request.id not in self.requests:
            redacted = redacted_request(self.config, request, self.secret)
            self.requests[request.id] = redacted
        keys = extend_keys(seq.keys, request.root, seq.history, size)
        history = redact_tokens(self.secret, keys, 0, len(seq.history), size)
        return attrs.evolve(
            seq,
            request=self.requests[request.id],
            history=tuple(history),
            keys=self.chain(seq.keys),
        )

    def running(self, run: Running) -> Running:
        """The redacted running sequences."""
        size = self.config.block_size
        chains, tails, fresh = [], [], []
        for i, chain in enumerate(run.chains):
            tokens = run.tokens(i, size)
            keys = extend_keys(chain.keys[:], run.seqs[i].request.root, tokens, size)
            redacted_tokens = redact_tokens(self.secret, keys, 0, len(tokens), size)
            tail = len(chain.keys) * size
            cut = tail + len(run.tails[i])
            chains.append(self._chain(chain, redacted_tokens[:tail]))
            tails.append(tuple(redacted_tokens[tail:cut]))
            fresh.append(tuple(redacted_tokens[cut:]))
        return evolve(
            run,
            seqs=tuple(map(self.sequence, run.seqs)),
            chains=tuple(chains),
            tails=tuple(tails),
            fresh=tuple(fresh),
        )

    def _chain(self, chain: Chain, redacted_tokens: list[int]) -> Chain:
        """The published blocks of a running sequence; `redacted_tokens` are the tokens of
        its keys.
        """
        size = self.config.block_size
        keys = self.chain(chain.keys)
        # the first block whose tokens are kept
        first = len(chain.keys) - len(chain.chunks)
        blocks = range(first * size, len(redacted_tokens), size)
        chunks = tuple(tuple(redacted_tokens[start : start + size]) for start in blocks)
        return attrs.evolve(
            chain,
            keys=_split_like(chain.keys, keys),
            leaf=self.key(chain.leaf),
            states=self._states(chain.states),
            chunks=_split_like(chain.chunks, chunks),
        )

    def _states(self, states: RowStates) -> RowStates:
        """The kept states of a running sequence, whose own keys are known."""
        return attrs.evolve(
            states,
            origin=self._state(states.origin),
            kept=tuple(map(self._state, states.kept)),
            checkpoint=self._state(states.checkpoint),
        )

    def _state(self, key: Key) -> Key:
        """The key of a kept state, which has that of its block."""
        return group_key(self.keys[key[1:]], key[0]) if key else ROOT


def _split_like(log: Log[Any], entries: tuple[Any, ...]) -> Log[Any]:
    """Entries in the two levels of a log."""
    cut = len(log.old)
    return Log(entries[:cut], entries[cut:])
