"""Who makes no masks lets every row draw what it likes, and keeps no row waiting."""

from minfer.effects.live.masks import NoMasks, StepMasks, ready_masks
from minfer.records.config import EngineConfig
from minfer.records.messages import Finish
from minfer.records.plan import Mask, Plan
from minfer.records.request import Request
from minfer.records.state import initial


def test_masks_that_have_been_made_are_there() -> None:
    masked = StepMasks((Mask(1, b"\x01"),), (Finish("a", 0, 3),))
    future = ready_masks(masked)
    assert future.done()
    assert future.result(0) is masked


def test_without_masks_no_row_waits() -> None:
    masks = NoMasks()
    assert (
        masks.add_requests(
            [Request(id="a", prompt=(1,), max_tokens=2, needs_host_mask=True)]
        )
        == ()
    )
    plan = Plan(0, (0,), (0,), (0,), (1,), (1,), deferred=(0,))
    future = masks.begin(plan, initial(EngineConfig(num_blocks=1)))
    assert future.done()
    assert future.result(0) == StepMasks((), ())
