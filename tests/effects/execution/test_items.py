"""Items come to another rank as they were sent."""

import pytest

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.ranks.items import (
    Capture,
    Close,
    Collect,
    Discard,
    DummyStep,
    Item,
    Launch,
    Replay,
    Sample,
    Want,
    item_from,
    item_to,
    transfer_item,
)
from minfer.effects.net.framing import PeerError
from minfer.records.messages import FetchBlocks, Move, StoreBlocks
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.tiers import TransferKind

SHAPE = StepShape(decode_rows=2, draws=3, scored=True, splits=(1, 2))
KEYS = (b"a" * 16, b"b" * 16)
ITEMS: list[Item] = [
    Launch(
        Plan(
            step=3,
            run_ids=(1,),
            rows=(2,),
            starts=(5,),
            num_scheduled_tokens=(1,),
            max_sampled_tokens=(9,),
        )
    ),
    Sample(SampleDeferred(3)),
    Collect(),
    Discard(),
    transfer_item(Move(1, TransferKind.LOAD_FROM_HOST, (1, 2), (3, 4))),
    transfer_item(StoreBlocks(2, KEYS, ((1,), (2, 3)))),
    transfer_item(FetchBlocks(3, KEYS, ((1,), (2, 3)))),
    Want(KEYS, "d"),
    DummyStep(SHAPE),
    Capture(SHAPE),
    Replay(SHAPE),
    Close(),
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_items_come_as_they_were_sent(item: Item) -> None:
    assert item_from(item_to(item)) == item


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\0abc", b"\1", b"\2", b"\2\x80", b"\3\x80", b"\2\xff"]
)
def test_what_is_no_item_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="an item that cannot be read"):
        item_from(data)
