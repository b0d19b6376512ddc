"""Rows under a mask run one token ahead: what is launched, drawn and begun, in which
order.
"""

from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.masks import StepMasks
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Failed, Pause, Submit
from minfer.records.plan import Mask, Plan
from minfer.records.request import SamplingParams
from minfer.records.state import EngineState
from tests.effects.live.test_deferred_rows import (
    CONFIG,
    VOCAB,
    Eleven,
    Noting,
    request,
    serve,
)
from tests.effects.masking import MasksBy


class Watching(Noting):
    """Notes what it hands back, too."""

    def collect(self) -> Executed | Failed:
        self.requested.append(f"collect {self.plans[0].step}")
        return super().collect()


class Ordered(Eleven):
    """Notes when masks are begun, among what the executor is asked."""

    def begin(self, plan: Plan, state: EngineState) -> "Future[StepMasks]":
        future = super().begin(plan, state)
        self.executor.requested.append(f"begin {plan.step}")
        return future


def ahead(depth: int, *, late_masks: bool = True) -> EngineConfig:
    return evolve(CONFIG, depth=depth, late_masks=late_masks)


def followed(requested: list[Plan], gen: int) -> list[tuple[int, int]]:
    """Steps that yield a row's tokens, each with the one before."""
    steps = [plan.step for plan in requested if gen in plan.run_ids]
    return list(pairwise(steps))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_is_one_token_ahead_of_its_masks(depth: int) -> None:
    executor = Watching()
    masks = Ordered(executor)
    requests = request("a", needs_host_mask=True), request("bb")
    tokens = serve(Driver(ahead(depth), executor, masks=masks), *requests)
    assert tokens["a"] == [11] * 6
    assert len(masks.requested) == 6
    position = executor.requested.index
    gen = masks.requested[0].run_ids[masks.requested[0].deferred[0]]
    for last, step in followed(masks.requested, gen):
        # It feeds itself with what the last step drew, and its mask knows that token.
        assert (
            position(f"begin {last}")
            < position(f"sample {last}")
            < position(f"launch {step}")
        )
        assert position(f"launch {step}") < position(f"begin {step}")
        assert position(f"collect {last}") < position(f"begin {step}")
        assert (position(f"launch {step}") < position(f"collect {last}")) == (depth > 1)


def test_masks_are_made_while_the_forward_runs_that_they_are_for() -> None:
    executor = Watching()
    driver = Driver(ahead(2), executor, masks=Ordered(executor))
    serve(driver, evolve(request("a", needs_host_mask=True), max_tokens=4))
    assert executor.requested == [
        *("launch 0", "begin 0", "sample 0", "launch 1"),
        *("collect 0", "begin 1", "sample 1", "launch 2"),
        *("collect 1", "begin 2", "sample 2", "launch 3"),
        *("collect 2", "begin 3", "sample 3", "collect 3"),
    ]


def test_without_late_masks_no_row_is_ahead() -> None:
    executor = Watching()
    driver = Driver(ahead(2, late_masks=False), executor, masks=Ordered(executor))
    serve(driver, evolve(request("a", needs_host_mask=True), max_tokens=2))
    once = ("launch {0}", "begin {0}", "sample {0}", "collect {0}")
    assert executor.requested == [call.format(step) for step in range(2) for call in once]


def test_a_step_waits_for_the_masks_of_rows_that_it_feeds_and_of_no_others() -> None:
    executor = Watching()
    masks = Ordered(executor, late=True)
    driver = Driver(ahead(2), executor, masks=masks)
    driver.post(Submit(request("bb")))
    driver.turn()  # launches 0 and 1
    driver.post(Submit(request("a", needs_host_mask=True)))
    driver.turn()  # collects 0, and launches 2, with both
    (plan,) = masks.requested
    assert (plan.step, len(plan.run_ids)) == (2, 2)
    driver.post(Pause("a", 0))
    driver.turn()  # collects 1, and launches 3, without "a": nothing waits for its mask
    assert executor.requested[-1] == "launch 3"
    assert not executor.reported
    driver.post(Pause("a", 0, paused=False))
    masks.say()
    driver.turn()  # collects 2, for which the mask has to be there
    assert [report.step for report in executor.reported] == [2]
    assert executor.requested[-2:] == ["launch 4", "begin 4"]  # with both
    masks.say()
    driver.turn()  # collects 3; 5 feeds what 4 drew
    assert executor.requested[-3:] == ["collect 3", "sample 4", "launch 5"]
    assert [deferred_step.plan.step for deferred_step in driver.deferred.steps] == [5]
    assert driver.deferred.steps[0].masks is None  # as the token of 4 is not known


def test_a_step_that_feeds_a_row_beside_one_that_is_ahead_is_held() -> None:
    executor = Watching()
    masks = Ordered(executor)
    driver = Driver(ahead(3), executor, masks=masks)
    driver.post(Submit(request("a", needs_host_mask=True)))
    driver.turn()  # launches 0 and 1; the second is ahead
    driver.post(Submit(request("bb", needs_host_mask=True)))
    driver.turn()  # collects 0, and plans 2 with both, and 3 with "bb" alone
    shared, solo = driver.state.inflight[1:]
    assert (len(shared.run_ids), shared.step) == (2, 2)
    assert solo.run_ids == shared.run_ids[1:]
    assert executor.requested[-1] == "launch 2"  # whose masks await the token of 1
    assert list(driver.deferred.unlaunched) == [solo]
    driver.turn()
    position = executor.requested.index
    assert (
        position("collect 1")
        < position("begin 2")
        < position("sample 2")
        < position("launch 3")
    )
    assert not driver.deferred.unlaunched


def test_a_step_that_is_held_when_one_before_it_fails_is_never_launched() -> None:
    executor = FailsAt(1)
    driver = Driver(ahead(3), executor, masks=Eleven(executor))
    driver.post(Submit(request("a", needs_host_mask=True)))
    driver.turn()
    driver.post(Submit(request("bb", needs_host_mask=True)))
    driver.turn()
    (waiting,) = driver.deferred.unlaunched
    tokens = serve(driver)
    assert executor.failed
    assert f"launch {waiting.step}" not in executor.requested
    assert len(driver.state.requests) == 0
    assert tokens["bb"] == [11] * 6


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_tokens_are_the_same_if_a_step_fails_on_the_way(depth: int, failing: int) -> None:
    requests = [
        request("a", needs_host_mask=True),
        request("bb"),
        request("ccc", needs_host_mask=True),
    ]
    expected = serve(by_position(Noting(), ahead(depth)), *requests)
    executor = FailsAt(failing)
    driver = by_position(executor, ahead(depth))
    assert serve(driver, *requests) == expected
    assert executor.failed
    assert not driver.deferred.steps


class FailsAt(Noting):
    """Fails one step, and all that follow it."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.failed = False

    def collect(self) -> Executed | Failed:
        if self.plans[0].step == self.step:
            self.failed = True
            return self.fail("it was to", halfway=True)
        return super().collect()


def by_position(executor: Noting, config: EngineConfig, *, late: bool = False) -> Driver:
    """A driver whose rows may draw one of two tokens, which depend on the position."""

    def masks(plan: Plan) -> tuple[Mask, ...]:
        places = [
            (i, plan.starts[i] + plan.num_scheduled_tokens[i]) for i in plan.deferred
        ]
        return tuple(
            Mask(
                i,
                (1 << position % VOCAB | 1 << 3 * position % VOCAB).to_bytes(5, "little"),
            )
            for i, position in places
        )

    return Driver(config, executor, masks=MasksBy(masks, late=late))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 7}, {"max_num_batched_tokens": 4}]
)
def test_being_ahead_changes_no_token(
    depth: int, late: bool, settings: dict[str, Any]
) -> None:
    warm = SamplingParams(temperature=1.0)
    requests = [
        evolve(
            request("x" * i, needs_host_mask=i % 3 > 0, seed=i),
            sampling=warm,
            max_tokens=9,
        )
        for i in range(1, 7)
    ]
    requests[0] = evolve(
        requests[0], stop_ids=frozenset(range(0, VOCAB, 7))
    )  # it may end
    expected = serve(by_position(Noting(), CONFIG), *requests)
    driver = by_position(Noting(), evolve(ahead(depth), **settings), late=late)
    assert serve(driver, *requests) == expected
    assert {len(expected[request.id]) for request in requests[1:]} == {9}
    assert not driver.deferred.steps
