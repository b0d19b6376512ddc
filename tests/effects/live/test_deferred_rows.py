"""The driver's loop: what it asks of an executor, and when."""

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.execution.dry_executor import DryExecutor
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.masks import NoMasks, StepMasks
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Executed, Failed, Finish, Submit
from minfer.records.plan import Mask, Plan, SampleDeferred
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.simulation.oracle import Oracle

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
        self.requested: list[str] = []
        self.reported: list[SampleDeferred] = []

    def launch(self, plan: Plan) -> None:
        self.requested.append(f"launch {plan.step}")
        super().launch(plan)

    def sample(self, separate: SampleDeferred) -> None:
        self.requested.append(f"sample {separate.step}")
        self.reported.append(separate)
        super().sample(separate)


class Eleven(NoMasks):
    """Allows one token; `late`: once it is told to."""

    def __init__(self, executor: Noting, *, late: bool = False) -> None:
        self.executor = executor
        self.late = late
        self.requested: list[Plan] = []
        self.begun: list[Future[StepMasks]] = []
        self.forgotten: list[SampleId] = []

    def begin(self, plan: Plan, state: EngineState) -> "Future[StepMasks]":
        assert f"launch {plan.step}" in self.executor.requested
        assert set(plan.run_ids) <= set(state.running.run_ids)
        self.requested.append(plan)
        self.begun.append(Future())
        if not self.late:
            self.say()
        return self.begun[-1]

    def say(self, *ends: Finish) -> None:
        bits = (1 << 11).to_bytes(5, "little")
        masks = tuple(Mask(i, bits) for i in self.requested[-1].deferred)
        self.begun[-1].set_result(StepMasks(masks, ends))

    def drop(self, samples: Iterable[SampleId]) -> None:
        self.forgotten += samples


def request(name: str, **settings: Any) -> Request:
    return Request(id=name, prompt=(3, len(name)), max_tokens=6, **settings)


def serve(driver: Driver, *requests: Request) -> dict[str, list[int]]:
    out = defaultdict[str, list[int]](list)
    for request in requests:
        driver.post(Submit(request))
    while driver.busy:
        for command in driver.turn().commands:
            if isinstance(command, Emit):
                for (name, _), tokens in zip(command.ids, command.tokens, strict=True):
                    out[name] += tokens
    return out


def test_no_masks_are_requested_where_no_row_is_deferred() -> None:
    executor = Noting()
    serve(Driver(CONFIG, executor), request("a"), request("bb"))
    assert not executor.reported


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_are_requested_once_a_step_is_launched(depth: int) -> None:
    config = evolve(CONFIG, depth=depth)
    executor = Noting()
    masks = Eleven(executor)
    requested = masks.requested
    driver = Driver(config, executor, masks=masks)
    tokens = serve(driver, request("a", needs_host_mask=True), request("bb"))
    assert tokens["a"] == [11] * 6
    assert tokens["bb"] == serve(Driver(config, Noting()), request("bb"))["bb"]
    assert [report.step for report in executor.reported] == [
        plan.step for plan in requested
    ]
    assert all(plan.deferred for plan in requested)
    assert len(requested) == 6
    assert set(masks.forgotten) == {("a", 0), ("bb", 0)}


def test_a_late_mask_holds_back_no_step_but_its_own() -> None:
    executor = Noting()
    masks = Eleven(executor, late=True)
    driver = Driver(evolve(CONFIG, depth=2), executor, masks=masks)
    driver.post(Submit(request("a", needs_host_mask=True)))
    driver.post(Submit(request("bb")))
    driver.turn()  # launches step 0, with both, and step 1, without "a"
    masks.say()
    driver.turn()  # collects step 0, and launches step 2
    assert [plan.step for plan in masks.requested] == [0, 2]
    driver.turn()  # collects step 1, although step 2 has no mask yet
    assert executor.requested[-1] == "launch 3"
    masks.say()
    driver.turn()
    assert [report.step for report in executor.reported] == [0, 2]


def test_who_makes_masks_can_end_a_sample_before_its_token_counts() -> None:
    executor = Noting()
    masks = Eleven(executor, late=True)
    driver = Driver(CONFIG, executor, masks=masks)
    driver.post(Submit(request("a", needs_host_mask=True)))
    driver.post(Submit(request("bb")))
    driver.turn()
    masks.say(Finish("a", 0, 0, "error", "it cannot go on"))
    emits = [command for command in driver.turn().commands if isinstance(command, Emit)]
    ended = [end for emit in emits for end in emit.finished]
    assert [(end.reason, end.error, end.length) for end in ended] == [
        ("error", "it cannot go on", 0)
    ]
    reported = {name: tokens for emit in emits for (name, _), tokens in _pairs(emit)}
    assert set(reported) == {"bb"}


def _pairs(emit: Emit) -> Iterable[tuple[SampleId, tuple[int, ...]]]:
    return zip(emit.ids, emit.tokens, strict=True)


def test_masks_of_steps_that_failed_are_not_waited_for() -> None:
    executor = Failing()
    masks = Eleven(executor, late=True)
    driver = Driver(evolve(CONFIG, depth=2), executor, masks=masks)
    driver.post(Submit(request("a", needs_host_mask=True)))
    driver.post(Submit(request("bb")))
    driver.turn()
    masks.say()
    driver.turn()  # step 0 went well, step 2 waits for its mask
    driver.turn()  # step 1 fails, and with it step 2
    assert [deferred_step.plan.step for deferred_step in driver.deferred.steps] == [
        masks.requested[-1].step
    ]
    assert masks.requested[-1].step > 2


class Failing(Noting):
    """Whose step 1 fails."""

    def collect(self) -> Executed | Failed:
        if self.plans[0].step == 1:
            return self.fail("it was to", halfway=False)
        return super().collect()


def test_without_masks_deferred_rows_draw_what_they_would() -> None:
    bound = request("a", needs_host_mask=True)
    solo = serve(Driver(CONFIG, Noting()), request("a"))
    executor = Noting()
    assert serve(Driver(CONFIG, executor), bound) == solo
    assert {report.masks for report in executor.reported} == {()}


def test_the_dry_executor_has_deferred_sampling_too() -> None:
    texts = [
        serve(
            Driver(CONFIG, DryExecutor([[5, 6], [7]])),
            request("a", needs_host_mask=lockstep),
        )
        for lockstep in (False, True)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]["a"]) == 6
