"""Scheduling stories that once went wrong: who should be let in when, told
turn by turn.
"""

from attrs import evolve, frozen

from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Preempted, Submit
from minfer.records.request import Request
from tests.core.test_engine import VOCAB, Bench

CONFIG = EngineConfig(
    num_blocks=16,
    block_size=4,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    vocab_size=VOCAB,
    depth=1,
)


def requested(name: str, prompt: tuple[int, ...], most: int, priority: int = 0) -> Submit:
    """A request of `prompt` for up to `most` tokens."""
    return Submit(Request(id=name, prompt=prompt, max_tokens=most, priority=priority))


def own(start: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no block with one of another start."""
    return tuple((start + 7 * i) % VOCAB for i in range(length))


def turns_until_admitted(bench: Bench, name: str, limit: int = 60) -> int:
    """Turns from now on, this one included, until a request is let in."""
    for turn in range(limit):
        if any(isinstance(r, Admitted) and r.id == name for r in bench.reasons):
            return turn
        bench.turn()
    raise AssertionError(f"{name} was not let in within {limit} turns")


def crowded() -> Bench:
    """Two requests of low priority have the cache almost to themselves."""
    bench = Bench(evolve(CONFIG, policy=Priority()))
    bench.give(
        requested("low a", own(1, 16), 40, priority=5),
        requested("low b", own(2, 16), 40, 5),
    )
    for _ in range(6):
        bench.turn()
    return bench


URGENT = requested("urgent a", own(3, 8), 2), requested("urgent b", own(4, 30), 20)


def test_who_is_urgent_displaces_though_another_was_let_in_by_the_same_plan() -> None:
    """Once the second waited ten turns, behind a request that it outranks."""
    bench = crowded()
    bench.turn(*URGENT)
    assert [turns_until_admitted(bench, name) for name in ("urgent a", "urgent b")] == [
        0,
        0,
    ]
    bench.drain()


def test_who_is_urgent_waits_as_long_in_one_turn_as_in_two() -> None:
    bench = crowded()
    for event in URGENT:
        bench.turn(event)
    assert [turns_until_admitted(bench, name) for name in ("urgent a", "urgent b")] == [
        0,
        0,
    ]
    bench.drain()


def test_who_is_urgent_does_not_wait_for_a_long_prompt_that_takes_the_whole_budget() -> (
    None
):
    """Once it waited 23 turns, until the prompt that it outranks had been read."""
    config = evolve(CONFIG, num_blocks=64, max_model_len=256, max_num_batched_tokens=8)
    bench = Bench(evolve(config, policy=Priority()))
    bench.give(requested("low", own(1, 200), 4, priority=5))
    bench.turn()
    bench.turn(requested("urgent", own(2, 4), 2))
    assert turns_until_admitted(bench, "urgent") == 0
    bench.drain()
    assert len(bench.out["low", 0]) == 4


def test_who_is_urgent_does_not_wait_where_rows_that_decode_take_the_whole_budget() -> (
    None
):
    config = evolve(CONFIG, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=4)
    bench = Bench(evolve(config, policy=Priority()))
    bench.give(*(requested(f"low {n}", own(n, 1), 30, priority=5) for n in range(4)))
    for _ in range(4):
        bench.turn()
    bench.turn(requested("urgent", own(9, 4), 2))
    assert turns_until_admitted(bench, "urgent") == 0
    bench.drain()
    assert len(bench.ended) == 5


def test_a_policy_that_takes_no_tokens_preempts_none_for_them() -> None:
    @frozen
    class Nothing(Priority):
        def budget(self, *_: object) -> int:
            return 0

    bench = Bench(evolve(CONFIG, policy=Nothing()))
    bench.give(requested("low", own(1, 4), 20, priority=5))
    bench.turn()
    bench.turn(requested("urgent", own(2, 4), 2))
    assert turns_until_admitted(bench, "urgent") > 10
    assert not any(isinstance(r, Preempted) for r in bench.reasons)
    bench.drain()


def test_who_waits_is_looked_at_again_when_a_neighbour_publishes_its_prefix() -> None:
    """Once it was let in when the neighbour had ended, 16 turns later: what was available
    had not risen, but what it needed had fallen.
    """
    bench = Bench(evolve(CONFIG, num_blocks=14))
    shared = own(1, 33)
    bench.give(requested("first", shared, 16), requested("second", (*shared, 9), 4))
    assert turns_until_admitted(bench, "second") == 1
    (admitted,) = [
        r for r in bench.reasons if isinstance(r, Admitted) and r.id == "second"
    ]
    assert admitted.hit == 32
    bench.drain()
