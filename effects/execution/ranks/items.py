"""What all ranks of an engine do, one item after the other, as rank 0 decides.

Theory. Steps of several ranks run sums over them, so all must run the same steps in the
same order. Rank 0 decides that order, also of what is done between plans: captures of
graphs and steps that are timed. It tells the others each item before it does it itself.
What may differ between ranks is whether a step runs by a graph: its sums are the same.

A failed plan fails on all ranks alike (its logits are not finite, or it asks for what
cannot be done). After one, `Discard` has all drop the plans launched after it.

As bytes, an item is a byte for its kind, and then its fields: plans and masks as
`minfer.runs.wire` writes them, shapes as JSON. Both ends are of one engine.
"""

import json
from typing import Any, Final

from attrs import asdict, frozen

from minfer.blocks.keys import Keys
from minfer.effects.execution.device.step_shape import StepShape
from minfer.records.messages import FetchBlocks, Move, StoreBlocks, TransferCommand
from minfer.records.plan import Plan, SampleDeferred
from minfer.runs.wire import deferred_from, deferred_to, plan_from, plan_to


@frozen
class Launch:
    """Launch a plan."""

    plan: Plan


@frozen
class Sample:
    """Sample the deferred rows of a launched plan."""

    command: SampleDeferred


@frozen
class Collect:
    """Wait for the earliest launched plan."""


@frozen
class Discard:
    """The plan that was collected last has failed: drop those after it."""


@frozen
class Transfer:
    """Begin to move pages between the device and a tier; each rank has its own part."""

    command: TransferCommand


@frozen
class Want:
    """Send the blocks of a prompt to another engine, once they are computed."""

    keys: Keys
    engine: str


@frozen
class DummyStep:
    """Run a dummy step of a shape."""

    shape: StepShape


@frozen
class Capture:
    """Capture the graph of a shape."""

    shape: StepShape


@frozen
class Replay:
    """Run the graph of a shape, with the inputs of a dummy step."""

    shape: StepShape


@frozen
class Close:
    """End."""


Item = (
    Launch
    | Sample
    | Collect
    | Discard
    | Transfer
    | Want
    | DummyStep
    | Capture
    | Replay
    | Close
)
KINDS: Final[tuple[type[Item], ...]] = (
    Launch,
    Sample,
    Collect,
    Discard,
    Transfer,
    Want,
    DummyStep,
    Capture,
    Replay,
    Close,
)


def item_to(item: Item) -> bytes:
    """Returns an item as bytes."""
    kind = bytes((KINDS.index(type(item)),))
    match item:
        case Launch(plan):
            return kind + plan_to(plan)
        case Sample(command):
            return kind + deferred_to(command)
        case Transfer(command):
            return kind + _transfer_to(command)
        case Want(keys, engine):
            return kind + json.dumps([_texts(keys), engine]).encode()
        case DummyStep(shape) | Capture(shape) | Replay(shape):
            return kind + json.dumps(asdict(shape)).encode()
    return kind


def item_from(data: bytes) -> Item:
    """Returns the item of these bytes. Raises ValueError, IndexError for others."""
    kind, rest = KINDS[data[0]], data[1:]
    if kind is Launch:
        return Launch(plan_from(rest))
    if kind is Sample:
        return Sample(deferred_from(rest))
    if kind is Transfer:
        return Transfer(_transfer_from(rest))
    if kind is Want:
        keys, engine = json.loads(rest)
        return Want(_keys(keys), engine)
    if kind is DummyStep or kind is Capture or kind is Replay:
        return kind(StepShape(**_tuples(json.loads(rest))))
    return kind()  # type: ignore[call-arg]  # those that are left have no fields


def _transfer_to(command: TransferCommand) -> bytes:
    fields = asdict(command)
    if not isinstance(command, Move):
        fields["keys"] = _texts(command.keys)
    return json.dumps([type(command).__name__, fields]).encode()


def _transfer_from(data: bytes) -> TransferCommand:
    name, fields = json.loads(data)
    if name == Move.__name__:
        return Move(**_tuples(fields))
    made = FetchBlocks if name == FetchBlocks.__name__ else StoreBlocks
    keys, pages = _keys(fields["keys"]), _tuple(fields["pages"])
    return made(number=fields["number"], keys=keys, pages=pages)


def _texts(keys: Keys) -> list[str]:
    return [key.hex() for key in keys]


def _keys(texts: list[str]) -> Keys:
    return tuple(map(bytes.fromhex, texts))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields, their lists as the tuples that they were."""
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
