"""Slots and loads of adapters in a journal's facts, and their differences in words."""

from attrs import evolve

from minfer.journal.decisions import facts
from minfer.journal.divergence import find_divergence
from minfer.records.messages import Execute, LoadAdapter, Submit
from tests.core.lifecycle.adapted import Adapted, asking


def test_a_load_and_a_slot_are_facts_without_the_name_of_the_adapter() -> None:
    bench = Adapted()
    before = bench.state
    turn = bench.give(Submit(asking("a", "abcdef")))
    found = facts(before, turn)
    assert found["loads"] == [0]
    assert "abcdef" not in str(found)
    between = bench.state
    opened = facts(between, bench.turn())
    assert opened["plans"][0]["slots"] == [[0, 0]]


def test_another_slot_is_a_difference_in_words() -> None:
    bench = Adapted()
    before = bench.state
    turn = bench.give(Submit(asking("a", "a1")))
    moved = [
        evolve(one, slot=1) if isinstance(one, LoadAdapter) else one
        for one in turn.commands
    ]
    old, new = facts(before, turn), facts(before, evolve(turn, commands=tuple(moved)))
    found = find_divergence(0, before, 0.0, old, new)
    assert "then loaded adapters into slot 0, now slot 1" in str(found)
    before = bench.state
    turn = bench.turn()
    [execute] = [one for one in turn.commands if isinstance(one, Execute)]
    opens = (evolve(execute.plan.opens[0], adapter_slot=1),)
    other = (Execute(evolve(execute.plan, opens=opens)),)
    old, new = facts(before, turn), facts(before, evolve(turn, commands=other))
    found = find_divergence(1, before, 0.0, old, new)
    assert "adapter slot: then 0 for 'a', now 1 for 'a'" in str(found)
