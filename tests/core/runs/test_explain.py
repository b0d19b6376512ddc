"""Explanations add up, whatever happens, and name the right causes."""

import math
import time
from collections.abc import Iterable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import define, evolve, field
from hypothesis import assume, given

from minfer.config import EngineConfig
from minfer.engine import step
from minfer.keys import Key, block_keys, root_key
from minfer.messages import (
    Admitted,
    Cancel,
    Emit,
    Event,
    Execute,
    Preempted,
    Submit,
    Tick,
    Voided,
)
from minfer.policies import Priority
from minfer.prefix import PrefixChange
from minfer.request import Request
from minfer.runs.explain import Explanation, Life, UnknownRequestError, explain
from minfer.runs.oracle import Oracle
from minfer.runs.redact import redacted, redacted_config
from minfer.runs.simulate import Arrival, CostModel, Simulated, Simulation
from minfer.sequence import SampleId
from minfer.state import EngineState, Turn, initial
from tests.circles import examples
from tests.core import world as worlds
from tests.core.recorded import recorded

FEW = examples(5)
SEEDS = st.integers(0, 10**6)


def submitted(turns: Iterable[Turn]) -> dict[str, tuple[Turn, Request]]:
    """Of each id the first request that was served, or else the last that was
    rejected.
    """
    found: dict[str, tuple[Turn, Request]] = {}
    refused = set[str]()
    for turn in turns:
        for request in (
            event.request for event in turn.events if isinstance(event, Submit)
        ):
            if request.id not in found or request.id in refused:
                found[request.id] = turn, request
                refused.discard(request.id)
                refused |= {request.id} if was_refused(turn, request) else set()
    return found


def was_refused(turn: Turn, request: Request) -> bool:
    state = turn.transition.state
    if any(seq.request is request for seq in (*state.waiting, *state.running.seqs)):
        return False
    ends = (
        done
        for c in turn.transition.commands
        if isinstance(c, Emit)
        for done in c.finished
    )
    return any(done.id == request.id and done.reason == "rejected" for done in ends)


def seconds(life: Life, *kinds: str, preempted: int | None = None) -> float:
    return math.fsum(
        spent[1]
        for where, spent in life.parts.items()
        if where[0] in kinds and preempted in (None, where[3])
    )


def audit(turns: list[Turn], one: Explanation, begin: Turn) -> None:
    """What must hold of every explanation of a whole run."""
    assert len(one.lives) == max(1, one.request.n)
    for life in one.lives:
        assert life.arrived == begin.transition.state.time
        assert math.fsum(s for _, s, *_ in life.parts.values()) == pytest.approx(
            life.upto - life.arrived, abs=1e-9
        )
        assert sum(n for n, *_ in life.parts.values()) == life.turn - begin.number
        assert all(n >= 0 and s >= 0 for n, s, *_ in life.parts.values())
        _ends(turns, life)
        _waits(turns, life)
        voided = {number for number, reason in life.reasons if isinstance(reason, Voided)}
        assert bool(voided) == ("failed" in {where[0] for where in life.parts})


def _ends(turns: list[Turn], life: Life) -> None:
    assert life.end is not None
    last = next(turn for turn in turns if turn.number == life.turn)
    emits = [c for c in last.transition.commands if isinstance(c, Emit)]
    assert life.end in [end for emit in emits for end in emit.finished]
    assert life.upto == last.transition.state.time


def _waits(turns: list[Turn], life: Life) -> None:
    """Time in line, from the reasons alone: from its arrival or preemption to an
    admission.
    """
    since, waited, times = life.arrived, [0.0], 0
    clock = {turn.number: turn.transition.state.time for turn in turns}
    for number, reason in life.reasons:
        if isinstance(reason, Admitted):
            waited[-1] += clock[number] - since
            since = math.nan
            if not times:
                assert waited[0] == pytest.approx(reason.waited, abs=1e-9)
        elif isinstance(reason, Preempted) and (reason.id, reason.sample) == life.id:
            since, times = clock[number], times + 1
            waited.append(0.0)
    if not math.isnan(since):
        waited[-1] += life.upto - since
    assert times == life.preempted
    for nth, wait in enumerate(waited):
        assert seconds(life, "line", preempted=nth) == pytest.approx(wait, abs=1e-9)


@FEW
@given(SEEDS)
def test_all_parts_add_up_in_hostile_worlds(seed: int) -> None:
    config, turns = recorded(seed)
    begins = submitted(turns)
    for name in Random(seed).sample(sorted(begins), min(6, len(begins))):
        begin, request = begins[name]
        one = explain(config, iter(turns), name)
        assert one.request is request
        audit(turns, one, begin)
        last = max(life.turn for life in one.lives)
        assert explain(config, turns[: last + 1], name) == one  # nothing after it matters


@FEW
@given(SEEDS, st.floats(0, 1))
def test_a_run_may_begin_in_the_midst_of_things(seed: int, share: float) -> None:
    config, turns = recorded(seed)
    cut = int(share * (len(turns) - 1))
    rest, state = turns[cut:], turns[cut].before
    for name in state.requests:
        whole, part = explain(config, turns, name), explain(config, rest, name)
        if max(life.turn for life in whole.lives) < cut:
            continue  # the first of that name has left, and this is another one
        was_in = any(
            isinstance(r, Admitted) and r.id == name
            for turn in turns[:cut]
            for r in turn.transition.reasons
        )
        assert (part.prefix is None) == (was_in or whole.prefix is None)
        lives = {life.id: life for life in whole.lives}
        for life in part.lives:
            there = lives[life.id]
            assert (life.arrived, life.upto, life.turn) == (
                there.arrived,
                there.upto,
                there.turn,
            )
            assert (life.end, life.preempted) == (there.end, there.preempted)
            total = math.fsum(s for _, s, *_ in life.parts.values())
            assert total == pytest.approx(life.upto - life.arrived, abs=1e-9)
            assert seconds(life, "before") == pytest.approx(
                state.time - life.arrived, abs=1e-9
            )


@FEW
@given(SEEDS)
def test_a_run_that_ends_too_soon_is_told_as_far_as_it_goes(seed: int) -> None:
    config, turns = recorded(seed)
    cut = turns[: len(turns) // 2]
    state = cut[-1].transition.state
    for name in list(state.requests)[:4]:
        for life in explain(config, cut, name).lives:
            total = math.fsum(s for _, s, *_ in life.parts.values())
            assert total == pytest.approx(life.upto - life.arrived, abs=1e-9)
            if life.end is None:
                assert life.upto == state.time


# --- simulations ------------------------------------------------------------------------

COST = CostModel(name="a test's", decode=((1, 0.01),), mixed=0.02, token=0.001)


@FEW
@given(SEEDS, st.integers(4, 40))
def test_all_parts_add_up_in_simulations(seed: int, pool: int) -> None:
    rng, now, come = Random(seed), 0.0, list[Arrival]()
    config = EngineConfig(
        num_blocks=pool,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    for number in range(30):
        now += rng.expovariate(10)
        prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 24)))
        request = Request(id=str(number), prompt=prompt, max_tokens=rng.randint(1, 20))
        come.append((now, evolve(request, n=rng.choice((1, 1, 3)))))
    turns = list(Simulation(config, Simulated(), COST, come).turns())
    begins = submitted(turns)
    for name, (begin, _) in begins.items():
        audit(turns, explain(config, turns, name), begin)


# --- what was cached --------------------------------------------------------------------


def published(seed: int) -> tuple[EngineConfig, list[Turn], dict[Key, int]]:
    """A hostile world, and the turn in which each key first was in the cache."""
    first: dict[Key, int] = {}
    log: list[Turn] = []

    def spied(
        self: PrefixChange, leaf: int, keys: tuple[Key, ...], own: tuple[int, ...]
    ) -> object:
        first.update({key: len(log) for key in keys if key not in first})
        return publish(self, leaf, keys, own)

    def spy(
        config: EngineConfig, state: EngineState, events: tuple[Event, ...]
    ) -> object:
        transition = step(config, state, events)
        log.append(Turn(len(log), state, events, transition))
        return transition

    publish = PrefixChange.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "step", spy)
        patch.setattr(PrefixChange, "publish", spied)
        world = worlds.run_swarm(seed, 60)
    return world.config, log, first


def knew(
    turns: list[Turn], one: Explanation, number: int
) -> dict[SampleId, tuple[int, ...]]:
    """All that was known before a request was let in, by those who were or came before
    it.
    """
    state, told = turns[number].transition.state, dict[SampleId, tuple[int, ...]]()
    begins, let_in = submitted(turns), list[SampleId]()
    for turn in turns[: number + 1]:
        for command in turn.transition.commands:
            if isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    told[name] = told.get(name, ()) + tokens
        for reason in turn.transition.reasons:
            if isinstance(reason, Admitted):
                if turn.number == number and reason.id == one.request.id:
                    break
                name = reason.id, reason.sample
                if name in turn.transition.state.running.ids:  # else it had to go at once
                    let_in.append(name)
    order = [*begins].index
    line = [s.id for s in state.waiting if order(s.request.id) < order(one.request.id)]
    who = {name for name in [*let_in, *line] if name[0] != one.request.id}
    root = one.request.root
    return {
        name: begins[name[0]][1].prompt + begins[name[0]][1].output + told.get(name, ())
        for name in who
        if begins[name[0]][1].root == root
    }


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@FEW
@given(SEEDS)
def test_what_was_shared_and_what_was_cached(seed: int) -> None:
    config, turns, first = published(seed)
    size = config.block_size
    names = [e.request.id for turn in turns for e in turn.events if isinstance(e, Submit)]
    assume(
        len(set(names)) == len(names)
    )  # else `knew` would take one request for another
    for name in submitted(turns):
        one = explain(config, turns, name)
        prefix, history = one.prefix, one.request.prompt + one.request.output
        mine = (
            life for life in one.lives if life.id[1] == 0
        )  # its figures are the request's
        let_in = [n for life in mine for n, r in life.reasons if isinstance(r, Admitted)]
        assert (prefix is None) == (not let_in)
        if prefix is None:
            continue
        at = min(let_in)
        others = knew(turns, one, at)
        assert prefix.shared == max(
            (common(history, o) for o in others.values()), default=0
        )
        if prefix.shared_with is not None:
            assert common(history, others[prefix.shared_with]) == prefix.shared
        assert prefix.earlier >= len(
            others
        )  # an id's tokens before it gave way count, too
        assert prefix.known == len(history)
        assert prefix.hit <= prefix.cached <= prefix.computed <= prefix.shared
        if (
            not config.window
        ):  # behind a window, blocks are given back before they are published
            keys = block_keys(one.request.root, history, size)
            there = [first.get(key, at + 1) <= at for key in keys]
            assert prefix.cached // size == (
                there.index(False) if False in there else len(there)
            )


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
        self.oracle = Oracle(self.config.block_size, 50)

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
        oracle, self.oracle = self.oracle, Oracle(self.config.block_size, 50)
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


def test_behind_others_who_wait_for_rows() -> None:
    run = Run(config(max_num_seqs=1))
    run.turn(*(Submit(request(name, 3, tokens=3)) for name in "abc"))
    run.drain()
    first, second, third = (run.life(name) for name in "abc")
    assert dict(first.parts) == {
        ("prefill", "", False, 0): (1, 1.0, 1, 3, 0),
        ("decode", "", False, 0): (2, 2.0, 2, 2, 0),
    }
    assert (first.ahead, second.ahead, third.ahead) == (0, 0, 1)
    assert second.parts["line", "rows", False, 0] == (3, 3.0, 0, 0, 0)
    assert third.parts["line", "rows", True, 0] == (3, 3.0, 0, 0, 0)
    assert third.parts["line", "rows", False, 0] == (3, 3.0, 0, 0, 0)
    assert (third.first, third.last) == (8.0, (9, 10.0))


def test_a_chunk_of_another_is_the_longest_gap() -> None:
    run = Run(config(max_num_batched_tokens=16))
    run.turn(Submit(request("a", 2, tokens=8)))
    run.turn()
    run.turn(Submit(request("b", 28)))
    run.turn(took=5.0)
    run.turn(took=3.0)
    run.drain()
    gap = run.life("a").gap
    assert gap is not None
    seconds, since, turn = gap
    assert (seconds, since, turn.number) == (5.0, 2, 3)
    (fill,) = turn.before.inflight[0].fills
    assert len(fill.tokens) == 15
    other = run.life("b")
    assert other.parts["prefill", "", False, 0] == (2, 8.0, 2, 28, 2)


def test_queued_behind_a_step_that_runs() -> None:
    run = Run(config(depth=2))
    run.turn(Submit(request("a", 2, tokens=9)))
    run.turn(Submit(request("b", 2, tokens=1)))
    run.turn(took=7.0)
    run.turn(took=2.0)
    life = run.life("b")
    assert dict(life.parts) == {
        ("queued", "", False, 0): (1, 7.0, 0, 0, 0),
        ("prefill", "", False, 0): (1, 2.0, 1, 2, 1),
    }


def test_who_arrives_while_no_step_can_be_planned_waits_for_the_step() -> None:
    run = Run(config(depth=1))
    run.turn(Submit(request("a", 2, tokens=9)))
    run.late(Submit(request("b", 2, tokens=1)))
    run.turn(took=2.0)
    run.turn()
    assert run.life("b").parts["line", "step", False, 0] == (1, 2.0, 0, 0, 0)


def displaced() -> Run:
    """ "high" takes the place of "low" after its first tokens."""
    run = Run(config(num_blocks=8, policy=Priority()))
    run.turn(Submit(request("low", 8, tokens=20, priority=1)))
    run.turn()
    run.turn()
    run.turn(Submit(request("high", range(20, 45), tokens=4)))
    run.drain()
    return run


def test_preempted_for_another_and_computed_again() -> None:
    run = displaced()
    low, high = run.life("low"), run.life("high")
    ((when, gave),) = [(n, r) for n, r in low.reasons if isinstance(r, Preempted)]
    assert (gave.by, gave.known, gave.computed) == (("high", 0), 11, 10)
    assert [(n, r) for n, r in high.reasons if isinstance(r, Preempted)] == [(when, gave)]
    assert (low.preempted, high.preempted) == (1, 0)
    back = [r for n, r in low.reasons if isinstance(r, Admitted)][1]
    again = low.parts["recompute", "", False, 1]
    assert again[3] == back.known - back.hit  # what was not cached any more, and one
    assert low.parts["line", "blocks", False, 1][1] == seconds(low, "line")
    assert {where[0] for where in high.parts} == {"prefill", "decode"}


def test_what_a_request_brings_along_is_no_loss() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=4, output=(7, 8))))
    run.drain()
    assert {kind for kind, *_ in run.life("a").parts} == {"prefill", "decode"}


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_first_token_before_the_run_has_no_time(cut: int) -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=6, output=(7, 8))))
    run.drain()
    life = explain(run.config, run.turns[cut:], "a").lives[0]
    assert run.life("a").first == 2.0
    assert (life.early, life.first) == ((False, 2.0) if cut < 2 else (True, None))
    assert life.last == run.life("a").last


def test_who_was_preempted_before_the_run_has_had_tokens() -> None:
    run = displaced()
    ((when, _),) = [
        (n, r) for n, r in run.life("low").reasons if isinstance(r, Preempted)
    ]
    (life,) = explain(run.config, run.turns[when + 1 :], "low").lives
    assert (life.early, life.first) == (True, None)
    assert run.life("low").first == 2.0


def test_a_step_that_failed_is_told_apart() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=4)))
    run.turn()
    run.turn(took=5.0, fail="out of luck")
    run.drain()
    life = run.life("a")
    assert life.parts["failed", "", False, 0] == (1, 5.0, 0, 0, 0)
    (void,) = [reason for _, reason in life.reasons if isinstance(reason, Voided)]
    assert void.error == "out of luck"
    assert life.end is not None
    assert life.end.length == 4


def test_time_of_a_failed_step_is_taken_back_from_what_it_seemed_to_be() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=4)))
    run.turn()
    run.late()
    run.late()
    run.turn(fail="boom")
    run.drain()
    life = run.life("a")
    assert life.parts["failed", "", False, 0] == (3, 3.0, 0, 0, 0)
    assert seconds(life, "prefill") == 1.0


def test_what_came_before_the_failed_step_stays_as_it_was() -> None:
    run = Run(config(max_num_seqs=1, depth=2))
    run.turn(Submit(request("a", 3, tokens=2)), Submit(request("b", 3, tokens=2)))
    run.turn()  # all that a may get is planned
    run.late()
    run.late(Cancel("a"))
    assert [name for name, _ in run.state.running.ids] == ["b"]
    run.late()
    run.turn(fail="boom")
    run.drain()
    parts = run.life("b").parts
    assert parts["line", "rows", False, 0] == (3, 3.0, 0, 0, 0)
    assert parts["failed", "", False, 0] == (2, 2.0, 0, 0, 0)


def test_steps_of_many_tokens() -> None:
    run = Run(config(max_repeat=4))
    run.turn(Submit(request("a", 3, tokens=9)))
    run.drain()
    parts = run.life("a").parts
    assert parts["prefill", "", False, 0] == (1, 1.0, 1, 3, 0)
    assert parts["decode", "", False, 0] == (2, 2.0, 2, 8, 0)


def test_rejections_duplicates_and_unknown_ids() -> None:
    run = Run(config(num_blocks=4))
    run.turn(Submit(request("a", 90)))
    rejected = explain(run.config, run.turns, "a")
    (life,) = rejected.lives
    assert life.end is not None
    assert "need" in life.end.error
    assert not life.parts
    assert (life.upto, rejected.prefix) == (life.arrived, None)
    run.turn(Submit(request("a", 5)))
    run.turn(Submit(request("a", 5)))  # while it is served
    run.drain()
    served = explain(run.config, run.turns, "a")
    (life,) = served.lives
    assert life.end is not None
    assert (life.end.reason, life.arrived) == ("length", 2.0)
    run.turn(Submit(request("a", 5)))
    run.drain()
    assert explain(run.config, run.turns, "a") == served
    with pytest.raises(UnknownRequestError, match="none of 1 requests is 'aa'; near: a"):
        explain(run.config, run.turns, "aa")
    with pytest.raises(
        UnknownRequestError, match="none of 0 requests is 'a'; near: none"
    ):
        explain(run.config, [], "a")


def test_cancelled_in_the_turn_of_its_arrival() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 5, n=2)), Cancel("a"))
    lives = explain(run.config, run.turns, "a").lives
    assert [life.end and life.end.reason for life in lives] == ["cancelled"] * 2
    assert not any(life.parts for life in lives)


def test_an_id_that_ends_and_is_refused_in_one_turn_has_ended() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 5, tokens=9)))
    run.turn()
    run.turn(Cancel("a"), Submit(request("a", 5, tokens=0)))  # which cannot run
    run.turn()
    (life,) = explain(run.config, run.turns, "a").lives
    assert life.end is not None
    assert (life.end.reason, life.turn) == ("cancelled", 2)


def test_an_id_that_is_refused_and_taken_on_in_one_turn_is_that_of_the_one_taken_on() -> (
    None
):
    run = Run(config())
    run.turn(Submit(request("a", 5, tokens=0, n=2)), Submit(request("a", 5, tokens=2)))
    run.drain()
    (life,) = explain(run.config, run.turns, "a").lives
    assert life.end is not None
    assert life.end.reason == "length"


def test_why_a_prefix_missed() -> None:
    run = Run(config(num_blocks=6, max_num_batched_tokens=8))
    run.turn(Submit(request("first", range(12), tokens=1)))
    run.turn(
        Submit(request("twin", range(12), tokens=1))
    )  # 8 of 12 are computed, and cached
    run.drain()
    twin = explain(run.config, run.turns, "twin").prefix
    assert twin is not None
    assert (twin.hit, twin.shared, twin.shared_with) == (8, 12, ("first", 0))
    run.turn(Submit(request("close", [*range(6), 40, 41, 42], tokens=1)))
    run.drain()
    close = explain(run.config, run.turns, "close").prefix
    assert close is not None
    assert (close.hit, close.shared, close.computed, close.cached) == (4, 6, 6, 6)
    run.turn(Submit(request("large", range(20, 43), tokens=1)))  # takes the whole pool
    run.drain()
    run.turn(Submit(request("late", range(9), tokens=1)))
    run.drain()
    late = explain(run.config, run.turns, "late").prefix
    assert late is not None
    assert (late.hit, late.cached, late.computed) == (0, 9, 9)
    salted = request("salted", range(9), tokens=1, root=root_key(b"", b"mine"))
    run.turn(Submit(salted))
    run.drain()
    alone = explain(run.config, run.turns, "salted").prefix
    assert alone is not None
    assert (alone.hit, alone.earlier, alone.shared, alone.shared_with) == (0, 0, 0, None)


def test_who_comes_at_once_with_the_same_prompt_finds_nothing_computed() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 12)), Submit(request("b", 12)))
    run.drain()
    prefix = explain(run.config, run.turns, "b").prefix
    assert prefix is not None
    assert (prefix.hit, prefix.shared, prefix.computed, prefix.cached) == (0, 12, 0, 0)


@FEW
@given(SEEDS)
def test_without_token_ids_prefixes_are_known_by_blocks(seed: int) -> None:
    config, turns = recorded(seed)
    size, shown = config.block_size, redacted_config(config)
    state, hidden = initial(shown), list[Turn]()
    for turn in turns:
        events = redacted(config, turn.before, turn.events, b"secret")
        hidden.append(Turn(turn.number, state, events, step(shown, state, events)))
        state = hidden[-1].transition.state
    for name in sorted(submitted(turns))[:5]:
        real, masked = explain(config, turns, name), explain(shown, hidden, name)
        assert [life.parts for life in real.lives] == [
            life.parts for life in masked.lives
        ]
        if real.prefix is not None and masked.prefix is not None:
            assert masked.prefix.hit == real.prefix.hit
            assert masked.prefix.computed // size == real.prefix.computed // size
            assert (
                masked.prefix.shared <= real.prefix.shared
            )  # ends of sequence are told apart


def test_a_turn_costs_microseconds() -> None:
    run = Run(config(num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=512))
    run.turn(*(Submit(request(str(i), [i, i + 1], tokens=60)) for i in range(256)))
    run.drain()

    def seconds() -> float:
        begin = time.thread_time()  # whatever else the machine does
        explain(run.config, run.turns, "255")
        return (time.thread_time() - begin) / len(run.turns)

    assert min(seconds() for _ in range(5)) < 600e-6  # 40 us on an idle machine
