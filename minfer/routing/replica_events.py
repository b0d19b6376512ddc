"""What a router must know of an engine, as events: folds over the engine's states.

Theory of cache changes. Published and evicted blocks follow from the states before and
after a turn, without a list of all blocks. In groups of layers without a window, cached
blocks form a forest (`minfer.blocks.prefix`).

- A new block has a last descendant that is new, too. That is held by a running sequence
  or a fence; or it is idle, and then its ticket was given out in this turn. So all new
  blocks are found from these ends, upward to the first that was there before.
- The idle blocks without children are evicted in the order of their tickets. So all
  evicted blocks are found from the tickets before, the least first, up to one that is
  still idle; and upward to the first that is still there. If no ticket is left, blocks
  that sequences and fences held before may have been evicted as well.

The cost is that of the changes and of a look at each running sequence, in turns that
change the cache.
"""

from collections.abc import Iterable
from typing import Final

from attrs import frozen

from minfer.blocks.keys import DIGEST, Key, Keys
from minfer.blocks.prefix import PrefixIndex, lookup
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit
from minfer.records.state import EngineState, Turn
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    LoadReport,
    RequestEnded,
    RequestStarted,
    RouterEvent,
)
from minfer.values.tickets import pop_least


@frozen
class CacheChanges:
    """Content keys of full blocks that were published and evicted in a turn."""

    published: Keys = ()  # none before the block that it follows
    evicted: Keys = ()  # none before the blocks that follow it


NO_CHANGES: Final = CacheChanges()


def routing_group(config: EngineConfig) -> int | None:
    """The group of layers whose blocks a router knows: the first without a window; None
    if all have one.
    """
    groups = enumerate(config.groups)
    return next((g for g, group in groups if not group.window), None)


def cache_changes(
    config: EngineConfig, before: EngineState, after: EngineState
) -> CacheChanges:
    """The blocks that were published and evicted between two states of one turn."""
    old, new = before.blocks.prefix, after.blocks.prefix
    group = routing_group(config)
    if old is new or group is None:
        return NO_CHANGES
    published = _published(old, new, after)
    evicted = _evicted(old, new, before)
    if not (published or evicted):
        return NO_CHANGES
    return CacheChanges(
        content_keys(reversed(published), group), content_keys(evicted, group)
    )


def _published(old: PrefixIndex, new: PrefixIndex, after: EngineState) -> list[Key]:
    """The new blocks, none before those that follow it."""
    ends = [chain.leaf for chain in after.running.chains]
    ends += [key for fence in after.fences for key in fence.published]
    tickets = range(old.next_use, new.next_use)
    ends += [new.idle[ticket] for ticket in tickets if ticket in new.idle]
    paths = [_climb(key, new, old) for key in ends]
    # Where two paths meet, the longer one has all blocks of the other above that.
    return _joined(paths)


def _evicted(old: PrefixIndex, new: PrefixIndex, before: EngineState) -> list[Key]:
    """The blocks that are gone, none before those that followed it."""
    words, paths = old.words.mutate(), list[list[Key]]()
    for _ in range(len(old.idle)):
        ticket = pop_least(words)
        key = old.idle[ticket]
        if new.idle.get(ticket) == key:
            return _joined(paths)
        paths.append(_climb(key, old, new))
    paths += [_climb(chain.leaf, old, new) for chain in before.running.chains]
    fenced = (key for fence in before.fences for key in fence.published)
    paths += [_climb(key, old, new) for key in fenced]
    return _joined(paths)


def _climb(key: Key, index: PrefixIndex, other_index: PrefixIndex) -> list[Key]:
    """A block and those before it, last first, up to the first in `other_index`."""
    path = []
    while key and key not in other_index.nodes:
        path.append(key)
        key = index.nodes[key][1]
    return path


def _joined(paths: list[list[Key]]) -> list[Key]:
    """The keys of paths up a forest, each once, none before those below it."""
    # The last mention of a key comes after all that are below it on their paths.
    keys = [key for path in paths for key in path]
    return [*reversed(dict.fromkeys(reversed(keys)))]


def content_keys(keys: Iterable[Key], group: int) -> Keys:
    """The content keys among those of all groups and of partial blocks."""
    if not group:  # others have a byte before their digest
        return tuple([key for key in keys if len(key) <= DIGEST])
    # Keys of the first group may begin like this, and are shorter.
    group_byte, size = bytes((group,)), DIGEST + 1
    return tuple(
        [key[1:] for key in keys if len(key) == size and key.startswith(group_byte)]
    )


def load_report(config: EngineConfig, name: str, state: EngineState) -> LoadReport:
    """The load of the replica `name` in a state: costs a look at each sequence."""
    run = state.running
    prefill = sum(
        num_known - num_scheduled
        for num_known, num_scheduled in zip(run.known, run.scheduled, strict=True)
        if num_known - num_scheduled > 1
    )
    group, size, prefix = routing_group(config), config.block_size, state.blocks.prefix
    for seq in state.waiting:
        keys, hit = seq.keys or seq.request.keys, 0
        if group is not None and seq.reads_cache:
            hit = lookup(prefix, keys, group=group)
        prefill += max(1, len(seq.history) - hit * size)
    return LoadReport(
        replica=name,
        waiting=len(state.waiting),
        running=len(run),
        prefill=prefill,
        pages=state.blocks.available,
        adapters=_adapters(state) if config.adapter_slots else None,
    )


def _adapters(state: EngineState) -> tuple[str, ...]:
    """The adapters on the device, and those that are being loaded."""
    return tuple(slot.adapter for slot in state.adapters.slots if slot.adapter)


def cache_events(
    config: EngineConfig, name: str, before: EngineState, after: EngineState
) -> list[RouterEvent]:
    """The events of the cache of the replica `name` between two states of one turn."""
    events: list[RouterEvent] = []
    changes = cache_changes(config, before, after)
    if changes.evicted:
        events.append(BlocksEvicted(name, changes.evicted))
    if changes.published:
        events.append(BlocksPublished(name, changes.published))
    return events


def replica_events(
    config: EngineConfig, name: str, turn: Turn, unstarted: set[str]
) -> list[RouterEvent]:
    """The events of a turn of the replica `name`: cache, starts, ends. `unstarted` are
    the ids of its requests without a token so far; those that start or end are removed.
    """
    events = cache_events(config, name, turn.before, turn.transition.state)
    for command in turn.transition.commands:
        if isinstance(command, Emit):
            if unstarted:
                columns = zip(command.ids, command.tokens, strict=True)
                for (request_id, _), tokens in columns:
                    if tokens and request_id in unstarted:
                        unstarted.remove(request_id)
                        events.append(RequestStarted(request_id))
            for finished in command.finished:
                if finished.id not in turn.transition.state.requests:
                    unstarted.discard(finished.id)
                    events.append(RequestEnded(finished.id))
    return events
