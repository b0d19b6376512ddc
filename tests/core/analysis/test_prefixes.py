"""What was cached, and what could have been, is what all before it knew and published."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from minfer.analysis.explain import Explanation, explain
from minfer.blocks.keys import Key, block_keys, root_key
from minfer.blocks.prefix import Pages, PrefixChange
from minfer.engine import step
from minfer.journal.redact import redacted, redacted_config
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Emit, Event, Submit
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn, initial
from tests.circles import examples
from tests.core import world as worlds
from tests.core.analysis.test_explain import submitted
from tests.core.recorded import recorded
from tests.core.simulation.clocked import Run, config, request

FEW = examples(5)
SEEDS = st.integers(0, 10**6)


def published(seed: int) -> tuple[EngineConfig, list[Turn], dict[Key, int]]:
    """A hostile world, and the turn in which each key first was in the cache."""
    first: dict[Key, int] = {}
    log: list[Turn] = []

    def spied(
        self: PrefixChange, leaf: Key, keys: tuple[Key, ...], own: Sequence[Pages]
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
    state, reported = turns[number].transition.state, dict[SampleId, tuple[int, ...]]()
    begins, let_in = submitted(turns), list[SampleId]()
    for turn in turns[: number + 1]:
        for command in turn.transition.commands:
            if isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    reported[name] = reported.get(name, ()) + tokens
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
        name: begins[name[0]][1].prompt
        + begins[name[0]][1].output
        + reported.get(name, ())
        for name in who
        if begins[name[0]][1].root == root
    }


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.long
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
        assert prefix.earlier == len({other for other, _ in others})
        assert prefix.known == len(history)
        assert prefix.hit <= prefix.cached <= prefix.computed <= prefix.shared
        if not any(
            group.window for group in config.groups
        ):  # behind a window, blocks are given back before they are published
            keys = block_keys(one.request.root, history, size)
            there = [first.get(key, at + 1) <= at for key in keys]
            assert prefix.cached // size == (
                there.index(False) if False in there else len(there)
            )


def test_a_step_that_failed_computed_nothing_that_could_be_cached() -> None:
    run = Run(config(max_failures=1))
    run.turn(Submit(request("first", range(12))))
    run.turn(Submit(request("twin", range(12))), fail="out of memory")
    run.drain()
    twin = explain(run.config, run.turns, "twin").prefix
    assert twin is not None
    assert (twin.hit, twin.shared, twin.computed, twin.cached) == (0, 12, 0, 0)


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
    solo = explain(run.config, run.turns, "salted").prefix
    assert solo is not None
    assert (solo.hit, solo.earlier, solo.shared, solo.shared_with) == (0, 0, 0, None)


def test_the_longest_shared_prefix_counts_though_others_came_later() -> None:
    run = Run(config())
    prompts = {"long": range(9), "short": (0, 1, 40), "late": range(9)}
    for name, prompt in prompts.items():
        run.turn(Submit(request(name, prompt, tokens=1)))
        run.drain()
    prefix = explain(run.config, run.turns, "late").prefix
    assert prefix is not None
    assert (prefix.shared, prefix.shared_with, prefix.earlier) == (9, ("long", 0), 2)


def test_a_request_that_was_preempted_is_one_earlier_request() -> None:
    run = Run(config(max_num_seqs=1, policy=Priority()))
    run.turn(Submit(request("first", 5, tokens=9, priority=1)))
    run.turn()
    run.turn(Submit(request("urgent", 6, tokens=2)))
    run.turn(Submit(request("late", 7, tokens=1)))
    run.drain()
    assert run.life("first").preempted == 1
    prefix = explain(run.config, run.turns, "late").prefix
    assert prefix is not None
    assert prefix.earlier == 2


def test_who_comes_at_once_with_the_same_prompt_finds_nothing_computed() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 12)), Submit(request("b", 12)))
    run.drain()
    prefix = explain(run.config, run.turns, "b").prefix
    assert prefix is not None
    assert (prefix.hit, prefix.shared, prefix.computed, prefix.cached) == (0, 12, 0, 0)


@pytest.mark.long
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
