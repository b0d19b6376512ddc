"""The loop over any executor: what a turn takes, in which order things are done."""

import contextlib
import gc
import sys

import pytest

from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.interpreter import (
    SWITCH_SECONDS,
    paused_collector,
    short_switch_interval,
)
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Executed, Failed, Submit, Tick
from minfer.records.plan import Plan
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Request
from minfer.records.state import EngineState, Turn
from minfer.simulation.oracle import Oracle

CONFIG = EngineConfig(num_blocks=20, block_size=4, max_num_seqs=4, vocab_size=100)


class Noted(Oracle):
    """An oracle that notes what is asked of it."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(4, 100)
        self.order = order

    def launch(self, plan: Plan) -> None:
        self.order.append(f"launch {plan.step}")
        super().launch(plan)

    def collect(self) -> Executed | Failed:
        self.order.append("collect")
        return super().collect()

    def close(self) -> None:
        self.order.append("close")


class Record:
    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.turns: list[Turn] = []

    def __call__(self, turn: Turn) -> None:
        self.order.append(f"record {turn.number}")
        self.turns.append(turn)

    def close(self, state: EngineState) -> None:
        self.order.append(f"end at step {state.next_step}")


def ask(name: str = "a") -> Submit:
    return Submit(Request(id=name, prompt=(1, 2, 3), max_tokens=3))


def test_a_turn_is_recorded_before_anything_is_done() -> None:
    order: list[str] = []
    record = Record(order)
    driver = Driver(CONFIG, Noted(order), clock=lambda: 5.0, record=record)
    driver.post(ask())
    driver.turn()
    driver.turn()
    driver.close()
    assert order[:3] == ["record 0", "launch 0", "launch 1"]  # two steps in flight
    assert order[3:6] == ["collect", "record 1", "launch 2"]
    assert order[-2:] == ["close", "end at step 3"]
    assert record.turns[0].events == (Tick(5.0), ask())
    assert record.turns[1].before == record.turns[0].transition.state
    assert driver.turns == 2


def test_results_come_before_what_was_posted_in_its_order() -> None:
    driver = Driver(CONFIG, Oracle(4, 100))
    driver.post(ask())
    driver.turn()
    driver.post(Cancel("b"))
    driver.post(ask("c"))
    driver.turn()
    assert [type(event) for event in driver.last_events] == [
        Tick,
        Executed,
        Cancel,
        Submit,
    ]
    assert not driver.inbox


def test_it_is_busy_until_all_is_served() -> None:
    driver = Driver(CONFIG, Oracle(4, 100))
    busy = [driver.busy]
    driver.post(ask())
    while driver.busy:
        busy.append(driver.busy)
        driver.turn()
    assert busy == [False, *[True] * driver.turns]
    assert driver.turns > 3
    assert not driver.state.requests


def test_it_knows_when_to_come_back() -> None:
    class Later(FirstCome):
        def admit_from(self, state: None, load: Load) -> float:
            del state
            return load.arrived + 2.0

    now = [10.0]
    config = EngineConfig(num_blocks=20, block_size=4, vocab_size=100, policy=Later())
    driver = Driver(config, Oracle(4, 100), clock=lambda: now[0])
    driver.post(ask())
    driver.turn()
    wakes = [driver.wake]
    now[0] = 12.0
    driver.turn()
    assert [*wakes, driver.wake] == [12.0, None]
    assert driver.state.inflight


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was_afterwards(on: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with contextlib.suppress(KeyError), paused_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_threads_take_turns_sooner_while_the_loop_runs() -> None:
    interval = sys.getswitchinterval()
    with short_switch_interval():
        with short_switch_interval():  # another engine's
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == interval
