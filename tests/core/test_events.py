"""What each event does to waiting and running samples, and where what is
accepted ends.
"""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.engine import step
from minfer.lifecycle.arrive import rejection_reason
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Cancel,
    Emit,
    Ended,
    Execute,
    Failed,
    Finish,
    Finished,
    Ignored,
    Preempted,
    Submit,
    Tick,
)
from minfer.records.policy import FirstCome, Rank
from minfer.records.request import Request
from minfer.records.state import EngineState, initial
from tests.core.test_engine import CONFIG, VOCAB, Bench, ask

STATE = initial(CONFIG)


def objected(
    request: Request, config: EngineConfig = CONFIG, state: EngineState = STATE
) -> str:
    return rejection_reason(config, state, request)


@pytest.mark.parametrize(
    ("good", "bad", "why"),
    [
        (ask("a", 1), ask("a", prompt=()), "the prompt is empty"),
        (ask("a", n=1), ask("a", n=0), "n must be from 1 to 128"),
        (ask("a", n=128), ask("a", n=129), "n must be from 1 to 128"),
        (
            ask("a", output=(1,)),
            ask("a", n=2, output=(1,)),
            "and 1 for a resumed request",
        ),
        (ask("a", 64, 0), ask("a", 65, 0), "the prompt has 65 tokens"),
        (ask("a", 63), ask("a", 64), "the prompt has 64 tokens"),
        (
            ask("a", max_tokens=3, output=(1, 2)),
            ask("a", max_tokens=3, output=(1, 2, 3)),
            "resumed with all of its 3 output tokens",
        ),
        (
            ask("a", 62, 9, output=(1,)),
            ask("a", 62, 9, output=(1, 2)),
            "resumed with all of its 2 output tokens",
        ),
        (ask("a", prompt=(VOCAB - 1,)), ask("a", prompt=(VOCAB,)), "from 0 to 49"),
        (ask("a", output=(VOCAB - 1,)), ask("a", output=(VOCAB,)), "from 0 to 49"),
    ],
)
def test_what_is_accepted_ends_where_it_says(
    good: Request, bad: Request, why: str
) -> None:
    assert objected(good) == ""
    assert why in objected(bad)


def test_a_cache_that_holds_all_of_a_request_but_its_last_token_is_enough() -> None:
    config = evolve(CONFIG, num_blocks=3)
    assert objected(ask("a", 6, 7), config) == ""
    assert "up to 14 tokens need 4 KV blocks; the cache has 3" in objected(
        ask("a", 6, 8), config
    )
    short = evolve(config, max_model_len=13)
    assert objected(ask("a", 6, 500), short) == "", (
        "the context ends before the cache does"
    )


def test_the_line_is_full_with_all_that_may_wait() -> None:
    config = evolve(CONFIG, max_waiting=3, max_num_seqs=1)
    bench = Bench(config)
    bench.give(Submit(ask("a")))
    bench.give(Submit(ask("b")))
    assert objected(ask("c", n=2), config, bench.state) == ""
    assert "line is full (3 samples)" in objected(ask("c", n=3), config, bench.state)
    few = evolve(config, max_waiting=1)
    assert objected(ask("c", taken=True), few, bench.state) == ""
    assert objected(ask("c"), few, bench.state)


@pytest.mark.parametrize(
    ("n", "emitted"), [(-5, 1), (0, 1), (1, 1), (3, 3), (128, 128), (10**6, 128)]
)
def test_every_sample_of_a_rejected_request_is_reported(n: int, emitted: int) -> None:
    turn = step(CONFIG, STATE, (Submit(ask("a", prompt=(), n=n)),))
    (emit,) = turn.commands
    assert isinstance(emit, Emit)
    why = emit.finished[0].error
    assert emit.finished == tuple(
        Finished("a", s, "rejected", 0, why) for s in range(emitted)
    )
    assert turn.reasons == tuple(Ended("a", s, "rejected", why) for s in range(emitted))
    assert turn.state == STATE


def test_a_request_that_comes_again_is_ignored_and_may_come_after_its_end() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 6, 2)))
    turn = bench.give(Submit(ask("a", 9, 9)))
    assert bench.reasons_of(Ignored) == [Ignored("submit", "'a' is being served")]
    assert not any(isinstance(command, Emit) for command in turn.commands)
    bench.drain()
    bench.out.clear()
    bench.give(Submit(ask("a", 9, 9)))
    bench.drain()
    assert bench.out["a", 0] == bench.right(ask("a", 9, 9))


def test_a_request_waits_as_its_samples_at_the_time_it_came() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(Submit(ask("a")))
    bench.give(Submit(ask("b", n=3)), Submit(ask("c")))
    line = [(seq.id, seq.place, seq.arrived) for seq in bench.state.waiting]
    assert line == [
        (("b", 0), ((), 1, 0), 2.0),
        (("b", 1), ((), 1, 1), 2.0),
        (("b", 2), ((), 1, 2), 2.0),
        (("c", 0), ((), 2, 0), 2.0),
    ]
    assert bench.state.arrivals == 3
    live = bench.state.requests["b"]
    assert (live.place, live.samples, live.ended, live.moved) == (((), 1, 0), 3, 0, ())


def test_keys_that_came_along_are_used_only_for_full_blocks_of_the_prompt() -> None:
    prompt, output = tuple(range(9)), (1, 2, 3, 4)
    right = block_keys(b"", (*prompt, *output), 4)
    for keys in (
        (),
        right[:1],
        right[:2],
        (*right[:2], b"wrong"),
        (*right[:2], b"a", b"b"),
    ):
        bench = Bench()
        bench.give(Submit(ask("a", prompt=prompt, output=output, keys=keys)))
        (seq,) = bench.state.running.seqs
        assert seq.keys == right
        assert seq.history == (*prompt, *output)
        bench.drain()


def test_a_cancel_ends_all_that_wait_and_run_in_the_order_of_samples() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=2))
    bench.give(Submit(ask("a", 6, 9, n=4)), Submit(ask("b", 6, 9)))
    bench.turn()
    bench.turn()
    assert len(bench.state.running) == 2
    turn = bench.give(Cancel("a"))
    (emit,) = [command for command in turn.commands if isinstance(command, Emit)]
    assert [(done.sample, done.reason, done.length) for done in emit.finished] == [
        (0, "cancelled", 2),
        (1, "cancelled", 1),
        (2, "cancelled", 0),
        (3, "cancelled", 0),
    ]
    assert [reason.sample for reason in bench.reasons_of(Ended)] == [0, 1, 2, 3]
    assert not bench.reasons_of(Ignored)
    bench.turn()
    assert [name for name, _ in bench.state.running.ids] == ["b"]
    bench.drain()
    assert bench.out["b", 0] == bench.right(ask("b", 6, 9))


@pytest.mark.parametrize(
    ("length", "kept"), [(-3, 0), (0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (10**9, 3)]
)
def test_a_finish_counts_what_came_out_and_no_more(length: int, kept: int) -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 6, 9)))
    for _ in range(3):
        bench.turn()
    bench.give(Finish("a", 0, length, "a stop string"))
    assert bench.ended["a", 0] == Finished("a", 0, "a stop string", kept)


def test_a_finish_is_only_for_its_sample_running_or_waiting() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=2))
    bench.give(Submit(ask("a", 6, 9, n=3)), Submit(ask("b", 6, 9)))
    bench.turn()
    bench.give(Finish("a", 2, 0), Finish("a", 1, 1), Finish("a", 7, 1), Finish("c", 0, 1))
    assert set(bench.ended) == {("a", 1), ("a", 2)}
    assert [reason.detail for reason in bench.reasons_of(Ignored)] == [
        "sample 7 of 'a' is not being served",
        "sample 0 of 'c' is not being served",
    ]
    bench.turn()
    assert set(bench.state.running.ids) == {("a", 0), ("b", 0)}
    bench.drain()
    assert bench.out["a", 0] == bench.right(ask("a", 6, 9, n=3))


class Sooner(FirstCome):
    """Gives who was preempted a better place."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        del request, time
        return (0.0,), state

    def requeue_rank(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        del state, rank, request, arrived, done
        return (-1.0,)


def test_who_waits_at_a_better_place_than_it_came_with_is_found_and_had_run() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=9, policy=Sooner()))
    bench.give(*(Submit(ask(name, 8, 24)) for name in ("a", "bb", "ccc")))
    while not bench.reasons_of(Preempted):
        bench.turn()
    assert bench.state.waiting.first().place == ((-1.0,), 2, 0)
    had = len(bench.out["ccc", 0])
    bench.give(Cancel("ccc"))
    assert bench.ended["ccc", 0] == Finished("ccc", 0, "cancelled", had)
    assert not bench.state.waiting
    bench.drain()


def test_time_is_that_of_the_latest_tick_and_plans_go_on_until_there_are_enough() -> None:
    turn = step(
        evolve(CONFIG, depth=3), STATE, (Tick(5.0), Tick(3.0), Submit(ask("a", 3, 9)))
    )
    assert turn.state.time == 5.0
    assert [type(command) for command in turn.commands] == [Execute] * 3
    (admitted,) = turn.reasons
    assert isinstance(admitted, Admitted)
    assert admitted.waited == 0.0


def test_failures_of_unknown_steps_and_cancels_of_unknown_requests_change_nothing() -> (
    None
):
    turn = step(
        CONFIG, STATE, (Failed(3, "x"), Cancel("unknown"), Finish("unknown", 0, 1))
    )
    assert turn.state == STATE
    assert not turn.commands
    assert [reason.event for reason in turn.reasons if isinstance(reason, Ignored)] == [
        "failed",
        "cancel",
        "finish",
    ]
