"""The specification of adapters: what is in which slot, which loads begin, and how long
samples wait for a slot.

The books have the slots as the device sees them: what commands load there, and what
reports say. Who uses a slot follows from the running samples and the plans in flight.
"""

from collections.abc import Iterator
from typing import Any

from minfer.lifecycle.transitions import Cause, Stage
from minfer.records.adapters import NO_SLOT
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterEvent,
    AdapterFailed,
    AdapterLoaded,
    AdapterLoading,
    AdapterLost,
    Admitted,
    DropAdapter,
    LoadAdapter,
    SlotBlocked,
)
from minfer.records.policy import ADAPTER_PASSES, Policy
from minfer.records.sequence import SampleId, Sequence
from minfer.records.state import EngineState, Transition
from minfer.testing.accounts import SampleAccount
from minfer.testing.books import Books
from minfer.testing.invariants import may_defer, require
from minfer.testing.plan_laws import Planning


def end_load(books: Books, event: AdapterEvent) -> list[SampleAccount] | None:
    """Write a report of a load, or a drop, into the books. Returns the accounts of the
    samples that end with it; None if it has no meaning.
    """
    if isinstance(event, DropAdapter):
        return _drop(books, event.adapter)
    slot: Any = event.slot
    if type(slot) is not int or books.loading.get(slot) != event.adapter:
        return None
    del books.loading[slot]
    if isinstance(event, AdapterLoaded):
        books.slots[slot] = event.adapter
        return []
    accounts = [*books.accounts.values()]
    return [
        account
        for account in accounts
        if account.request.adapter == event.adapter and account.stage is not Stage.RUNNING
    ]


def _drop(books: Books, adapter: str) -> list[SampleAccount] | None:
    places = {name: slot for slot, name in (books.slots | books.loading).items()}
    if adapter not in places:
        return None
    slot = places[adapter]
    books.dropped.add(slot)
    books.empty_dropped(adapter)
    return []


def _users(books: Books, adapter: str) -> int:
    return sum(account.request.adapter == adapter for account in books.running)


def check_adapters(
    books: Books, before: EngineState, turn: Transition, planning: Planning
) -> None:
    """Raise InvariantError unless the loads that a turn begins are allowed, and its state
    has in the slots what the books have.
    """
    if not books.config.adapter_slots:
        loads = [c for c in turn.commands if isinstance(c, LoadAdapter)]
        require(not loads, "adapters", "a load, and no slot")
        return
    _check_loads(books, before, turn, planning)
    _check_slots(books, turn.state)
    _check_passes(books, before, turn, planning)
    for reason in turn.reasons:
        if isinstance(reason, SlotBlocked):
            counted = reason.loading + reason.used == books.config.adapter_slots
            require(counted, "adapters", f"{reason}: all slots are loading or used")


def check_lost(lost: list[AdapterLost], turn: Transition) -> None:
    """Raise InvariantError unless each load that failed is reported, with the number of
    samples that it ended.
    """
    reported = [
        (reason.adapter, reason.slot, reason.ended)
        for reason in turn.reasons
        if isinstance(reason, AdapterLost)
    ]
    expected = [(loss.adapter, loss.slot, loss.ended) for loss in lost]
    require(reported == expected, "adapters", f"lost {expected}, reported {reported}")


def _check_loads(
    books: Books, before: EngineState, turn: Transition, planning: Planning
) -> None:
    """Check that each load has its reason, is of the first waiting sample that needs one,
    and goes into the least recently used slot that nothing reads.
    """
    loads = [c for c in turn.commands if isinstance(c, LoadAdapter)]
    reasons = [r for r in turn.reasons if isinstance(r, AdapterLoading)]
    stated = [(reason.adapter, reason.slot) for reason in reasons]
    expected = [(load.adapter, load.slot) for load in loads]
    require(stated == expected, "adapters", f"loads {expected}, reported {stated}")
    waiting = {seq.id: seq for seq in turn.state.waiting}
    for load, reason in zip(loads, reasons, strict=True):
        seq = waiting.get((reason.id, reason.sample))
        is_wanted = seq is not None and seq.request.adapter == load.adapter
        require(is_wanted, "adapters", f"{load} for a sample that does not want it")
        _check_target(books, load)
        evicted = books.slots.pop(load.slot, "")
        require(reason.evicted == evicted, "adapters", f"{reason}: {evicted!r} was there")
        if reason.evicted:
            _check_least_recent(books, before, turn.state, load)
        books.loading[load.slot] = load.adapter
        books.passes[load.slot] = 0
        books.dropped.discard(load.slot)
    for reason in reasons:
        seq = waiting[reason.id, reason.sample]
        _check_load_order(books, before, turn, planning, seq)


def _check_target(books: Books, load: LoadAdapter) -> None:
    """Check that nothing reads the slot that a load writes, and that the adapter is in no
    other.
    """
    in_range = 0 <= load.slot < books.config.adapter_slots
    require(in_range and load.slot not in books.loading, "adapters", f"{load}: where?")
    present = {*books.slots.values(), *books.loading.values()}
    require(load.adapter not in present, "adapters", f"{load}: it is there already")
    users = _users(books, books.slots.get(load.slot, "-"))
    require(not users, "adapters", f"{load}: {users} running samples use the slot")
    readers = [flight.plan.step for flight in _flights_of(books, load.slot)]
    require(not readers, "adapters", f"{load}: steps {readers} in flight read the slot")


def _flights_of(books: Books, slot: int) -> Iterator[Any]:
    """The plans in flight with a row that reads a slot."""
    for flight in books.flights:
        if any(seat.adapter_slot == slot for seat in flight.seats):
            yield flight


def _check_least_recent(
    books: Books, before: EngineState, after: EngineState, load: LoadAdapter
) -> None:
    """Check that slots which were unused in the whole turn are not empty, and were not
    used less recently than the one that is written.
    """
    taken = before.adapters.slots[load.slot]
    pairs = zip(before.adapters.slots, after.adapters.slots, strict=True)
    for index, (old, new) in enumerate(pairs):
        busy = old != new or old.users or old.loading or index == load.slot
        if busy or any(True for _ in _flights_of(books, index)):
            continue
        if any(plan.step <= old.last_step for plan in before.inflight):
            continue
        is_better = not old.adapter or old.last_use < taken.last_use
        detail = f"{load}: slot {index} is empty, or was used less recently"
        require(not is_better, "adapters", detail)


def _is_passed(config: EngineConfig, planning: Planning, seq: Sequence) -> bool:
    """Whether a waiting sample may have been passed over for another reason than its
    adapter: its client was deferred.
    """
    if seq.ran_before:
        return False
    if planning.deferred is None:
        return may_defer(config)
    return seq.request.client in planning.deferred


def _check_load_order(
    books: Books,
    before: EngineState,
    turn: Transition,
    planning: Planning,
    loaded: Sequence,
) -> None:
    """Check that no sample ahead of the one whose adapter is loaded waits for a slot."""
    after = turn.state
    present = {slot.adapter for slot in after.adapters.slots}
    victims = {victim for victim, _ in planning.preempted}
    loading = before.tiers.loading | after.tiers.loading
    ahead = [
        seq.id
        for seq in after.waiting
        if seq.place < loaded.place
        and seq.request.adapter
        and seq.request.adapter not in present
        and seq.id not in victims
        and seq.request.id not in loading
        and not _is_passed(books.config, planning, seq)
    ]
    require(not ahead, "adapters", f"{loaded.id} got the slot for which {ahead} wait")


def _check_slots(books: Books, after: EngineState) -> None:
    """Check that the state has in the slots what the books have."""
    for index, slot in enumerate(after.adapters.slots):
        there = books.loading.get(index, books.slots.get(index, ""))
        same = slot.adapter == there and slot.loading == (index in books.loading)
        require(same, "adapters", f"slot {index} has {slot}, not {there!r}")


def _check_passes(
    books: Books, before: EngineState, turn: Transition, planning: Planning
) -> None:
    """Check that not more samples of an adapter are admitted in its stay than may pass
    one that waits for a slot before and after the turn.
    """
    after = turn.state
    present = {s.adapter for s in (*before.adapters.slots, *after.adapters.slots)}
    old = {seq.id: seq.place for seq in before.waiting}
    blocked = [
        seq.place
        for seq in after.waiting
        if seq.request.adapter
        and seq.request.adapter not in present
        and old.get(seq.id) == seq.place
        and seq.request.id not in (before.tiers.loading | after.tiers.loading)
        and not _is_passed(books.config, planning, seq)
    ]
    if not blocked:
        return
    seqs = {seq.id: seq for seq in (*after.running.seqs, *after.waiting)}
    admitted = [r for r in turn.reasons if isinstance(r, Admitted)]
    for reason in admitted:
        seq = seqs.get((reason.id, reason.sample))
        if seq is not None and seq.request.adapter and seq.place > min(blocked):
            books.passes[after.adapters.slot_of(seq.request.adapter)] += 1
    if limits_passes(books.config):
        for index, count in books.passes.items():
            detail = f"{count} samples of slot {index} went before one without a slot"
            require(index == NO_SLOT or count <= ADAPTER_PASSES, "slot turns", detail)


def limits_passes(config: EngineConfig) -> bool:
    """Whether the policy allows ADAPTER_PASSES in a stay."""
    method = getattr(type(config.policy), "adapter_passes", Policy.adapter_passes)
    return method is Policy.adapter_passes


def is_closed(config: EngineConfig, after: EngineState, adapter: str) -> bool:
    """Whether samples of an adapter in a slot may pass no sample that waits for one; of
    other policies than those with the usual limit, the state is trusted.
    """
    if not limits_passes(config):
        return adapter in after.adapters.unready
    slots = [slot for slot in after.adapters.slots if slot.adapter == adapter]
    return any(slot.passes >= ADAPTER_PASSES for slot in slots)


def without_adapter(config: EngineConfig, after: EngineState, seq: Sequence) -> bool:
    """Whether a waiting sample may be passed for its adapter: it is in no slot, or on its
    way, or its slot is closed.
    """
    adapter = seq.request.adapter
    if not adapter:
        return False
    ready = {slot.adapter for slot in after.adapters.slots if not slot.loading}
    return adapter not in ready or is_closed(config, after, adapter)


def unready_samples(
    books: Books, after: EngineState, candidates: list[Sequence], *, tried: bool
) -> set[SampleId]:
    """The waiting samples, of those that may be admitted but for their adapters, which a
    plan has to pass over, up to the first that is ready. If one was `tried` in this
    state, no slot may be left unused.
    """
    config = books.config
    slots = {slot.adapter: slot for slot in after.adapters.slots if slot.adapter}
    unready, blocked = set[SampleId](), False
    for seq in candidates:
        adapter = seq.request.adapter
        if not adapter:
            break
        slot = slots.get(adapter)
        if slot is None:
            blocked = True
            free = [i for i in range(config.adapter_slots) if _is_free(books, after, i)]
            detail = f"{seq.id} waits for a slot, and {free} are unused"
            require(not (tried and free), "held", detail)
        elif not slot.loading and not (blocked and is_closed(config, after, adapter)):
            break
        unready.add(seq.id)
    return unready


def _is_free(books: Books, after: EngineState, index: int) -> bool:
    """Whether nothing is loaded into a slot, uses it or reads it."""
    slot = after.adapters.slots[index]
    used = slot.loading or (slot.adapter and _users(books, slot.adapter))
    # What ran in it before it was emptied, or before this book was opened.
    fenced = any(plan.step <= slot.last_step for plan in after.inflight)
    return not (used or fenced or any(True for _ in _flights_of(books, index)))


def close_lost(
    books: Books, event: AdapterFailed, accounts: list[SampleAccount]
) -> AdapterLost:
    """Close the accounts of samples whose adapter could not be loaded."""
    for account in accounts:
        books.close(account, Cause.ADAPTER_FAILED)
    return AdapterLost(event.adapter, event.slot, "", len(accounts))
