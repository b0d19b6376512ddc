"""Runs in which a request's blocks are loaded from a tier."""

from typing import Any

from attrs import evolve

from minfer.records.config import EngineConfig
from minfer.records.request import KvTransfer
from minfer.records.state import Turn
from minfer.records.tiers import LOAD, ExternalStore, HostTier
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation
from tests.core.simulation.test_simulate import config_of, requested

STEP = CostModel(name="a second", decode=((1, 1.0),), mixed=1.0, token=0.0)


def tiered(
    *, external: bool, stored: int = 0, **costs: Any
) -> tuple[EngineConfig, list[Turn]]:
    """`first` has 4 full blocks, which others push out of the pool; `again` has the same
    prompt, and says that so many are `stored`.
    """
    costs = {"choice": LOAD, **costs}
    config = config_of(num_blocks=8)
    if external:
        config = evolve(config, external_store=ExternalStore(max_known_keys=99, **costs))
    else:
        config = evolve(config, host=HostTier(pages=64, **costs))
    first = requested("first", 17)
    fillers = [(50.0 + i, requested(f"other{i}", 25)) for i in range(2)]
    transfer = KvTransfer(num_stored_blocks=stored)
    second = evolve(first, id="again", kv_transfer=transfer)
    arrivals = [(0.0, first), *fillers, (200.0, second)]
    return config, [*Simulation(config, Simulated(), STEP, arrivals).turns()]
