"""The engine, one behaviour at a time."""

from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Emit,
    Event,
    Execute,
    Finish,
    Finished,
    Ignored,
    Submit,
    Tick,
)
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.request import PromptOnly, Request
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.state import EngineState, Transition, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.invariants import check
from tests.core.world import reference

VOCAB = 50
CONFIG = EngineConfig(
    num_blocks=32,
    block_size=4,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    vocab_size=VOCAB,
    depth=1,
)


class Bench:
    """An engine with an oracle, turned by hand."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.config = config
        self.state: EngineState = initial(config)
        self.oracle = Oracle(config.block_size, VOCAB, config.groups)
        self.out: dict[tuple[str, int], tuple[int, ...]] = {}
        self.ended: dict[tuple[str, int], Finished] = {}
        self.clock = 0.0
        self.reasons: list[Any] = []
        self.plans: list[Plan] = []

    def give(self, *events: Event) -> Transition:
        """One turn with exactly these events."""
        self.clock += 1
        turn = step(self.config, self.state, (Tick(self.clock), *events))
        check(self.config, turn.state)
        self.state = turn.state
        self.reasons += turn.reasons
        for command in turn.commands:
            if isinstance(command, Execute):
                self.oracle.launch(command.plan)
                if command.plan.deferred:
                    self.oracle.sample(SampleDeferred(command.plan.step))
                self.plans.append(command.plan)
            elif isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    self.out[name] = self.out.get(name, ()) + tokens
                self.ended.update({(f.id, f.sample): f for f in command.finished})
        return turn

    def turn(self, *events: Event) -> Transition:
        """One turn in which the earliest step is done."""
        return self.give(
            *((self.oracle.collect(),) if self.oracle.plans else ()), *events
        )

    def drain(self) -> None:
        for _ in range(1000):
            if not self.state.requests and not self.state.inflight:
                return
            self.turn()
        raise AssertionError("not drained")

    def right(self, request: Request, sample: int = 0) -> tuple[int, ...]:
        own = self.config
        sizes = own.block_size, VOCAB, own.max_model_len, own.groups
        return tuple(reference(request, sample, *sizes))

    def reasons_of(self, kind: type) -> list[Any]:
        return [r for r in self.reasons if isinstance(r, kind)]


def ask(name: str, length: int = 6, max_tokens: int = 8, **more: Any) -> Request:
    """A request; without `max_tokens`, of its prompt only."""
    prompt = more.pop("prompt", tuple((7 * i + len(name)) % VOCAB for i in range(length)))
    if not max_tokens:
        more = {"prompt_only": PromptOnly()} | more
    return Request(id=name, prompt=prompt, max_tokens=max_tokens, **more)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (ask("a", prompt=()), "empty"),
        (ask("a", 64), "maximum context length is 64"),
        (ask("a", 65, max_tokens=0), "maximum context length is 64"),
    ],
)
def test_what_can_never_run_is_rejected_at_once(request_: Request, why: str) -> None:
    bench = Bench()
    good = ask("good")
    bench.give(Submit(good), Submit(request_))
    done = bench.ended["a", 0]
    assert done.reason == "rejected"
    assert why in done.error
    bench.drain()
    assert bench.out["good", 0] == bench.right(good), "the others are served"


def test_an_id_in_use_is_ignored_and_a_full_line_rejects() -> None:
    bench = Bench(evolve(CONFIG, max_waiting=2, max_num_seqs=1))
    bench.give(Submit(ask("a")))
    turn = bench.give(Submit(ask("a")), Submit(ask("b")), Submit(ask("c", n=2)))
    errors = [f.error for c in turn.commands if isinstance(c, Emit) for f in c.finished]
    assert any(
        isinstance(r, Ignored) and "'a' is being served" in r.detail for r in turn.reasons
    )
    assert "line is full" in errors[0]


def test_a_last_chunk_of_one_token_is_fed_by_the_host() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, max_num_batched_tokens=4))
    request = ask("a", 9, 3)
    bench.give(Submit(request))
    bench.drain()
    assert [len(p.fills) for p in bench.plans] == [1, 1, 1, 0, 0]
    assert bench.plans[2].fills[0].tokens == request.prompt[8:]
    assert bench.out["a", 0] == bench.right(request)


def test_a_full_hit_still_computes_one_token() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 8, 4)))
    bench.drain()
    bench.give(Submit(ask("b", 8, 4)))
    assert bench.plans[-1].num_scheduled_tokens == (4,), (
        "the second block is computed anew"
    )
    bench.drain()
    bench.give(Submit(ask("c", 9, 4)))
    assert bench.plans[-1].num_scheduled_tokens == (1,), "two full blocks are hits"
    bench.drain()
    assert bench.out["a", 0] == bench.out["b", 0]
    assert bench.ended["c", 0].cached == 8
    assert [a.hit for a in bench.reasons_of(Admitted)] == [0, 4, 8]
    assert [(a.cached, a.prompt) for a in bench.reasons_of(Admitted)] == [
        (0, 8),
        (4, 8),
        (8, 9),
    ]


def test_a_long_shared_prefix_is_read_off_a_neighbour() -> None:
    bench = Bench(evolve(CONFIG, block_size=1, num_blocks=200, max_num_batched_tokens=64))
    prompt = tuple(i % VOCAB for i in range(40))
    first, second = ask("a", 40, 12, prompt=prompt), ask("b", 40, 12, prompt=(*prompt, 9))
    bench.give(Submit(ask("x", 3, 20)), Submit(first))
    bench.turn()
    bench.turn(Submit(ask("xx", 3, 20)))
    bench.turn(Submit(second))
    tables = bench.state.running.tables
    assert tables[3][0][:40] == tables[1][0][:40]
    assert bench.reasons_of(Admitted)[-1].hit == 40
    bench.drain()
    for request in (first, second):
        assert bench.out[request.id, 0] == bench.right(request)


def test_salts_and_unknown_keys_do_not_share() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 9, 1)))
    bench.drain()
    bench.give(Submit(ask("b", 9, 1, root=b"other")))
    bench.drain()
    assert [a.hit for a in bench.reasons_of(Admitted)] == [0, 0]


def test_a_copy_lost_with_its_plan_is_not_kv() -> None:
    bench = Bench()
    request = ask("a", 11, 5, n=2)
    bench.give(Submit(request))
    bench.turn()
    assert bench.plans[-1].copies
    bench.give(bench.oracle.fail("boom", halfway=False))
    again = bench.plans[-1]
    assert again.starts[1] == 8, "the tail is computed from the block's start"
    assert not again.copies
    bench.drain()
    assert bench.out["a", 1] == bench.right(request, 1)


def test_the_text_layer_ends_samples_running_and_waiting() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(Submit(ask("a", 4, 20)), Submit(ask("b", 4, 20)))
    for _ in range(6):
        bench.turn()
    had = len(bench.out["a", 0])
    bench.turn(
        Finish("a", 0, had - 2), Finish("b", 0, 3), Finish("b", 0, 3), Finish("x", 0, 1)
    )
    assert bench.ended["a", 0] == Finished("a", 0, "stop", had - 2)
    assert bench.ended["b", 0].length == 0
    assert len(bench.reasons_of(Ignored)) == 2
    assert not bench.state.requests


def test_stop_ids_end_a_sample_and_are_part_of_it() -> None:
    for how in (None, Speculation(drafter=DEVICE, drafts=5, adaptive=False)):
        bench = Bench(evolve(CONFIG, speculation=how, depth=2))
        plain = ask("a", 5, 20)
        right = bench.right(plain)
        stop = right[6]
        bench.give(Submit(evolve(plain, stop_ids=frozenset((stop,)))))
        bench.drain()
        cut = right[: right.index(stop) + 1]
        assert bench.out["a", 0] == cut
        assert bench.ended["a", 0].reason == "stop"


def test_a_resumed_request_goes_on_where_it_was() -> None:
    bench = Bench()
    request = ask("a", 6, 9)
    right = bench.right(request)
    resumed = evolve(request, output=right[:4])
    bench.give(Submit(resumed))
    bench.drain()
    assert bench.out["a", 0] == right[4:]
    assert bench.ended["a", 0].length == 9


def test_a_restart_shares_what_is_known_and_its_plans_carry_the_rest() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    request = ask("a", 6, 20)
    bench.turn(Submit(request))
    for _ in range(9):
        bench.turn()
    before = bench.state.running
    bench.give(bench.oracle.fail("boom", halfway=False))
    after = bench.state.running
    assert after.num_known_at_admission == before.known
    assert after.seqs[0] is before.seqs[0]
    assert after.tails == before.tails
    known = after.tokens(0, 4)
    (fill,) = bench.state.inflight[0].fills
    start = after.starts[0]
    assert fill.tokens == known[start:] == after.inputs(0, start, len(known), 4)
    assert [after.inputs(0, at, len(known), 4) for at in range(len(known))] == [
        known[at:] for at in range(len(known))
    ]
    bench.drain()
    assert bench.out["a", 0] == bench.right(request)


def test_one_poisonous_request_fails_without_the_others() -> None:
    bench = Bench(evolve(CONFIG, depth=2, max_failures=4))
    good = [ask(name, 5, 9) for name in ("a", "bb", "cccc")]
    bench.give(
        Submit(good[0]), Submit(good[1]), Submit(ask("poison", 5, 9)), Submit(good[2])
    )
    while bench.state.requests:
        names = {
            bench.state.running.ids[bench.state.running.run_ids.index(g)][0]
            for g in bench.oracle.plans[0].run_ids
            if g in bench.state.running.run_ids
        }
        if "poison" in names:
            bench.give(bench.oracle.fail("NaN", halfway=False))
        else:
            bench.turn()
    assert bench.ended["poison", 0].reason == "error"
    assert "failed 4 times, at last with: NaN" in bench.ended["poison", 0].error
    for request in good:
        assert bench.ended[request.id, 0].reason == "length"
        assert bench.out[request.id, 0] == bench.right(request)
