"""The use of adapters' slots by running samples."""

from collections.abc import Iterable

from minfer.records.adapters import NO_SLOT, Adapters, AdapterSlot
from minfer.records.state import EngineState
from minfer.values.record import evolve


def is_unused(state: EngineState, slot: AdapterSlot) -> bool:
    """Whether an adapter may be loaded into a slot: no running sample has the adapter
    that is there, and no load or step in flight is of it.
    """
    read = state.inflight and slot.last_step >= state.inflight[0].step
    return not (slot.loading or slot.users or read)


def begin_use(adapters: Adapters, adapter: str) -> Adapters:
    """The slots after a sample with `adapter`, which is in one of them, starts to run."""
    index = adapters.slot_of(adapter)
    slot = adapters.slots[index]
    used = evolve(slot, users=slot.users + 1, last_use=adapters.uses)
    return evolve(adapters.with_slot(index, used), uses=adapters.uses + 1)


def end_uses(state: EngineState, adapters_of: Iterable[str]) -> Adapters:
    """The slots after samples with these adapters stop running; steps in flight may still
    read them.
    """
    adapters = state.adapters
    for adapter in adapters_of:
        index = adapters.slot_of(adapter)
        if index == NO_SLOT:
            continue
        slot = adapters.slots[index]
        last_step = state.inflight[-1].step if state.inflight else slot.last_step
        users = slot.users - 1
        left = evolve(slot, users=users, last_use=adapters.uses, last_step=last_step)
        if slot.dropped and not users:
            left = emptied(left)
        adapters = evolve(adapters.with_slot(index, left), uses=adapters.uses + 1)
    return adapters


def emptied(slot: AdapterSlot) -> AdapterSlot:
    """An empty slot, which a step in flight may still read."""
    return AdapterSlot(last_step=slot.last_step)
