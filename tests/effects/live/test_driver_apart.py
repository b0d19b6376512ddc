"""The driver's loop: what it asks of an executor, and when."""

from typing import Any

import pytest
from attrs import evolve

from minfer.config import EngineConfig
from minfer.effects.execution.dry import Dry
from minfer.effects.live.driver import Driver
from minfer.messages import Emit, Submit
from minfer.plan import Mask, Plan, SampleApart
from minfer.request import Request
from minfer.runs.oracle import Oracle

VOCAB = 40
CONFIG = EngineConfig(
    num_blocks=40,
    block_size=4,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    vocab_size=VOCAB,
)


class Noting(Oracle):
    """An oracle that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(CONFIG.block_size, VOCAB)
        self.asked: list[str] = []
        self.told: list[SampleApart] = []

    def launch(self, plan: Plan) -> None:
        self.asked.append(f"launch {plan.step}")
        super().launch(plan)

    def sample(self, apart: SampleApart) -> None:
        self.asked.append(f"sample {apart.step}")
        self.told.append(apart)
        super().sample(apart)


def request(name: str, **more: Any) -> Request:
    return Request(id=name, prompt=(3, len(name)), max_tokens=6, **more)


def serve(driver: Driver, *requests: Request) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        driver.post(Submit(one))
    while driver.busy:
        for command in driver.turn().commands:
            if isinstance(command, Emit):
                for (name, _), tokens in zip(command.ids, command.tokens, strict=True):
                    out[name] += tokens
    return out


def test_nobody_is_asked_for_masks_where_no_row_is_apart() -> None:
    executor = Noting()
    serve(Driver(CONFIG, executor), request("a"), request("bb"))
    assert not executor.told


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_are_asked_for_once_a_step_is_launched(depth: int) -> None:
    config = evolve(CONFIG, depth=depth)
    asked = list[Plan]()
    executor = Noting()

    def masks(plan: Plan) -> tuple[Mask, ...]:
        assert f"launch {plan.step}" in executor.asked
        asked.append(plan)
        return tuple(Mask(i, (1 << 11).to_bytes(5, "little")) for i in plan.apart)

    driver = Driver(config, executor, masks=masks)
    tokens = serve(driver, request("a", lockstep=True), request("bb"))
    assert tokens["a"] == [11] * 6
    assert tokens["bb"] == serve(Driver(config, Noting()), request("bb"))["bb"]
    assert [one.step for one in executor.told] == [plan.step for plan in asked]
    assert all(plan.apart for plan in asked)
    assert len(asked) == 6


def test_without_masks_rows_apart_draw_what_they_would() -> None:
    bound = request("a", lockstep=True)
    alone = serve(Driver(CONFIG, Noting()), request("a"))
    executor = Noting()
    assert serve(Driver(CONFIG, executor), bound) == alone
    assert {one.masks for one in executor.told} == {()}


def test_the_dry_executor_samples_apart_too() -> None:
    texts = [
        serve(Driver(CONFIG, Dry([[5, 6], [7]])), request("a", lockstep=lockstep))
        for lockstep in (False, True)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]["a"]) == 6
