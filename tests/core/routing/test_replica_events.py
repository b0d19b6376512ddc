"""Cache changes against all blocks of both states, in hostile worlds; loads and events
one by one.
"""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from minfer.blocks.keys import DIGEST, Key, block_keys, group_key
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    Pause,
    Submit,
)
from minfer.records.policy import FirstCome
from minfer.records.request import Request, SamplingParams
from minfer.records.state import EngineState, Turn
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    LoadReport,
    RequestEnded,
    RequestStarted,
)
from minfer.routing.replica_events import (
    CacheChanges,
    cache_changes,
    content_keys,
    load_report,
    replica_events,
    routing_group,
)
from minfer.testing.kit import configs, requests, traces
from minfer.testing.trial import Trial
from tests.circles import examples
from tests.core.simulation.clocked import Run
from tests.core.simulation.test_simulate import config_of, requested
from tests.core.test_engine import CONFIG, Bench, ask

ROOT = bytes(DIGEST)


def content(state: EngineState, group: int) -> set[Key]:
    """The content keys of all cached full blocks of a group."""
    keys = state.blocks.prefix.nodes.keys()
    if not group:
        return {key for key in keys if len(key) == DIGEST}
    first = bytes((group,))
    return {key[1:] for key in keys if len(key) > DIGEST and key[:1] == first}


def check(config: EngineConfig, turn: Turn) -> CacheChanges:
    before, after = turn.before, turn.transition.state
    found = cache_changes(config, before, after)
    group = routing_group(config)
    if group is None:
        assert found == CacheChanges()
        return found
    old, new = content(before, group), content(after, group)
    assert len(found.published) == len(set(found.published))
    assert set(found.published) == new - old
    gone = {key for key in found.evicted if len(key) == DIGEST}
    assert gone == old - new
    assert len(found.evicted) == len(set(found.evicted))
    return found


@pytest.mark.long
@examples(25)
@given(configs(FirstCome()), traces(20), requests("mine"))
def test_changes_are_the_differences_of_all_blocks(
    config: EngineConfig, trace: Any, mine: Request
) -> None:
    trial = Trial(config)
    for gap, event in trace:
        trial.tell(event, gap)
    trial.tell(Submit(mine))
    trial.finish()
    for turn in trial.turns:
        check(config, turn)


def cached(prompt: tuple[int, ...], name: str, **more: Any) -> Request:
    keys = block_keys(ROOT, prompt, 4)
    return Request(id=name, prompt=prompt, root=ROOT, keys=keys, **more)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 9)), max_size=25
    ),
    st.integers(8, 14),
)
def test_changes_in_a_pool_that_is_always_full(asked: Any, blocks: int) -> None:
    run, seen = Run(config_of(num_blocks=blocks, max_model_len=30)), Counter[str]()
    config = run.config
    for number, (kind, length, most) in enumerate(asked):
        prompt = (kind,) * 4 * (length // 2) + (number,) * (4 * (length - length // 2))
        run.turn(Submit(cached(prompt, f"{number}", max_tokens=most)))
        if number % 5 == 4:
            run.turn(Cancel(f"{number - 1}"), Cancel(f"{number - 2}"))
        if number % 7 == 6:
            run.turn(fail="why")
    run.drain()
    cache = set[Key]()
    for turn in run.turns:
        found = check(config, turn)
        seen["published"] += len(found.published)
        seen["evicted"] += len(found.evicted)
        cache = cache - set(found.evicted) | set(found.published)
    assert cache == content(run.state, 0)


def test_parents_are_published_first_and_evicted_last() -> None:
    run = Run(config_of(num_blocks=8, max_model_len=30))
    first = cached(tuple(range(21)), "1", max_tokens=1)
    run.turn(Submit(first))
    run.drain()
    (published,) = filter(None, (check(run.config, t).published for t in run.turns))
    assert published == first.keys
    count = len(run.turns)
    run.turn(Submit(cached(tuple(range(30, 51)), "2", max_tokens=1)))
    run.drain()
    evicted = [check(run.config, turn).evicted for turn in run.turns[count:]]
    (gone,) = filter(None, evicted)
    assert gone == first.keys[: -len(gone) - 1 : -1]


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        ((CacheGroup(),), 0),
        ((CacheGroup(window=4), CacheGroup(), CacheGroup(window=8)), 1),
        ((CacheGroup(window=4),), None),
    ],
)
def test_the_group_that_a_router_knows(groups: Any, group: int | None) -> None:
    assert routing_group(evolve(config_of(), groups=groups)) == group


def test_content_keys_are_those_of_full_blocks_of_one_group() -> None:
    keys = block_keys(ROOT, tuple(range(12)), 4)
    tail = b"\x02" * (DIGEST + 2)
    of_groups = [group_key(key, g) for g, key in enumerate(keys)]
    assert content_keys((*of_groups, tail), 0) == keys[:1]
    assert content_keys((*of_groups, tail), 1) == keys[1:2]


def test_without_a_full_group_no_changes_of_the_cache_are_known() -> None:
    run = Run(evolve(config_of(), groups=(CacheGroup(window=8),)))
    run.turn(Submit(cached((1,) * 20, "1", max_tokens=9)))
    run.drain()
    assert run.state.blocks.prefix.cached
    assert [check(run.config, turn) for turn in run.turns] == [CacheChanges()] * len(
        run.turns
    )


def test_a_turn_that_leaves_the_cache_as_it_is_changes_nothing() -> None:
    run = Run(config_of())
    run.turn()
    assert cache_changes(run.config, run.state, run.state) == CacheChanges()


def test_the_load_is_what_waits_what_runs_and_what_is_left_to_compute() -> None:
    run = Run(config_of(max_num_seqs=1, max_num_batched_tokens=8, depth=1))
    run.turn(Submit(cached((1,) * 21, "1", max_tokens=3)))
    assert load_report(run.config, "a", run.state) == LoadReport("a", 0, 1, 13, 58)
    run.turn()
    # the first two blocks are cached
    run.turn(Submit(cached((1,) * 8 + (2,) * 4, "2", max_tokens=3)))
    run.turn(
        Submit(
            cached(
                (1,) * 21, "3", max_tokens=3, sampling=SamplingParams(prompt_logprobs=0)
            )
        )
    )
    pages = run.state.blocks.available
    assert load_report(run.config, "a", run.state) == LoadReport("a", 2, 1, 25, pages)
    run.turn(Submit(cached((1,) * 8, "4", max_tokens=3)))
    assert load_report(run.config, "a", run.state).prefill == 26
    run.drain()
    assert load_report(run.config, "b", run.state) == LoadReport("b", 0, 0, 0, 64)


def test_adapters_on_the_device_and_on_their_way_are_reported() -> None:
    config = evolve(CONFIG, adapter_slots=4)
    bench = Bench(config)
    bench.give(*[Submit(ask(name, adapter=name)) for name in ("a1", "b2", "c3")])
    bench.give(AdapterLoaded("b2", 1), AdapterFailed("a1", 0))
    assert load_report(config, "a", bench.state).adapters == ("b2", "c3")


def test_without_a_full_group_waiting_prompts_count_whole() -> None:
    groups = (CacheGroup(window=8),)
    config = evolve(config_of(max_num_seqs=1), groups=groups)
    run = Run(config)
    for name in "12":
        run.turn(Submit(cached((1,) * 20, name, max_tokens=9)))
    assert load_report(config, "a", run.state).prefill == 20


def test_events_of_turns_are_starts_ends_and_changes_of_the_cache() -> None:
    run, unstarted = Run(config_of(depth=1)), {"1", "2", "3"}
    events = list[list[Any]]()
    run.turn(Submit(cached((1,) * 9, "1", max_tokens=1)))
    run.turn(Submit(requested("2", prompt=5, n=2)), Submit(requested("3")))
    run.turn(Cancel("3"))
    run.drain()
    for turn in run.turns:
        events.append(replica_events(run.config, "a", turn, unstarted))
    keys = block_keys(ROOT, (1,) * 9, 4)
    every = [event for turn in events for event in turn]
    assert BlocksPublished("a", keys) in every
    assert every.count(RequestStarted("1")) == every.count(RequestEnded("1")) == 1
    assert every.count(RequestStarted("2")) == every.count(RequestEnded("2")) == 1
    assert every.index(RequestStarted("2")) < every.index(RequestEnded("2"))
    assert RequestStarted("3") not in every
    assert every.count(RequestEnded("3")) == 1
    assert not any(isinstance(event, BlocksEvicted) for event in every)
    assert unstarted == set()


def test_a_prompt_in_chunks_starts_with_its_first_token() -> None:
    run = Run(config_of(depth=1, max_num_batched_tokens=8))
    run.turn(Submit(cached((1,) * 30, "1", max_tokens=2)))
    run.drain()
    unstarted = {"1"}
    events = [replica_events(run.config, "a", turn, unstarted) for turn in run.turns]
    starts = [RequestStarted("1") in in_turn for in_turn in events]
    assert starts.index(True) == 4, "after four chunks"


def test_blocks_may_be_evicted_in_the_turn_in_which_their_sequence_ends() -> None:
    run = Run(config_of(num_blocks=6, max_num_seqs=1, depth=1))
    first = cached(tuple(range(9)), "1", max_tokens=12)
    run.turn(Submit(first), Submit(cached(tuple(range(30, 50)), "2", max_tokens=1)))
    run.drain()
    changes = [check(run.config, turn) for turn in run.turns]
    ends = [at for at, turn in enumerate(run.turns) if changes[at].evicted]
    assert len(ends) == 1
    assert run.turns[ends[0]].before.running.ids == (("1", 0),)
    assert not run.turns[ends[0]].before.blocks.prefix.idle
    assert changes[ends[0]].evicted[-1] in (first.keys[0], first.keys[1])


def test_keys_of_a_later_group_are_those_of_prompts() -> None:
    groups = (CacheGroup(window=8), CacheGroup())
    run = Run(evolve(config_of(), groups=groups))
    first = cached((1,) * 9, "1", max_tokens=1)
    run.turn(Submit(first))
    run.drain()
    found = [check(run.config, turn).published for turn in run.turns]
    assert [*filter(None, found)] == [first.keys]


def test_a_row_that_decodes_is_no_prefill_even_if_it_is_not_planned() -> None:
    """A paused one has an input left that is not planned."""
    bench = Bench(evolve(CONFIG, max_num_batched_tokens=4))
    bench.give(Submit(ask("a", 6, 9, needs_host_mask=True)))
    while not bench.out.get(("a", 0)):
        bench.turn()
    bench.turn(Pause("a", 0))
    run = bench.state.running
    assert (run.known[0] - run.scheduled[0], bench.state.inflight) == (1, ())
    assert load_report(bench.config, "a", bench.state).prefill == 0
    bench.turn(Submit(ask("bb", 9, 9)))
    assert load_report(bench.config, "a", bench.state).prefill == 9 - 4
