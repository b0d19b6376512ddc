"""What all ranks of an engine do, one item after the other, as rank 0 decides.

Theory. Steps of several ranks run sums over them, so all must run the same steps in the
same order. Rank 0 decides that order, also of what is done between plans: captures of
graphs and steps that are timed. It sends the others each item before it does it itself.
What may differ between ranks is whether a step runs by a graph: its sums are the same.

A failed plan fails on all ranks alike (its logits are not finite, or it asks for what
cannot be done). After one, `Discard` has all drop the plans launched after it.

As bytes, an item is a byte for its kind, and then a plan or masks as
`minfer.records.plan_wire` writes them, or any other item in msgpack. Both ends are of one
engine.
"""

from typing import Final, TypeAlias

import msgspec
from attrs import frozen
from msgspec import Struct

from minfer.blocks.keys import Keys
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.net.framing import UNREADABLE, PeerError
from minfer.records.messages import FetchBlocks, Move, StoreBlocks, TransferCommand
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.plan_wire import (
    WireError,
    deferred_from,
    deferred_to,
    plan_from,
    plan_to,
)


@frozen
class Launch:
    """Launch a plan."""

    plan: Plan


@frozen
class Sample:
    """Sample the deferred rows of a launched plan."""

    command: SampleDeferred


class Collect(Struct, tag=True, frozen=True):
    """Wait for the earliest launched plan."""


class Discard(Struct, tag=True, frozen=True):
    """The plan that was collected last has failed: drop those after it."""


class Swap(Struct, tag=True, frozen=True):
    """Begin to copy pages between the device and the host; each rank has its own part."""

    command: Move


class Store(Struct, tag=True, frozen=True):
    """Begin to store blocks; each rank has its own part of them."""

    command: StoreBlocks


class Fetch(Struct, tag=True, frozen=True):
    """Begin to fetch blocks; each rank has its own part of them."""

    command: FetchBlocks


class Want(Struct, tag=True, frozen=True):
    """Send the blocks of a prompt to another engine, once they are computed."""

    keys: Keys
    engine: str


class AddAdapter(Struct, tag=True, frozen=True):
    """Read an adapter into host memory; each rank has its own part."""

    number: int  # of the report of its end
    digest: str
    folder: str


class RemoveAdapter(Struct, tag=True, frozen=True):
    """Free the host memory of an adapter."""

    digest: str


class LoadOnRank(Struct, tag=True, frozen=True):
    """Begin to copy an adapter to a slot."""

    number: int  # of the report of its end
    adapter: str  # its digest
    slot: int


class DummyStep(Struct, tag=True, frozen=True):
    """Run a dummy step of a shape."""

    shape: StepShape


class Capture(Struct, tag=True, frozen=True):
    """Capture the graph of a shape."""

    shape: StepShape


class Replay(Struct, tag=True, frozen=True):
    """Run the graph of a shape, with the inputs of a dummy step."""

    shape: StepShape


class Close(Struct, tag=True, frozen=True):
    """End."""


Transfer: TypeAlias = Swap | Store | Fetch
AdapterItem: TypeAlias = AddAdapter | RemoveAdapter | LoadOnRank
Other: TypeAlias = (
    Collect
    | Discard
    | Transfer
    | Want
    | AdapterItem
    | DummyStep
    | Capture
    | Replay
    | Close
)
Item: TypeAlias = Launch | Sample | Other
_PLAN, _MASKS, _OTHER = b"\0", b"\1", b"\2"  # kinds
_encode: Final = msgspec.msgpack.Encoder().encode
_other: "Final[msgspec.msgpack.Decoder[Other]]" = msgspec.msgpack.Decoder(Other)


def transfer_item(command: TransferCommand) -> Transfer:
    """Returns the item for a transfer."""
    match command:
        case Move():
            return Swap(command)
        case StoreBlocks():
            return Store(command)
        case FetchBlocks():
            return Fetch(command)


def item_to(item: Item) -> bytes:
    """Returns an item as bytes."""
    match item:
        case Launch(plan):
            return _PLAN + plan_to(plan)
        case Sample(command):
            return _MASKS + deferred_to(command)
    return _OTHER + _encode(item)


def item_from(data: bytes | bytearray) -> Item:
    """Returns the item of these bytes. Raises PeerError for others."""
    kind, rest = data[:1], bytes(memoryview(data)[1:])
    try:
        if kind == _PLAN:
            return Launch(plan_from(rest))
        if kind == _MASKS:
            return Sample(deferred_from(rest))
        return _other.decode(rest)
    except (WireError, *UNREADABLE) as error:
        raise PeerError(f"an item that cannot be read: {error}") from None
