"""Events about the slots of adapters: loads end, and adapters are dropped.

`minfer.records.adapters` has the theory.
"""

from typing import Final

from minfer.lifecycle.adapter_use import emptied
from minfer.lifecycle.ending import EndingSample, end_samples
from minfer.lifecycle.transitions import Cause
from minfer.records.adapters import NO_SLOT, Adapters, AdapterSlot
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterEvent,
    AdapterFailed,
    AdapterLoaded,
    AdapterLost,
    DropAdapter,
    clip,
)
from minfer.records.state import EngineState, Transition, emit, ignore
from minfer.values.record import evolve

LOAD_FAILED: Final = "its adapter could not be loaded"  # begins the error of samples


def apply_adapter_event(
    config: EngineConfig, state: EngineState, event: AdapterEvent
) -> Transition:
    """Apply the end of a load, or empty the slot of an adapter that is dropped. A report
    of a load that is not in flight is ignored, and so is the drop of an adapter that is
    in no slot.
    """
    adapters = state.adapters
    if isinstance(event, DropAdapter):
        index = adapters.slot_of(event.adapter)
        if index == NO_SLOT:
            return ignore(state, "adapter", "the dropped one is in no slot")
        return Transition(evolve(state, adapters=_drop(adapters, index)))
    index = _loading_slot(adapters, event)
    if index == NO_SLOT:
        return ignore(state, "adapter", f"slot {clip(event.slot)} loads no such one")
    if isinstance(event, AdapterLoaded):
        loaded = evolve(adapters.slots[index], loading=False)
        return Transition(evolve(state, adapters=adapters.with_slot(index, loaded)))
    return _end_waiting(config, state, event, index)


def _loading_slot(adapters: Adapters, event: AdapterLoaded | AdapterFailed) -> int:
    """The slot whose load a report is about; NO_SLOT: none."""
    if type(event.slot) is not int or type(event.adapter) is not str:
        return NO_SLOT  # an executor may err
    index = adapters.slot_of(event.adapter)
    loads = index == event.slot and index != NO_SLOT and adapters.slots[index].loading
    return index if loads else NO_SLOT


def _drop(adapters: Adapters, index: int) -> Adapters:
    """These slots, of which one is emptied: now, or once no running sample has its
    adapter.
    """
    slot = adapters.slots[index]
    in_use = slot.users or slot.loading
    return adapters.with_slot(
        index, evolve(slot, dropped=True) if in_use else emptied(slot)
    )


def _end_waiting(
    config: EngineConfig, state: EngineState, event: AdapterFailed, index: int
) -> Transition:
    """Empty a slot whose load failed, and end the samples that wait for its adapter."""
    error = clip(event.error)
    adapters = state.adapters.with_slot(index, AdapterSlot())
    message = f"{LOAD_FAILED}: {error}"
    leavers = [
        EndingSample(seq, len(seq.history), Cause.ADAPTER_FAILED, "error", message)
        for seq in state.waiting
        if seq.request.adapter == event.adapter
    ]
    lost = AdapterLost(event.adapter, index, error, len(leavers))
    state = evolve(state, adapters=adapters)
    if not leavers:
        return Transition(state, (), (lost,))
    state, finished = end_samples(config, state, leavers)
    ended = emit(state, finished)
    return evolve(ended, reasons=(lost, *ended.reasons))
