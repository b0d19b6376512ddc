"""An engine on a clock of the test's own, turn by turn, and what is asked of it."""

from collections.abc import Iterable
from typing import Any

from attrs import define, field

from minfer.analysis.explain import explain
from minfer.analysis.lives import Life
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Execute, Tick
from minfer.records.request import Request
from minfer.records.state import EngineState, Turn, initial
from minfer.simulation.oracle import Oracle


@define
class Run:
    """An engine on a clock of the test's own, with the oracle."""

    config: EngineConfig
    state: EngineState = field(init=False)
    oracle: Oracle = field(init=False)
    turns: list[Turn] = field(factory=list)
    time: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.state = initial(self.config)
        self.oracle = self.new_oracle()

    def new_oracle(self) -> Oracle:
        return Oracle(self.config.block_size, 50, self.config.groups)

    def turn(self, *events: Event, took: float = 1.0, fail: str = "") -> None:
        """One turn; the step in flight, if there is one, took so many
        seconds, or failed.
        """
        self.time += took
        done: tuple[Event, ...] = ()
        if self.oracle.plans:
            failed = fail and self.oracle.fail(fail, halfway=False)
            done = (failed or self.oracle.collect(),)
        come = (Tick(self.time), *done, *events)
        transition = step(self.config, self.state, come)
        self.turns.append(Turn(len(self.turns), self.state, come, transition))
        self.state = transition.state
        for command in transition.commands:
            if isinstance(command, Execute):
                self.oracle.launch(command.plan)

    def late(self, *events: Event) -> None:
        """A turn in which nothing comes back."""
        oracle, self.oracle = self.oracle, self.new_oracle()
        self.turn(*events)
        oracle.plans.extend(self.oracle.plans)
        self.oracle = oracle

    def drain(self) -> None:
        while self.state.requests:
            self.turn()

    def life(self, name: str, sample: int = 0) -> Life:
        return explain(self.config, self.turns, name).lives[sample]


def request(
    name: str, prompt: int | Iterable[int], tokens: int = 4, **more: Any
) -> Request:
    ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(id=name, prompt=ids, max_tokens=tokens, **more)


def config(**changes: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "depth": 1,
    }
    return EngineConfig(**given | {"max_num_batched_tokens": 32} | changes)
