"""The tokens of published blocks, against keys that are computed of them again."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from minfer.blocks.keys import Key, block_keys, extend_keys
from minfer.blocks.prefix import ROOT
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Cancel, Event, Submit
from minfer.records.policy import FirstCome
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.routing.replica_events import cache_changes, routing_group
from minfer.routing.stored_blocks import StoredBlocks, stored_blocks
from minfer.testing.kit import configs, requests, traces
from minfer.testing.trial import Trial
from tests.circles import examples
from tests.core.routing.test_replica_events import ROOT as ROOT_OF_REQUESTS
from tests.core.routing.test_replica_events import cached
from tests.core.simulation.clocked import Run
from tests.core.simulation.test_simulate import config_of
from tests.core.speculate.drafted import HOSTED, SOLO, Drafted
from tests.core.test_engine import Bench, ask
from tests.core.tiers.hosted import Hosted


def stored_in(config: EngineConfig, turn: Turn) -> list[StoredBlocks]:
    """What a turn stored; its keys are those of its tokens, behind its parent."""
    published = cache_changes(config, turn.before, turn.transition.state).published
    stored = [*stored_blocks(config, turn.before, turn.transition, published)]
    for blocks in stored:
        before = () if blocks.parent == ROOT else (blocks.parent,)
        tokens = (0,) * config.block_size * len(before) + blocks.tokens
        again = extend_keys(before, blocks.root, tokens, config.block_size)
        assert again == before + blocks.keys
    return stored


def check(config: EngineConfig, turns: list[Turn]) -> Counter[str]:
    """That a router which follows the events has all blocks that the index has, each
    behind its parent; returns how many were stored, and how many had no sequence.
    """
    counts, known = Counter[str](), set[Key]()
    for turn in turns:
        changes = cache_changes(config, turn.before, turn.transition.state)
        known.difference_update(changes.evicted)
        stored = stored_in(config, turn)
        for blocks in stored:
            if blocks.parent != ROOT:
                assert blocks.parent in known
            assert known.isdisjoint(blocks.keys)
            known.update(blocks.keys)
        keys = [key for blocks in stored for key in blocks.keys]
        assert len(keys) == len(set(keys))
        assert set(keys) <= set(changes.published)
        counts["stored"] += len(keys)
        counts["left out"] += len(changes.published) - len(keys)
    return counts


@pytest.mark.long
@examples(25)
@given(configs(FirstCome()), traces(20), requests("mine"))
def test_blocks_have_the_tokens_of_their_keys_in_hostile_worlds(
    config: EngineConfig, trace: Any, mine: Request
) -> None:
    trial = Trial(config)
    for gap, event in trace:
        trial.tell(event, gap)
    trial.tell(Submit(mine))
    trial.finish()
    if routing_group(config) is not None:
        for turn in trial.turns:
            stored_in(config, turn)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 9)), max_size=25
    ),
    st.integers(8, 14),
)
def test_all_published_blocks_are_stored_in_a_pool_that_is_always_full(
    asked: Any, blocks: int
) -> None:
    run = Run(config_of(num_blocks=blocks, max_model_len=30))
    for number, (kind, length, most) in enumerate(asked):
        prompt = (kind,) * 4 * (length // 2) + (number,) * (4 * (length - length // 2))
        run.turn(Submit(cached(prompt, f"{number}", max_tokens=most)))
        if number % 5 == 4:
            run.turn(Cancel(f"{number - 1}"), Cancel(f"{number - 2}"))
        if number % 7 == 6:
            run.turn(fail="why")
    run.drain()
    assert not check(run.config, run.turns)["left out"]


def test_blocks_of_a_prompt_and_of_its_output_are_stored() -> None:
    run = Run(config_of(depth=1))
    run.turn(Submit(cached((1,) * 9, "1", max_tokens=12)))
    run.drain()
    stored = [blocks for turn in run.turns for blocks in stored_in(run.config, turn)]
    assert stored[0] == StoredBlocks(
        block_keys(ROOT_OF_REQUESTS, (1,) * 9, 4), ROOT, (1,) * 8, ROOT_OF_REQUESTS
    )
    assert check(run.config, run.turns) == {"stored": 5, "left out": 0}


def test_a_chain_behind_a_window_is_stored_as_in_the_group_without_one() -> None:
    groups = (CacheGroup(window=8), CacheGroup())
    run = Run(evolve(config_of(), groups=groups))
    run.turn(Submit(cached((1,) * 33, "1", max_tokens=9)))
    run.drain()
    assert check(run.config, run.turns) == {"stored": 10, "left out": 0}


def stored_until_idle(bench: Bench, *events: Event) -> list[StoredBlocks]:
    """What a bench stores in a turn with these events, and from then on."""
    stored = []
    while events or bench.state.requests:
        before, transition = bench.state, bench.turn(*events)
        stored += stored_in(bench.config, Turn(0, before, (), transition))
        events = ()
    return stored


@pytest.mark.parametrize("hit", [0, 2])
def test_blocks_that_an_admitted_request_loaded_are_stored_with_their_tokens(
    hit: int,
) -> None:
    first = ask("first", 18, max_tokens=2)  # four full blocks, and two tokens more
    bench = Hosted()
    bench.serve(first)
    bench.push_out()
    if hit:
        bench.serve(evolve(first, id="begin", prompt=first.prompt[: 4 * hit + 1]))
    stored = stored_until_idle(bench, Submit(evolve(first, id="again")))
    keys = block_keys(first.root, first.prompt, 4)
    parent = keys[hit - 1] if hit else ROOT
    assert stored == [
        StoredBlocks(keys[hit:], parent, first.prompt[4 * hit : 16], first.root)
    ]


def test_a_block_that_ends_in_the_last_accepted_drafts_is_stored() -> None:
    """Its tokens are emitted in the turn in which its sequence leaves."""
    request = ask("a", 4, max_tokens=9)
    bench = Drafted(HOSTED, config=SOLO)
    stored = stored_until_idle(bench, Submit(request))
    keys = [key for blocks in stored for key in blocks.keys]
    whole = (*request.prompt, *bench.out["a", 0])
    assert keys == [*block_keys(request.root, whole, 4)]


def test_blocks_are_stored_whose_groups_are_not_published_alike() -> None:
    """A group without a window waits until the equal blocks of another sequence are
    evicted.
    """
    groups = (CacheGroup(window=4), CacheGroup())
    run = Run(evolve(config_of(num_blocks=14, depth=1), groups=groups))
    twins = [
        cached((1,) * 13, name, max_tokens=most) for name, most in (("a", 1), ("b", 30))
    ]
    run.turn(*map(Submit, twins))
    run.turn()
    run.turn()
    run.turn(Submit(cached((3,) * 25, "c", max_tokens=1)))
    run.drain()
    chains = [chain for turn in run.turns for chain in turn.before.running.chains]
    assert (5, 1) in {chain.sealed for chain in chains}
    assert check(run.config, run.turns) == {"stored": 18, "left out": 0}
