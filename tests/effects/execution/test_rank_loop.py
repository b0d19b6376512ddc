"""What another rank does with rank 0's items."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
from attrs import define, field

from minfer.effects.execution.rank_loop import run_rank_loop
from minfer.effects.execution.ranks.items import (
    Close,
    Collect,
    Discard,
    Item,
    Launch,
    Want,
)
from minfer.records.messages import Failed
from minfer.records.plan import Plan

WANT: Final = Want((b"key",), "engine")
LAUNCH: Final = Launch(
    Plan(
        step=4,
        run_ids=(1,),
        rows=(2,),
        starts=(5,),
        num_scheduled_tokens=(1,),
        max_sampled_tokens=(9,),
    )
)


@define
class Failing:
    """An executor whose steps fail, and which notes what it is to do."""

    done: list[object] = field(factory=list)

    def launch(self, plan: Plan) -> None:
        self.done.append(plan)

    def collect(self) -> Failed:
        return Failed(3, "no finite logits")

    def discard(self) -> None:
        self.done.append("discard")

    def want(self, keys: tuple[bytes, ...], engine: str) -> None:
        self.done.append((keys, engine))


def followed(items: Sequence[Item]) -> list[object]:
    """What a rank does at these items."""
    executor: Any = Failing()
    items_and_close = iter([*items, Close()])
    leader: Any = SimpleNamespace(
        items=lambda: SimpleNamespace(next=lambda: next(items_and_close)),
        send=lambda _: None,
    )
    run_rank_loop(executor, leader)
    done_items: list[object] = executor.done
    return done_items


@pytest.mark.parametrize("wants", [0, 1, 2])
def test_blocks_may_be_wanted_between_a_failed_step_and_its_end(wants: int) -> None:
    items: list[Item] = [Collect(), *[WANT] * wants, Discard(), LAUNCH]
    assert followed(items) == [(WANT.keys, "engine")] * wants + ["discard", LAUNCH.plan]


@pytest.mark.parametrize("between", [[], [WANT]], ids=["at once", "after a want"])
def test_a_step_that_failed_on_this_rank_alone_ends_it(between: list[Item]) -> None:
    with pytest.raises(RuntimeError, match="step 3 failed on this rank: no finite"):
        followed([Collect(), *between, LAUNCH])
