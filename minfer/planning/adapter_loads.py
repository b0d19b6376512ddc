"""Admission and adapters: whether the adapter of the head of the queue is ready, and if
not, in which slot it is loaded (`minfer.records.adapters` has the theory).

A plan passes over the samples whose adapter is not ready: one is being loaded, or no slot
can be had. So the scan of the queue goes on until it finds a sample that could run; only
the samples ahead of that one have their adapters loaded, each in the order of the queue.
An adapter that was loaded and not yet used is safe from them: its sample is ahead, and
ends the scan.
"""

from minfer.lifecycle.adapter_use import is_unused
from minfer.planning.admit import current_load
from minfer.planning.step_builder import StepBuilder
from minfer.policies import consult
from minfer.records.adapters import NO_SLOT, AdapterSlot, UnreadyAdapters
from minfer.records.messages import AdapterLoading, LoadAdapter, SlotBlocked
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.values.record import evolve


def passes_over(builder: StepBuilder, seq: Sequence) -> bool:
    """Whether the plan passes over `seq`, the head of the queue, as its adapter is not
    ready; its load begins if it is not on the device and a slot is unused.
    """
    adapters = builder.state.adapters
    index = adapters.slot_of(seq.request.adapter)
    if index == NO_SLOT:
        index = _least_recently_used(builder.state)
        if index == NO_SLOT:
            _wait_for_slot(builder, seq)
            return True
        _begin_load(builder, seq, index)
    elif not _is_loading(builder.state, index):
        return False
    passed = builder.unready.passed | {seq.request.adapter}
    builder.unready = evolve(builder.unready, passed=passed)
    return True


def _is_loading(state: EngineState, index: int) -> bool:
    return state.adapters.slots[index].loading


def _least_recently_used(state: EngineState) -> int:
    """The slot to load an adapter into: an empty one, or the least recently used of those
    that are unused; NO_SLOT: none.
    """
    unused = [
        (slot.adapter != "", slot.last_use, index)
        for index, slot in enumerate(state.adapters.slots)
        if is_unused(state, slot)
    ]
    return min(unused)[-1] if unused else NO_SLOT


def _begin_load(builder: StepBuilder, seq: Sequence, index: int) -> None:
    """Begin the load of a waiting sample's adapter into a slot: its stay begins."""
    adapters, adapter = builder.state.adapters, seq.request.adapter
    slot = AdapterSlot(adapter, loading=True, last_use=adapters.uses)
    loading = evolve(adapters.with_slot(index, slot), uses=adapters.uses + 1)
    builder.state = evolve(builder.state, adapters=loading)
    builder.loads.append(LoadAdapter(adapter, index))
    evicted = adapters.slots[index].adapter
    builder.reasons.append(AdapterLoading(*seq.id, adapter, index, evicted))


def _wait_for_slot(builder: StepBuilder, seq: Sequence) -> None:
    """Note that `seq` is the first that waits for a slot: those behind it whose adapter
    is on the device may pass it, as far as the policy lets them.
    """
    state = builder.state
    load = current_load(builder.config, state, len(builder.newcomers))
    builder.max_passes, builder.state = consult.adapter_passes(
        builder.config, state, load
    )
    builder.slot_blocked = seq
    _close_slots(builder)


def _close_slots(builder: StepBuilder) -> None:
    """Pass over all adapters but those on the device that may pass the first sample which
    waits for a slot.
    """
    slots = builder.state.adapters.slots
    open_slots = [
        slot.adapter
        for slot in slots
        if not slot.loading and slot.passes < builder.max_passes
    ]
    builder.unready = UnreadyAdapters(builder.unready.passed, frozenset(open_slots))


def count_pass(builder: StepBuilder, adapter: str) -> None:
    """Count an admission of a sample with `adapter` before the first sample that waits
    for a slot.
    """
    adapters = builder.state.adapters
    index = adapters.slot_of(adapter)
    slot = adapters.slots[index]
    passed = adapters.with_slot(index, evolve(slot, passes=slot.passes + 1))
    builder.state = evolve(builder.state, adapters=passed)
    _close_slots(builder)


def report_slot_wait(builder: StepBuilder) -> None:
    """Record which adapters the plan passed over, and which sample waits for a slot; the
    latter is reported if it changed.
    """
    adapters, blocked = builder.state.adapters, builder.slot_blocked
    place = None if blocked is None else blocked.place
    if place == adapters.slot_blocked and builder.unready == adapters.unready:
        return
    if blocked is not None and place != adapters.slot_blocked:
        loading = sum(slot.loading for slot in adapters.slots)
        used = len(adapters.slots) - loading
        adapter = blocked.request.adapter
        builder.reasons.append(SlotBlocked(*blocked.id, adapter, loading, used))
    noted = evolve(adapters, unready=builder.unready, slot_blocked=place)
    builder.state = evolve(builder.state, adapters=noted)
