"""The driver's loop: what it asks of an executor, and when."""

from collections.abc import Iterable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve

from minfer.config import EngineConfig
from minfer.effects.execution.dry import Dry
from minfer.effects.live.driver import Driver
from minfer.effects.live.masks import Masked, NoMasks
from minfer.messages import Emit, Executed, Failed, Finish, Pause, Submit
from minfer.plan import Mask, Plan, SampleApart
from minfer.request import Request, SamplingParams
from minfer.runs.oracle import Oracle
from minfer.sequence import SampleId
from minfer.state import EngineState
from tests.effects.masking import MasksBy

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


class Eleven(NoMasks):
    """Allows one token; `late`: once it is told to."""

    def __init__(self, executor: Noting, *, late: bool = False) -> None:
        self.executor = executor
        self.late = late
        self.asked: list[Plan] = []
        self.begun: list[Future[Masked]] = []
        self.forgotten: list[SampleId] = []

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        assert f"launch {plan.step}" in self.executor.asked
        assert set(plan.gens) <= set(state.running.gens)
        self.asked.append(plan)
        self.begun.append(Future())
        if not self.late:
            self.say()
        return self.begun[-1]

    def say(self, *ends: Finish) -> None:
        bits = (1 << 11).to_bytes(5, "little")
        masks = tuple(Mask(i, bits) for i in self.asked[-1].apart)
        self.begun[-1].set_result(Masked(masks, ends))

    def forget(self, samples: Iterable[SampleId]) -> None:
        self.forgotten += samples


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
    executor = Noting()
    masks = Eleven(executor)
    asked = masks.asked
    driver = Driver(config, executor, masks=masks)
    tokens = serve(driver, request("a", lockstep=True), request("bb"))
    assert tokens["a"] == [11] * 6
    assert tokens["bb"] == serve(Driver(config, Noting()), request("bb"))["bb"]
    assert [one.step for one in executor.told] == [plan.step for plan in asked]
    assert all(plan.apart for plan in asked)
    assert len(asked) == 6
    assert set(masks.forgotten) == {("a", 0), ("bb", 0)}


def test_a_late_mask_holds_back_no_step_but_its_own() -> None:
    executor = Noting()
    masks = Eleven(executor, late=True)
    driver = Driver(evolve(CONFIG, depth=2), executor, masks=masks)
    driver.post(Submit(request("a", lockstep=True)))
    driver.post(Submit(request("bb")))
    driver.turn()  # launches step 0, with both, and step 1, without "a"
    masks.say()
    driver.turn()  # collects step 0, and launches step 2
    assert [plan.step for plan in masks.asked] == [0, 2]
    driver.turn()  # collects step 1, although step 2 has no mask yet
    assert executor.asked[-1] == "launch 3"
    masks.say()
    driver.turn()
    assert [one.step for one in executor.told] == [0, 2]


def test_who_makes_masks_can_end_a_sample_before_its_token_counts() -> None:
    executor = Noting()
    masks = Eleven(executor, late=True)
    driver = Driver(CONFIG, executor, masks=masks)
    driver.post(Submit(request("a", lockstep=True)))
    driver.post(Submit(request("bb")))
    driver.turn()
    masks.say(Finish("a", 0, 0, "error", "it cannot go on"))
    emits = [one for one in driver.turn().commands if isinstance(one, Emit)]
    ended = [done for emit in emits for done in emit.finished]
    assert [(one.reason, one.error, one.length) for one in ended] == [
        ("error", "it cannot go on", 0)
    ]
    told = {name: tokens for emit in emits for (name, _), tokens in _pairs(emit)}
    assert set(told) == {"bb"}


def _pairs(emit: Emit) -> Iterable[tuple[SampleId, tuple[int, ...]]]:
    return zip(emit.ids, emit.tokens, strict=True)


def test_masks_of_steps_that_failed_are_not_waited_for() -> None:
    executor = Failing()
    masks = Eleven(executor, late=True)
    driver = Driver(evolve(CONFIG, depth=2), executor, masks=masks)
    driver.post(Submit(request("a", lockstep=True)))
    driver.post(Submit(request("bb")))
    driver.turn()
    masks.say()
    driver.turn()  # step 0 went well, step 2 waits for its mask
    driver.turn()  # step 1 fails, and with it step 2
    assert [one.plan.step for one in driver.apart] == [masks.asked[-1].step]
    assert masks.asked[-1].step > 2


class Failing(Noting):
    """Whose step 1 fails."""

    def collect(self) -> Executed | Failed:
        if self.plans[0].step == 1:
            return self.fail("it was to", halfway=False)
        return super().collect()


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


# --- one token ahead --------------------------------------------------------------------


class Watching(Noting):
    """Notes what it hands back, too."""

    def collect(self) -> Executed | Failed:
        self.asked.append(f"collect {self.plans[0].step}")
        return super().collect()


class Ordered(Eleven):
    """Notes when masks are begun, among what the executor is asked."""

    def begin(self, plan: Plan, state: EngineState) -> "Future[Masked]":
        begun = super().begin(plan, state)
        self.executor.asked.append(f"begin {plan.step}")
        return begun


def ahead(depth: int, *, late_masks: bool = True) -> EngineConfig:
    return evolve(CONFIG, depth=depth, late_masks=late_masks)


def followed(asked: list[Plan], gen: int) -> list[tuple[int, int]]:
    """Steps that yield a row's tokens, each with the one before."""
    steps = [plan.step for plan in asked if gen in plan.gens]
    return list(pairwise(steps))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_is_one_token_ahead_of_its_masks(depth: int) -> None:
    executor = Watching()
    masks = Ordered(executor)
    wanted = request("a", lockstep=True), request("bb")
    tokens = serve(Driver(ahead(depth), executor, masks=masks), *wanted)
    assert tokens["a"] == [11] * 6
    assert len(masks.asked) == 6
    at = executor.asked.index
    gen = masks.asked[0].gens[masks.asked[0].apart[0]]
    for last, step in followed(masks.asked, gen):
        # It feeds itself with what the last step drew, and its mask knows that token.
        assert at(f"begin {last}") < at(f"sample {last}") < at(f"launch {step}")
        assert at(f"launch {step}") < at(f"begin {step}")
        assert at(f"collect {last}") < at(f"begin {step}")
        assert (at(f"launch {step}") < at(f"collect {last}")) == (depth > 1)


def test_masks_are_made_while_the_forward_runs_that_they_are_for() -> None:
    executor = Watching()
    driver = Driver(ahead(2), executor, masks=Ordered(executor))
    serve(driver, evolve(request("a", lockstep=True), max_tokens=4))
    assert executor.asked == [
        *("launch 0", "begin 0", "sample 0", "launch 1"),
        *("collect 0", "begin 1", "sample 1", "launch 2"),
        *("collect 1", "begin 2", "sample 2", "launch 3"),
        *("collect 2", "begin 3", "sample 3", "collect 3"),
    ]


def test_without_late_masks_nobody_is_ahead() -> None:
    executor = Watching()
    driver = Driver(ahead(2, late_masks=False), executor, masks=Ordered(executor))
    serve(driver, evolve(request("a", lockstep=True), max_tokens=2))
    once = ("launch {0}", "begin {0}", "sample {0}", "collect {0}")
    assert executor.asked == [one.format(step) for step in range(2) for one in once]


def test_a_step_waits_for_the_masks_of_rows_that_it_feeds_and_of_no_others() -> None:
    executor = Watching()
    masks = Ordered(executor, late=True)
    driver = Driver(ahead(2), executor, masks=masks)
    driver.post(Submit(request("bb")))
    driver.turn()  # launches 0 and 1
    driver.post(Submit(request("a", lockstep=True)))
    driver.turn()  # collects 0, and launches 2, with both
    (plan,) = masks.asked
    assert (plan.step, len(plan.gens)) == (2, 2)
    driver.post(Pause("a", 0))
    driver.turn()  # collects 1, and launches 3, without "a": nothing waits for its mask
    assert executor.asked[-1] == "launch 3"
    assert not executor.told
    driver.post(Pause("a", 0, paused=False))
    masks.say()
    driver.turn()  # collects 2, for which the mask has to be there
    assert [one.step for one in executor.told] == [2]
    assert executor.asked[-2:] == ["launch 4", "begin 4"]  # with both
    masks.say()
    driver.turn()  # collects 3; 5 feeds what 4 drew
    assert executor.asked[-3:] == ["collect 3", "sample 4", "launch 5"]
    assert [one.plan.step for one in driver.apart] == [5]
    assert driver.apart[0].masked is None  # as the token of 4 is not known


def test_a_step_that_feeds_a_row_beside_one_that_is_ahead_is_held() -> None:
    executor = Watching()
    masks = Ordered(executor)
    driver = Driver(ahead(3), executor, masks=masks)
    driver.post(Submit(request("a", lockstep=True)))
    driver.turn()  # launches 0 and 1; the second is ahead
    driver.post(Submit(request("bb", lockstep=True)))
    driver.turn()  # collects 0, and plans 2 with both, and 3 with "bb" alone
    both, alone = driver.state.inflight[1:]
    assert (len(both.gens), both.step) == (2, 2)
    assert alone.gens == both.gens[1:]
    assert executor.asked[-1] == "launch 2"  # whose masks await the token of 1
    assert list(driver.held) == [alone]
    driver.turn()
    at = executor.asked.index
    assert at("collect 1") < at("begin 2") < at("sample 2") < at("launch 3")
    assert not driver.held


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_tokens_are_the_same_if_a_step_fails_on_the_way(depth: int, failing: int) -> None:
    wanted = [request("a", lockstep=True), request("bb"), request("ccc", lockstep=True)]
    expected = serve(by_position(Noting(), ahead(depth)), *wanted)
    executor = FailsAt(failing)
    driver = by_position(executor, ahead(depth))
    assert serve(driver, *wanted) == expected
    assert executor.failed
    assert not driver.apart


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
        places = [(i, plan.starts[i] + plan.counts[i]) for i in plan.apart]
        return tuple(
            Mask(i, (1 << at % VOCAB | 1 << 3 * at % VOCAB).to_bytes(5, "little"))
            for i, at in places
        )

    return Driver(config, executor, masks=MasksBy(masks, late=late))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("more", [{}, {"num_blocks": 7}, {"max_num_batched_tokens": 4}])
def test_being_ahead_changes_no_token(
    depth: int, late: bool, more: dict[str, int]
) -> None:
    warm = SamplingParams(temperature=1.0)
    wanted = [
        evolve(request("x" * i, lockstep=i % 3 > 0, seed=i), sampling=warm, max_tokens=9)
        for i in range(1, 7)
    ]
    wanted[0] = evolve(wanted[0], stop_ids=frozenset(range(0, VOCAB, 7)))  # it may end
    expected = serve(by_position(Noting(), CONFIG), *wanted)
    driver = by_position(Noting(), evolve(ahead(depth), **more), late=late)
    assert serve(driver, *wanted) == expected
    assert {len(expected[one.id]) for one in wanted[1:]} == {9}
    assert not driver.apart
