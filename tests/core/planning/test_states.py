"""Which states of recurrent layers are kept."""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys, group_key, is_state
from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import ROOT, PrefixChange, PrefixIndex
from minfer.planning.states import (
    block_before_state,
    bound_chunk,
    droppable,
    is_pressed,
    max_saves,
    most_state_pages,
    next_save,
    state_key,
)
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Submit
from minfer.records.request import KvTransfer, PromptOnly, Request
from minfer.records.sequence import NEVER, RowStates, Sequence
from minfer.records.state import EngineState
from minfer.records.state_keeping import StateKeeping
from tests.core.test_engine import CONFIG, Bench, ask

SIZE = 4
STATES = evolve(
    CONFIG,
    num_blocks=100,
    groups=(CacheGroup(), CacheGroup(state=True, pages=2)),
    states=StateKeeping(stride_blocks=2, max_share=0.5),
)


def positions(
    config: EngineConfig = STATES,
    *,
    shared: int = 0,
    hit: int = 0,
    pressed: bool = False,
    length: int = 42,
    **fields: Any,
) -> list[int]:
    """Where the states of a request are kept: the first six positions."""
    request: Request = evolve(ask("a", length, 100), **fields)
    seq = Sequence(request, 0, ((), 0, 0), 0.0, request.prompt)
    last = length + request.max_tokens - 1
    states, out = RowStates(shared=shared, last=hit * SIZE), [hit * SIZE]
    while len(out) < 7 and out[-1] < NEVER:
        out.append(next_save(config, seq, states, out[-1], last, pressed=pressed))
    return out[1:]


def test_the_end_of_a_prompt_and_then_each_block_are_kept() -> None:
    assert positions() == [40, 44, 48, 52, 56, 60]
    assert positions(length=44)[:2] == [40, 44], "an equal prompt computes one token"
    assert positions(hit=10)[0] == 44, "it started from the end of its prompt"
    longer = evolve(STATES, states=StateKeeping(decode_stride_blocks=3, max_share=1.0))
    assert positions(longer)[:3] == [40, 52, 64]
    none = evolve(STATES, states=StateKeeping(decode_stride_blocks=0, max_share=1.0))
    assert positions(none) == [40, NEVER]


def test_the_end_of_every_prompt_is_kept_unless_only_samples_start_there() -> None:
    none = StateKeeping(decode_stride_blocks=0, every_prompt=False, max_share=1.0)
    config = evolve(STATES, states=none)
    assert positions(config) == [NEVER]
    assert positions(config, n=2) == [40, NEVER]
    assert positions(config, n=2, pressed=True) == [40, NEVER]
    assert positions(config, max_tokens=2) == [NEVER]


def test_where_a_prompt_leaves_others_is_kept_and_a_little_before() -> None:
    assert positions(length=402, shared=64)[:4] == [224, 240, 256, 400]
    assert positions(length=402, shared=64, hit=62)[:2] == [256, 400]
    assert positions(length=402, shared=64, hit=64)[0] == 400
    assert positions(length=14, shared=2)[:3] == [4, 8, 12]
    assert positions(length=402, shared=100)[0:3] == [352, 376, 400]


def test_nothing_is_kept_behind_the_last_input() -> None:
    assert positions(max_tokens=6) == [40, 44, NEVER]
    assert positions(max_tokens=3) == [40, 44, NEVER]
    assert positions(max_tokens=2) == [40, NEVER]


def test_under_pressure_only_branches_and_checkpoints_are_kept() -> None:
    assert positions(pressed=True)[:2] == [44, 48]
    assert positions(pressed=True, length=402, shared=64)[:2] == [256, 404]
    assert positions(pressed=True, max_tokens=2) == [40, NEVER], "it has no checkpoint"
    assert positions(pressed=True, n=2)[0] == 40, "samples start there"
    push = KvTransfer(push_to="other")
    assert positions(pressed=True, kv_transfer=push)[0] == 40, "an engine starts there"
    sent = KvTransfer(num_stored_blocks=3)
    assert positions(pressed=True, kv_transfer=sent)[0] == 44


def test_what_has_no_output_is_kept_where_it_branches() -> None:
    fields: dict[str, Any] = {"max_tokens": 0, "prompt_only": PromptOnly()}
    assert positions(**fields) == [NEVER]
    assert positions(shared=5, **fields) == [12, 16, 20, NEVER]
    fields["prompt_only"] = PromptOnly(pooling="mean")
    assert positions(shared=5, **fields) == [NEVER], "its blocks are not published"


def test_a_share_that_holds_no_state_keeps_none() -> None:
    for share, first in ((0.02, 40), (0.019, NEVER), (0.0, NEVER)):
        config = evolve(STATES, states=StateKeeping(max_share=share))
        assert positions(config)[0] == first
        assert most_state_pages(config) == int(share * 100)


def test_pressure_is_a_pool_without_room_for_a_state() -> None:
    assert [is_pressed(STATES, Pool(n)) for n in (1, 2, 3)] == [True, False, False]


# --- chunks -----------------------------------------------------------------------------


def chunk(inputs: int, **changes: Any) -> tuple[int, int]:
    """What a newcomer with 42 tokens takes of `inputs`, and where it is saved."""
    bench = Bench(evolve(STATES, max_num_batched_tokens=4))
    bench.give(Submit(ask("a", 42, 9)))
    config = evolve(STATES, **changes)
    return bounded(config, bench.state, inputs)


def bounded(
    config: EngineConfig, state: EngineState, inputs: int, save_at: int = 40
) -> tuple[int, int]:
    """What the first row takes, if it is at its beginning, and to be saved at
    `save_at`; and where it is saved then.
    """
    (chain,) = state.running.chains
    chain = evolve(chain, states=evolve(chain.states, save_at=save_at))
    run = evolve(state.running, scheduled=(0,), chains=(chain,))
    share, run = bound_chunk(config, state, run, 0, inputs)
    return share, run.chains[0].states.save_at


def test_a_chunk_ends_where_a_state_is_saved() -> None:
    assert chunk(42) == (40, 40)
    assert chunk(40) == (40, 40)


def test_a_long_chunk_goes_on_after_one_position() -> None:
    """That of the end of the prompt; a branch before it is a second one."""
    inside = StateKeeping(max_share=1.0, inside_from=10)
    assert chunk(42, states=inside) == (42, 40)
    assert chunk(41, states=inside) == (41, 40)
    assert chunk(40, states=inside) == (40, 40)
    assert chunk(42, states=evolve(inside, inside_from=43)) == (40, 40), "it is short"
    bench = Bench(evolve(STATES, max_num_batched_tokens=4, states=inside))
    bench.give(Submit(ask("a", 42, 9)))
    assert bounded(bench.config, bench.state, 42, save_at=20) == (20, 20)
    assert bounded(bench.config, bench.state, 40, save_at=20) == (20, 20)
    assert bounded(bench.config, bench.state, 39, save_at=20) == (39, 20)


def test_a_chunk_that_ends_earlier_saves_there_at_the_last_block_boundary() -> None:
    assert chunk(27) == (24, 24)
    assert chunk(8) == (8, 8)
    assert chunk(7) == (7, 40), "less than a stride from the last"
    assert chunk(3) == (3, 40)
    none = StateKeeping(stride_blocks=0, max_share=1.0)
    assert chunk(27, states=none) == (27, 40)
    full = StateKeeping(stride_blocks=2, max_share=0.01)
    assert chunk(27, states=full) == (27, 40), "states have their share"


def test_the_last_chunk_of_a_prompt_is_not_cut_for_a_stride() -> None:
    bench = Bench(evolve(STATES, max_num_batched_tokens=4))
    bench.give(Submit(ask("a", 42, 9)))
    assert bounded(STATES, bench.state, 42, save_at=44) == (42, 44)
    assert bounded(STATES, bench.state, 41, save_at=44) == (40, 40)


def test_a_stride_evicts_nothing() -> None:
    bench = Bench(evolve(STATES, max_num_batched_tokens=4))
    bench.give(Submit(ask("a", 42, 9)))
    blocks, most = bench.state.blocks, most_state_pages(STATES)
    for free, kept, expected in (
        (3, 0, (24, 24)),
        (2, 0, (27, 40)),
        (3, most - STATES.state_pages, (24, 24)),
        (3, most, (27, 40)),  # states have their share
    ):
        pool = evolve(blocks.pool, free=free)
        prefix = evolve(blocks.prefix, state_pages=kept)
        state = evolve(bench.state, blocks=evolve(blocks, pool=pool, prefix=prefix))
        assert bounded(STATES, state, 27) == expected


# --- keys, and what may be dropped ------------------------------------------------------

KEYS = block_keys(b"", tuple(range(12)), SIZE)


def test_a_state_has_the_content_of_its_block_in_the_group_of_states() -> None:
    windows = evolve(STATES, groups=(CacheGroup(6), CacheGroup(), CacheGroup(state=True)))
    only = evolve(STATES, groups=(CacheGroup(6), CacheGroup(state=True)))
    assert state_key(STATES, KEYS[0]) == group_key(KEYS[0], 1)
    assert block_before_state(STATES, KEYS[0]) == KEYS[0]
    assert state_key(windows, KEYS[0]) == group_key(KEYS[0], 2)
    assert block_before_state(windows, KEYS[0]) == group_key(KEYS[0], 1)
    assert block_before_state(only, KEYS[0]) == ROOT
    assert [is_state(group_key(KEYS[0], g), 1) for g in (0, 1, 2)] == [False, True, False]
    assert not is_state(group_key(KEYS[0], 0), 0)


@pytest.mark.parametrize(
    ("others", "held", "dropped"), [(0, False, 1), (1, False, 0), (0, True, 0)]
)
def test_a_row_drops_its_own_states_that_are_of_no_use_to_others(
    others: int, *, held: bool, dropped: int
) -> None:
    change = PrefixChange(PrefixIndex(state_group=1))
    change.publish(ROOT, KEYS[:2], [(0,), (1,)])
    for number in range(others):
        change.hold(KEYS[0])
        other = block_keys(KEYS[0], (9,) * SIZE * (number + 1), SIZE)
        change.publish(KEYS[0], other[:1], [(9 + number,)])
    key = group_key(KEYS[0], 1)
    assert change.publish_state(KEYS[0], key, (2, 3))
    if held:
        change.hold(key)
    states = RowStates(kept=(group_key(KEYS[2], 1), key))
    assert droppable(change, states) == (key if dropped else ROOT)


def test_of_several_states_the_first_is_dropped() -> None:
    change = Transaction(Blocks(Pool(9), PrefixIndex(state_group=1))).prefix
    change.publish(ROOT, KEYS[:2], [(0,), (1,)])
    keys = [group_key(key, 1) for key in KEYS[:2]]
    for key, block in zip(keys, KEYS, strict=False):
        assert change.publish_state(block, key, (5, 6))
    assert droppable(change, RowStates(kept=tuple(keys))) == keys[0]
    assert droppable(change, RowStates(kept=tuple(keys[::-1]))) == keys[1]


@pytest.mark.parametrize(
    ("pages", "saves"), [(1, 1), (2, 1), (3, 1), (5, 2), (1024, 512)]
)
def test_a_step_saves_as_many_states_as_its_pages_allow(pages: int, saves: int) -> None:
    config = evolve(STATES, states=StateKeeping(max_saved_pages=pages))
    assert max_saves(config) == saves
