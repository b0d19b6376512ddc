"""States of recurrent layers in host memory, and outside the engine."""

import pytest
from attrs import evolve

from minfer.blocks.keys import DIGEST, block_keys, group_key, is_state
from minfer.blocks.ownership import Transaction
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import (
    Admitted,
    FetchBlocks,
    Loading,
    LostBlocks,
    StateMissed,
    StoreBlocks,
)
from minfer.records.request import KvTransfer
from minfer.records.state_keeping import StateKeeping
from minfer.records.tiers import LOAD, ExternalStore, HostTier
from minfer.values.checks import ConfigError
from tests.core.test_engine import CONFIG, ask
from tests.core.tiers.hosted import HOST, Hosted
from tests.core.tiers.test_external import External, another

STATES = evolve(
    CONFIG,
    num_blocks=16,
    groups=(CacheGroup(), CacheGroup(state=True, pages=2)),
    states=StateKeeping(max_share=1.0),
    host=HOST,
)
LONG = ask("long", 18, max_tokens=2)  # four full blocks, and two tokens more
AGAIN = evolve(LONG, id="again")
KEYS = block_keys(LONG.root, LONG.prompt, 4)
STATE = group_key(KEYS[3], 1)
OUTSIDE = evolve(
    STATES, host=None, external_store=ExternalStore(max_known_keys=1000, choice=LOAD)
)


def push_out(bench: Hosted) -> None:
    """Evict all that the device has of the first request."""
    for i in range(4):
        bench.serve(ask(f"other{i}", prompt=(40 + i,) * 40, max_tokens=1))
    assert not {*KEYS, STATE} & {*bench.state.blocks.prefix.nodes}


def test_a_state_is_stored_behind_its_block_and_loaded_with_it() -> None:
    bench = Hosted(STATES)
    assert bench.serve(LONG) == bench.right(LONG)
    host = bench.state.tiers.host
    assert host is not None
    assert {*KEYS[:4], STATE} <= {*host.prefix.nodes}
    push_out(bench)
    assert bench.serve(AGAIN) == bench.right(LONG)
    [load] = [move for move in bench.loads if len(move.sources) == 4 + 2]
    assert len(load.targets) == 6
    assert bench.reasons_of(Loading)[-1].blocks == 4
    assert bench.reasons_of(Admitted)[-1].hit == 16
    assert not bench.reasons_of(StateMissed)


def test_a_state_alone_is_loaded_if_the_device_has_its_blocks() -> None:
    bench = Hosted(STATES)
    bench.serve(LONG)
    change = Transaction(bench.state.blocks)  # the state makes room for another one
    change.pool.release(change.prefix.drop_state(STATE))
    bench.state = evolve(bench.state, blocks=change.done())
    assert bench.serve(AGAIN) == bench.right(LONG)
    assert [len(move.sources) for move in bench.loads] == [2]
    assert bench.reasons_of(Loading)[-1].hit == 0


def test_a_checkpoint_is_stored_when_its_turn_is_over() -> None:
    bench = Hosted(STATES)
    request = ask("chat", 10, max_tokens=16)
    bench.serve(request)
    tokens = request.prompt + bench.out["chat", 0]
    keys = block_keys(request.root, tokens, 4)
    host = bench.state.tiers.host
    assert host is not None
    stored = {key for key in host.prefix.nodes if is_state(key, 1)}
    # The end of the prompt, and of those in decode only the last.
    assert stored == {group_key(keys[1], 1), group_key(keys[5], 1)}


def test_states_go_outside_and_come_back() -> None:
    first = External(OUTSIDE)
    first.serve(LONG)
    stored = [
        key for one in first.moves if isinstance(one, StoreBlocks) for key in one.keys
    ]
    assert STATE in stored
    assert stored.index(STATE) > stored.index(KEYS[3])
    second = another(first, OUTSIDE)
    sent = KvTransfer(num_stored_blocks=4)
    assert second.serve(evolve(AGAIN, kv_transfer=sent)) == second.right(LONG)
    [fetch] = [one for one in second.moves if isinstance(one, FetchBlocks)]
    assert fetch.keys == (*KEYS[:4], STATE)
    assert [len(pages) for pages in fetch.pages] == [1, 1, 1, 1, 2]
    assert second.computed == 2


@pytest.mark.parametrize("length", [16, 18])
def test_another_engine_starts_from_the_state_that_was_pushed_to_it(length: int) -> None:
    """It has the first token, too; and computes the last block itself if the prompt ends
    with it.
    """
    store = ExternalStore(max_known_keys=1000, choice=LOAD, push_only=True)
    config = evolve(OUTSIDE, external_store=store)
    prompt = LONG.prompt[:length]
    first = External(config)
    asked = ask("a", prompt=prompt, max_tokens=1, kv_transfer=KvTransfer(push_to="b"))
    first.serve(asked)
    pushed = [
        key for one in first.moves if isinstance(one, StoreBlocks) for key in one.keys
    ]
    end = (length - 1) // 4
    states = [key for key in pushed if is_state(key, 1)]
    assert states == [group_key(KEYS[end - 1], 1)]
    assert {key for key in pushed if len(key) == DIGEST} == {*KEYS[: length // 4]}
    second = another(first, OUTSIDE)
    goes_on = ask(
        "b",
        prompt=prompt,
        max_tokens=4,
        output=first.out["a", 0],
        kv_transfer=KvTransfer(num_stored_blocks=length // 4),
    )
    second.serve(goes_on)
    whole = evolve(goes_on, output=(), kv_transfer=None)
    assert first.out["a", 0] + second.out["b", 0] == second.right(whole)
    assert second.reasons_of(Admitted)[-1].hit == 4 * end


def test_a_resumed_request_pushes_the_state_at_the_end_of_its_prompt() -> None:
    """Its output is longer than a block, and is not pushed."""
    store = ExternalStore(max_known_keys=1000, choice=LOAD, push_only=True)
    bench = External(evolve(OUTSIDE, external_store=store))
    asked = evolve(LONG, max_tokens=9, kv_transfer=KvTransfer(push_to="b"))
    output = tuple(bench.right(evolve(asked, kv_transfer=None))[:8])
    bench.serve(evolve(asked, output=output))
    pushed = {key for store_blocks in bench.saves for key in store_blocks.keys}
    assert {key for key in pushed if is_state(key, 1)} == {STATE}


@pytest.mark.parametrize("first", [3, 4])
def test_a_state_that_the_receiver_has_is_not_pushed(first: int) -> None:
    store = ExternalStore(max_known_keys=1000, choice=LOAD, push_only=True)
    bench = External(evolve(OUTSIDE, external_store=store))
    sent = KvTransfer(push_to="b", first_block=first)
    bench.serve(evolve(LONG, kv_transfer=sent))
    pushed = {key for store_blocks in bench.saves for key in store_blocks.keys}
    assert pushed == {*KEYS[first:4], *([STATE] if first < 4 else [])}


@pytest.mark.parametrize("kept", [0, 2])
def test_if_a_state_does_not_come_the_last_kept_one_is_used(kept: int) -> None:
    """`kept`: blocks of the prompt that the engine has, with a state behind them."""
    first = External(OUTSIDE)
    first.serve(LONG)
    second = another(first, OUTSIDE)
    second.oracle.outside.pop(STATE)
    if kept:
        second.serve(ask("begin", prompt=LONG.prompt[:9], max_tokens=1))
    sent = KvTransfer(num_stored_blocks=4, first_block=kept)
    computed = second.computed
    assert second.serve(evolve(AGAIN, kv_transfer=sent)) == second.right(LONG)
    assert len(second.reasons_of(LostBlocks)) == 1
    assert second.reasons_of(Admitted)[-1].hit == 4 * kept
    assert second.computed - computed == 18 - 4 * kept


def test_a_tier_moves_a_whole_state_at_once() -> None:
    groups = CacheGroup(), CacheGroup(state=True, pages=4)

    def with_tiers(storing: int) -> EngineConfig:
        host = HostTier(pages=64, storing=storing)
        return evolve(STATES, groups=groups, host=host)

    assert with_tiers(4).host is not None
    with pytest.raises(ConfigError, match=r"host: storing \(3\) must be at least the 4"):
        with_tiers(3)
