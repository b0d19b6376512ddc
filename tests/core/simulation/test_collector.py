"""The garbage collector is paused by simulations, and restored after them."""

import gc

import pytest

from minfer.simulation.collector import paused_collector
from minfer.simulation.simulate import Simulated, Simulation
from tests.core.simulation.test_simulate import EVEN, config_of, requested


def simulation() -> Simulation:
    return Simulation(config_of(), Simulated(), EVEN, [(0.0, requested("a"))])


@pytest.mark.parametrize("method", ["turns", "spans"])
def test_it_is_paused_while_a_simulation_runs(method: str) -> None:
    assert gc.isenabled()
    for _ in getattr(simulation(), method)():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_restored_after_the_last_of_several() -> None:
    """In whatever order they end, one of them by being closed."""
    first, second = simulation().turns(), simulation().spans()
    next(first)
    next(second)
    list(first)
    assert not gc.isenabled()
    second.close()  # type: ignore[attr-defined]  # it is a generator
    assert gc.isenabled()


def test_who_disabled_it_finds_it_disabled() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
