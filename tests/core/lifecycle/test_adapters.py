"""Adapters and their slots, one behaviour at a time."""

from typing import Any

import pytest
from attrs import evolve

from minfer.records.adapters import NO_SLOT, AdapterSlot
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    AdapterLoading,
    AdapterLost,
    Admitted,
    Cancel,
    DropAdapter,
    Failed,
    Ignored,
    LoadAdapter,
    Missed,
    QueueBlocked,
    SlotBlocked,
    Submit,
)
from minfer.records.policy import ADAPTER_PASSES, FirstCome, Load
from minfer.records.request import Request
from minfer.values.checks import ConfigError, ParameterError
from tests.core.lifecycle.adapted import ADAPTED, Adapted, asking

ONE = evolve(ADAPTED, adapter_slots=1)
WAITING = (("b", "b2"), ("c", "c3"))


def test_a_request_waits_for_its_adapter_and_others_pass_it() -> None:
    bench = Adapted()
    bench.late = True
    turn = bench.give(Submit(asking("a", "a1")), Submit(asking("plain")))
    assert bench.loads == [LoadAdapter("a1", 0)]
    assert AdapterLoading("a", 0, "a1", 0, "") in turn.reasons
    assert [*bench.state.running.ids] == [("plain", 0)]
    assert bench.plans[0].opens[0].adapter_slot == NO_SLOT
    bench.turn(*bench.loaded())
    assert [*bench.state.running.ids] == [("a", 0), ("plain", 0)]
    assert bench.plans[1].opens[0].adapter_slot == 0
    bench.drain()
    assert bench.ended["a", 0].reason == "length"
    assert bench.loads == [LoadAdapter("a1", 0)]


def test_alone_it_waits_with_a_reason() -> None:
    bench = Adapted()
    turn = bench.give(Submit(asking("a", "a1")))
    assert QueueBlocked("a", 0, "adapter") in turn.reasons
    assert not bench.plans
    bench.drain()
    assert bench.out["a", 0] == bench.right(asking("a", "a1"))


def test_the_least_recently_used_unused_slot_is_taken() -> None:
    bench = Adapted()
    for name, adapter in (("a", "a1"), ("b", "b2"), ("c", "a1"), ("d", "d4")):
        bench.serve(asking(name, adapter))
    assert bench.slots() == ["a1", "d4"]
    [*_, last] = bench.reasons_of(AdapterLoading)
    assert last == AdapterLoading("d", 0, "d4", 1, "b2")


def test_equal_prompts_of_different_adapters_share_no_block() -> None:
    bench = Adapted()
    prompt = tuple(range(13))
    for name, adapter in (("a", "a1"), ("b", "b2"), ("plain", ""), ("a again", "a1")):
        bench.serve(asking(name, adapter, prompt=prompt))
    missed = [reason.id for reason in bench.reasons_of(Missed)]
    assert missed == ["a", "b", "plain"]
    assert [r.hit for r in bench.reasons_of(Admitted)] == [0, 0, 0, 12]


def test_a_slot_that_a_step_in_flight_reads_is_not_written() -> None:
    bench = Adapted(evolve(ONE, depth=2))
    bench.turn(Submit(asking("a", "a1", max_tokens=40)))
    for _ in range(3):
        bench.turn()
    bench.give(Cancel("a"), Submit(asking("b", "b2")))
    assert len(bench.state.inflight) == 2
    assert bench.loads == [LoadAdapter("a1", 0)]
    bench.turn()
    assert bench.reasons_of(SlotBlocked) == [SlotBlocked("b", 0, "b2", 0, 1)]
    assert len(bench.loads) == 1
    bench.turn()
    assert bench.loads[1:] == [LoadAdapter("b2", 0)]
    bench.drain()


def test_after_a_failed_step_nothing_reads_the_slot() -> None:
    bench = Adapted(evolve(ONE, depth=2))
    bench.turn(Submit(asking("a", "a1", max_tokens=40)))
    bench.turn()
    bench.give(Cancel("a"), Submit(asking("b", "b2")))
    failed = bench.oracle.fail("boom", halfway=True)
    assert isinstance(failed, Failed)
    bench.give(failed)
    assert bench.loads[1:] == [LoadAdapter("b2", 0)]
    bench.drain()


def test_a_failed_load_ends_those_that_wait_for_it_and_may_be_tried_again() -> None:
    bench = Adapted()
    bench.late = True
    several = asking("a", "a1", n=2)
    bench.give(Submit(several), Submit(asking("b", "b2")), Submit(asking("c", "a1")))
    turn = bench.give(AdapterFailed("a1", 0, "no such file"))
    assert AdapterLost("a1", 0, "no such file", 3) in turn.reasons
    for name in (("a", 0), ("a", 1), ("c", 0)):
        assert bench.ended[name].reason == "error"
        assert "adapter could not be loaded: no such file" in bench.ended[name].error
    assert set(bench.state.requests) == {"b"}
    assert bench.slots() == ["", "b2"]
    bench.late = False
    bench.serve(asking("again", "a1"))


@pytest.mark.parametrize("passes", [0, 1, ADAPTER_PASSES])
def test_a_stay_has_an_end_while_others_wait_for_a_slot(passes: int) -> None:
    class Passing(FirstCome):
        def adapter_passes(self, _: Any, __: Load) -> int:
            return passes

    policy = FirstCome() if passes == ADAPTER_PASSES else Passing()
    bench = Adapted(evolve(ONE, policy=policy))
    bench.turn(Submit(asking("first", "a1", max_tokens=40)))
    bench.turn(Submit(asking("waits", "b2", max_tokens=2)))
    for number in range(2 * ADAPTER_PASSES):
        bench.turn(Submit(asking(f"a{number}", "a1", max_tokens=2)))
    for _ in range(60):
        bench.turn()
        if ("waits", 0) in bench.out:
            break
    before = [r.id for r in bench.reasons_of(Admitted)]
    before = before[: before.index("waits")]
    assert len(before) == 1 + passes
    bench.drain()
    assert len(bench.ended) == 2 + 2 * ADAPTER_PASSES


def test_requests_without_an_adapter_pass_at_any_time() -> None:
    bench = Adapted(ONE)
    bench.turn(Submit(asking("first", "a1", max_tokens=40)))
    bench.turn(Submit(asking("waits", "b2")))
    for number in range(6):
        bench.turn(Submit(asking(f"plain{number}", max_tokens=1)))
        bench.turn()
    assert all((f"plain{number}", 0) in bench.ended for number in range(6))
    assert ("waits", 0) not in bench.out


def test_slots_are_given_in_the_order_of_the_queue() -> None:
    bench = Adapted(ONE)
    names = [f"{0xB0 + number:x}" for number in range(5)]
    bench.turn(*[Submit(asking(name, name, max_tokens=3)) for name in names])
    bench.drain()
    assert [load.adapter for load in bench.loads] == names
    assert [r.id for r in bench.reasons_of(Admitted)] == names


@pytest.mark.parametrize("used", [True, False])
def test_a_dropped_adapter_leaves_its_slot_once_it_is_unused(used: bool) -> None:
    bench = Adapted()
    bench.turn(Submit(asking("a", "a1", max_tokens=9)))
    bench.turn()
    if not used:
        bench.drain()
    bench.turn(DropAdapter("a1"))
    assert bench.slots() == ["a1" if used else "", ""]
    bench.drain()
    assert bench.slots() == ["", ""]
    turn = bench.turn(DropAdapter("a1"))
    assert [r.event for r in turn.reasons if isinstance(r, Ignored)] == ["adapter"]
    bench.serve(asking("again", "a1"))


def test_reports_that_mean_nothing_are_ignored() -> None:
    bench = Adapted()
    bench.late = True
    bench.give(Submit(asking("a", "a1")))
    odd: tuple[Any, ...] = (
        AdapterLoaded("b2", 0),
        AdapterLoaded("a1", 1),
        AdapterFailed("a1", 7),
        AdapterFailed("a1", "0"),  # type: ignore[arg-type]
        AdapterLoaded("a1", slot=False),
        AdapterLoaded(7, 0),  # type: ignore[arg-type]
    )
    turn = bench.give(*odd)
    assert len([r for r in turn.reasons if isinstance(r, Ignored)]) == len(odd)
    assert bench.state.adapters.slots[0] == AdapterSlot("a1", loading=True)
    bench.turn(*bench.loaded())
    bench.drain()


def test_without_slots_an_adapter_is_rejected_by_name() -> None:
    bench = Adapted(evolve(ADAPTED, adapter_slots=0))
    bench.give(Submit(asking("a", "a1")))
    assert bench.ended["a", 0].reason == "rejected"
    assert "adapter_slots" in bench.ended["a", 0].error


@pytest.mark.parametrize("adapter", ["A1", "name", "a" * 129, 7, None])
def test_an_adapter_is_named_by_its_digest(adapter: Any) -> None:
    with pytest.raises(ParameterError, match="adapter: must be"):
        asking("a", "a1", max_tokens=1) and evolve(asking("a"), adapter=adapter)
    with pytest.raises(ParameterError, match="adapter: must be"):
        DropAdapter(adapter)


def test_too_many_slots_are_named() -> None:
    with pytest.raises(ConfigError, match="adapter_slots must be"):
        evolve(ADAPTED, adapter_slots=-1)


def test_a_wait_for_a_slot_is_reported_once_for_each_that_is_first() -> None:
    bench = Adapted(ONE)
    bench.turn(Submit(asking("a", "a1", max_tokens=40)))
    bench.turn(Submit(asking("b", "b2")), Submit(asking("c", "c3")))
    for _ in range(4):
        bench.turn()
    bench.turn(Cancel("b"))
    bench.turn()
    waits = [SlotBlocked(name, 0, adapter, 0, 1) for name, adapter in WAITING]
    assert bench.reasons_of(SlotBlocked) == waits


class XAfterTwo(FirstCome):
    """Defers client x until two samples run."""

    def defer(self, state: Any, request: Request, load: Load, _: int) -> tuple[bool, Any]:
        return request.client == "x" and load.running < 2, state


def test_who_is_deferred_no_more_is_the_first_that_waits_for_a_slot() -> None:
    bench = Adapted(evolve(ONE, policy=XAfterTwo()))
    bench.turn(Submit(asking("a", "a1", max_tokens=40)))
    bench.turn()
    waiting = asking("x", "a2", client="x"), asking("b", "b2"), asking("plain")
    bench.turn(*map(Submit, waiting))
    assert [*bench.state.running.ids] == [("a", 0), ("plain", 0)]
    assert bench.reasons_of(SlotBlocked) == [SlotBlocked("x", 0, "a2", 0, 1)]
    bench.drain()


def test_an_admission_lets_a_deferred_client_in_at_once() -> None:
    bench = Adapted(evolve(ONE, policy=XAfterTwo()))
    bench.turn(Submit(asking("a", max_tokens=40)))
    bench.turn(Submit(asking("x", client="x")), Submit(asking("b")))
    assert [*bench.state.running.ids] == [("a", 0), ("x", 0), ("b", 0)]
    bench.drain()


def test_no_more_than_may_pass_are_admitted_at_once() -> None:
    bench = Adapted(evolve(ONE, max_num_seqs=16, max_num_batched_tokens=256))
    bench.turn(Submit(asking("a", "a1", max_tokens=40)))
    bench.turn()
    passing = [asking(f"a{number}", "a1") for number in range(3 * ADAPTER_PASSES)]
    bench.turn(*map(Submit, [asking("waits", "b2"), *passing]))
    assert len(bench.state.running) == 1 + ADAPTER_PASSES
    bench.drain()


def test_of_adapters_loaded_in_one_turn_the_first_is_evicted_first() -> None:
    bench = Adapted()
    for name, adapter in (("a", "a1"), ("b", "b2"), ("a again", "a1")):
        bench.serve(asking(name, adapter))
    bench.late = True
    bench.give(Submit(asking("c", "c3")), Submit(asking("d", "d4")))
    assert bench.loads[-2:] == [LoadAdapter("c3", 1), LoadAdapter("d4", 0)]
    bench.give(Cancel("c"), Cancel("d"), *bench.loaded())
    bench.give(Submit(asking("e", "e5")))
    assert bench.loads[-1] == LoadAdapter("e5", 1)
    bench.turn(*bench.loaded())
    bench.drain()


def test_a_slot_is_not_given_while_a_dropped_adapter_is_loaded_into_it() -> None:
    bench = Adapted(ONE)
    bench.late = True
    bench.give(Submit(asking("a", "a1", max_tokens=2)), Submit(asking("b", "b2")))
    bench.give(DropAdapter("a1"))
    assert bench.slots() == ["a1"]
    assert len(bench.loads) == 1
    bench.late = False
    bench.drain()
    assert [load.adapter for load in bench.loads] == ["a1", "b2"]
    assert bench.out["a", 0] == bench.right(asking("a", "a1", max_tokens=2))


@pytest.mark.parametrize("digits", [1, 128])
def test_digests_of_any_usual_length_are_taken(digits: int) -> None:
    assert asking("a", "a" * digits).adapter == "a" * digits
