"""An engine with slots for adapters, whose loads end when a test says so."""

from typing import Any

from attrs import evolve

from minfer.blocks.keys import root_key
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, LoadAdapter, Submit, Tick
from minfer.records.request import Request
from minfer.records.state import Transition
from minfer.testing.ledger import Ledger
from tests.core.test_engine import CONFIG, Bench, ask

ADAPTED = evolve(CONFIG, adapter_slots=2)


def asking(name: str, adapter: str = "", length: int = 6, **more: Any) -> Request:
    """A request with an adapter, and the root that it has with that."""
    root = root_key(b"tests", b"", adapter)
    return ask(name, length, adapter=adapter, root=root, **more)


class Adapted(Bench):
    """All turns are checked by the laws."""

    def __init__(self, config: EngineConfig = ADAPTED) -> None:
        super().__init__(config)
        self.ledger = Ledger(config, self.state)
        self.loads: list[LoadAdapter] = []  # all so far
        self.events: tuple[Event, ...] = ()  # of the last turn
        self.late = False  # loads stay in flight

    def give(self, *events: Event) -> Transition:
        turn = super().give(*events)
        self.events = (Tick(self.clock), *events)
        self.ledger.take(self.events, turn)
        for command in turn.commands:
            if isinstance(command, LoadAdapter):
                self.loads.append(command)
                self.oracle.load_adapter(command)
        return turn

    def turn(self, *events: Event) -> Transition:
        """One turn in which the earliest step is done, and all loads unless they are
        `late`.
        """
        loads = () if self.late else self.loaded()
        return super().turn(*loads, *events)

    def loaded(self) -> tuple[Event, ...]:
        """The reports of all loads in flight."""
        return tuple([self.oracle.finish_load() for _ in [*self.oracle.loads]])

    def serve(self, *requests: Request) -> None:
        """Serve requests to their end, and compare what they yield."""
        self.turn(*map(Submit, requests))
        self.drain()
        for request in requests:
            assert self.out[request.id, 0] == self.right(request)

    def slots(self) -> list[str]:
        """The adapter in each slot."""
        return [slot.adapter for slot in self.state.adapters.slots]
