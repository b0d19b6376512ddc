"""Loads of adapters on a virtual clock."""

from collections.abc import Iterator

from attrs import evolve

from minfer.records.messages import AdapterLoaded, AdapterLoading, Admitted
from minfer.records.state import EngineState, Turn, initial
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation
from tests.core.lifecycle.adapted import ADAPTED, asking

COST = CostModel(name="any", decode=((1, 0.01),), mixed=0.01, token=0.0, adapter=0.5)
ARRIVALS = [
    (0.0, asking("plain", max_tokens=200)),
    (0.0, asking("a", "a1", max_tokens=200)),
    (0.0, asking("b", "b2", max_tokens=200)),
    (0.1, asking("a too", "a1", max_tokens=2)),
]
CONFIG = evolve(ADAPTED, max_model_len=512, num_blocks=400)


def ran(state: EngineState | None = None, time: float = 0.0) -> Iterator[Turn]:
    state = state or initial(CONFIG)
    executor = Simulated(None, state)
    arrivals = ARRIVALS if not time else []
    return Simulation(CONFIG, executor, COST, arrivals, state, time).turns()


def admitted(turns: list[Turn]) -> dict[str, float]:
    return {
        reason.id: turn.transition.state.time
        for turn in turns
        for reason in turn.transition.reasons
        if isinstance(reason, Admitted)
    }


def test_loads_take_their_time_one_after_the_other_beside_the_steps() -> None:
    turns = [*ran()]
    times = admitted(turns)
    assert times["plain"] == 0.0
    assert 0.5 <= times["a"] <= 0.53
    assert times["a too"] == times["a"]
    assert 1.0 <= times["b"] <= 1.03
    loaded = [e for turn in turns for e in turn.events if isinstance(e, AdapterLoaded)]
    assert loaded == [AdapterLoaded("a1", 0), AdapterLoaded("b2", 1)]
    assert not turns[-1].transition.state.requests


def test_a_run_goes_on_from_a_state_with_loads_under_way() -> None:
    turns = [*ran()]
    middle = next(t.transition for t in turns if t.transition.state.time > 0.2)
    state = middle.state
    assert [slot.loading for slot in state.adapters.slots] == [True, True]
    rest = [*ran(state, state.time)]
    assert set(admitted(rest)) == {"a", "b", "a too"}
    again = [r for t in rest for r in t.transition.reasons]
    assert not [r for r in again if isinstance(r, AdapterLoading)]
