"""Adapters (LoRA) and their slots on the device.

Theory. An adapter is content: it is named by a digest of its tensors and configuration,
which is in the root of the block keys (`minfer.blocks.keys.root_key`), so KV computed
with one adapter is never read with another, in any tier. Its name for users is the
edge's; a name that gets other weights gets another digest.

The device has `EngineConfig.adapter_slots` slots, and a row reads the adapter of one slot
(`NewRow.adapter_slot`), or none. What happens to a slot:

    empty, unused  --LoadAdapter-->  loading  --AdapterLoaded-->  ready, used
          ^                             |                              |
          |                       AdapterFailed                        |
          +-----------------------------+------------------------------+

Samples are admitted only while their adapter is ready. A slot is unused again when no
running sample has its adapter and no step in flight reads it; the least recently used
one is given first.

A *stay* is the time of one adapter in a slot, from its load to the next one into that
slot. Samples are admitted in the order of the queue, but those whose adapter is not ready
are passed by others, as those of deferred clients are. The first sample that finds no
slot, as all are used or loading, is bounded in its wait: during one stay at most
`Policy.adapter_passes` samples of the slot's adapter are admitted before it. Then the
slot is closed to samples behind it, and unused once its rows have ended. Slots are given
in the order of the queue, and each load is for a sample that is admitted next: so a
sample with k samples ahead of it in the queue gets a slot after at most k other loads,
which is ceil((k + 1) / s) stays of each of s slots, under a policy in whose order no
later arrival goes ahead.
"""

from typing import Final

from attrs import frozen

from minfer.values.checks import ParameterError, check_text
from minfer.values.record import evolve

NO_SLOT: Final = -1  # the slot of a row without an adapter
MAX_ADAPTER_SLOTS: Final = 1024
_MAX_DIGITS: Final = 128  # of a digest: SHA-512 has as many
_HEX_DIGITS: Final = frozenset("0123456789abcdef")


def check_adapter(value: object, param: str, *, may_be_empty: bool = False) -> None:
    """Raise ParameterError unless `value` is an adapter's digest in lower-case hex
    digits, or nothing, where that is allowed.
    """
    check_text(value, param)
    text = str(value)
    if not text and may_be_empty:
        return
    if not 0 < len(text) <= _MAX_DIGITS or not _HEX_DIGITS.issuperset(text):
        raise ParameterError(
            param,
            f"must be the digest of an adapter, of at most {_MAX_DIGITS} lower-case hex "
            f"digits, not {text!r:.80}",
        )


@frozen
class AdapterSlot:
    """One slot of the device, and the stay of the adapter in it."""

    adapter: str = ""  # its digest; "": the slot is empty
    loading: bool = False
    users: int = 0  # running samples with the adapter
    # The last step in flight when a sample with the adapter stopped running: it may read
    # the slot, which is not written before that step is over.
    last_step: int = -1
    last_use: int = 0  # in the order of uses of all slots
    passes: int = 0  # samples admitted in this stay before one that waits for a slot
    dropped: bool = False  # whether the slot is emptied once it is unused


@frozen
class UnreadyAdapters:
    """Adapters whose waiting samples a plan passes over: those in `passed`; and if no
    slot can be had, all that are not in `ready`.
    """

    passed: frozenset[str] = frozenset()
    ready: frozenset[str] | None = None  # none of `passed`; None: a slot can be had

    def __contains__(self, adapter: str) -> bool:
        if not adapter:
            return False
        if adapter in self.passed:
            return True
        return self.ready is not None and adapter not in self.ready

    def __bool__(self) -> bool:
        return bool(self.passed) or self.ready is not None


ALL_READY: Final = UnreadyAdapters()


@frozen
class Adapters:
    """The slots of the device. Without slots there are no adapters."""

    slots: tuple[AdapterSlot, ...] = ()
    uses: int = 0  # of all slots so far
    unready: UnreadyAdapters = ALL_READY  # that the last plan passed over
    # The sample that waits for a slot, if one was reported, by its place in the queue.
    slot_blocked: tuple[tuple[float, ...], int, int] | None = None

    def slot_of(self, adapter: str) -> int:
        """The slot in which an adapter is, or is being loaded to; NO_SLOT: none."""
        if not adapter:
            return NO_SLOT
        slots = enumerate(self.slots)
        return next((i for i, slot in slots if slot.adapter == adapter), NO_SLOT)

    def with_slot(self, index: int, slot: AdapterSlot) -> "Adapters":
        """These slots with another one at `index`."""
        slots = (*self.slots[:index], slot, *self.slots[index + 1 :])
        return evolve(self, slots=slots)


NO_ADAPTERS: Final = Adapters()
