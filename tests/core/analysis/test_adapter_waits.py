"""Waits for adapters, as `explain` names them."""

from attrs import evolve

from minfer.analysis.explain import explain
from minfer.records.messages import Event, Submit
from minfer.records.state import Transition, Turn
from tests.core.lifecycle.adapted import ADAPTED, Adapted, asking


class Recorded(Adapted):
    """All turns are kept."""

    def __init__(self) -> None:
        super().__init__(evolve(ADAPTED, adapter_slots=1))
        self.turns: list[Turn] = []

    def give(self, *events: Event) -> Transition:
        before = self.state
        turn = super().give(*events)
        self.turns.append(Turn(len(self.turns), before, self.events, turn))
        return turn


def waits(bench: Recorded, name: str) -> list[tuple[str, bool]]:
    """The causes for which a request waited in the queue, and whether behind others."""
    [life] = explain(bench.config, bench.turns, name).lives
    return sorted((p.cause, p.behind) for p in life.parts if p.kind == "line")


def test_a_wait_for_a_load_is_its_own_and_so_is_one_for_a_slot() -> None:
    bench = Recorded()
    bench.late = True
    bench.give(
        *[
            Submit(asking(name, adapter, max_tokens=9))
            for name, adapter in (
                ("plain", ""),
                ("loads", "a1"),
                ("too", "a1"),
                ("b", "b2"),
            )
        ]
    )
    for _ in range(3):
        bench.turn()
    bench.late = False
    bench.drain()
    assert waits(bench, "plain") == []
    assert waits(bench, "loads") == [("adapter", False)]
    assert waits(bench, "too") == [("adapter", False)]
    assert waits(bench, "b") == [("adapter", False), ("slot", False)]
