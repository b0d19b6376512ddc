"""Hypothesis drives the world with macro rules, so that a failure shrinks to a short
story.
"""

from contextlib import ExitStack
from random import Random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.core.tuned import tiny, tuned
from tests.core.world import World, speculating, tiny_config


class EngineMachine(RuleBasedStateMachine):
    """Every turn is audited by the world; at the end everything must drain."""

    world: World
    thresholds: ExitStack

    @initialize(
        rng=st.randoms(use_true_random=False),
        pooled=st.booleans(),
        drafting=st.booleans(),
    )
    def begin(self, rng: Random, pooled: bool, drafting: bool) -> None:
        self.thresholds = ExitStack()
        self.thresholds.enter_context(tuned(**tiny(rng)))
        config = tiny_config(rng)
        config = speculating(config, rng) if drafting else config
        self.world = World(config, rng)
        self.world.proposing = 0.0  # there is a rule for it
        self.world.pooled = 0.3 if pooled else 0.0

    @rule(count=st.integers(1, 6))
    def burst(self, count: int) -> None:
        self.world.burst(count)

    @precondition(lambda self: self.world.state.requests or self.world.inbox)
    @rule(turns=st.integers(1, 12))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @rule(turns=st.integers(1, 3))
    def late(self, turns: int) -> None:
        for _ in range(turns):
            self.world.late()

    @rule()
    def cancel(self) -> None:
        self.world.cancel_some()

    @rule()
    def finish(self) -> None:
        self.world.finish_some()

    @rule(turns=st.integers(1, 4))
    def propose(self, turns: int) -> None:
        self.world.proposing = 0.7
        for _ in range(turns):
            self.world.turn()
        self.world.proposing = 0.0

    @precondition(lambda self: self.world.oracle.plans)
    @rule()
    def fail(self) -> None:
        self.world.fail()

    @precondition(lambda self: self.world.oracle.plans)
    @rule()
    def garble(self) -> None:
        self.world.garble()

    @rule()
    def submit_again(self) -> None:
        self.world.submit_again()

    @rule()
    def storm(self) -> None:
        self.world.storm()

    @rule()
    def noise(self) -> None:
        self.world.noise()

    def teardown(self) -> None:
        if hasattr(self, "thresholds"):
            with self.thresholds:
                self.world.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
