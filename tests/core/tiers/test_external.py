"""Blocks that are stored outside the engine by content key, and fetched from there."""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import group_key
from minfer.records.config import CacheGroup
from minfer.records.messages import (
    Admitted,
    FetchBlocks,
    Loading,
    LostBlocks,
    Move,
    Recomputing,
    StoreBlocks,
    Submit,
)
from minfer.records.request import KvTransfer
from minfer.records.tiers import (
    BY_COST,
    LOAD,
    RECOMPUTE,
    ExternalStore,
    HostTier,
    RecentKeys,
    TransferKind,
)
from minfer.values.checks import ConfigError, ParameterError
from tests.core.test_engine import CONFIG, ask
from tests.core.tiers.hosted import HOST, Hosted
from tests.core.tiers.test_tiers import AGAIN, LONG, keys_of

FETCH = TransferKind.FETCH_FROM_EXTERNAL
EXTERNAL = ExternalStore(max_known_keys=1000, choice=LOAD)
ALONE = evolve(CONFIG, num_blocks=8, external_store=EXTERNAL)
BOTH = evolve(ALONE, host=HOST)


class External(Hosted):
    """As `Hosted`, for the external store."""

    def __init__(self, config: Any = ALONE, **tier: Any) -> None:
        super().__init__(
            evolve(config, external_store=evolve(config.external_store, **tier))
        )

    def settle(self) -> None:
        for _ in range(100):
            super().settle()
            if not self.state.tiers.external_queue:
                return
            self.turn()
        raise AssertionError(f"never settled: {self.state.tiers}")

    @property
    def saves(self) -> list[StoreBlocks]:
        return [one for one in self.moves if isinstance(one, StoreBlocks)]

    @property
    def fetches(self) -> list[FetchBlocks]:
        return [one for one in self.moves if isinstance(one, FetchBlocks)]


def another(bench: External, config: Any = ALONE) -> External:
    """An engine that begins with what `bench` has stored."""
    other = External(config)
    other.oracle.outside.update(bench.oracle.outside)
    return other


def test_what_the_device_evicts_is_fetched() -> None:
    bench = External()
    bench.serve(LONG)
    assert [key for one in bench.saves for key in one.keys] == [*keys_of(LONG)]
    bench.push_out()
    before = bench.computed
    assert bench.serve(AGAIN) == bench.right(LONG)
    [fetch], [reason] = bench.fetches, bench.reasons_of(Loading)
    assert fetch.keys == keys_of(LONG)
    assert (reason.blocks, reason.hit, reason.kind) == (4, 0, FETCH)
    assert bench.computed - before == 2  # of 18
    assert bench.state.blocks.available == ALONE.num_blocks


def test_another_engine_fetches_what_a_request_says_is_there() -> None:
    first = External()
    first.serve(LONG)
    second = another(first)
    assert second.serve(
        evolve(AGAIN, kv_transfer=KvTransfer(num_stored_blocks=3))
    ) == second.right(LONG)
    [fetch] = second.fetches
    assert fetch.keys == keys_of(LONG, 3)
    assert second.computed == 18 - 12
    # The fourth is stored; the others are known to be there.
    assert [one.keys for one in second.saves] == [keys_of(LONG)[3:]]


def test_what_is_not_there_is_computed_and_not_believed_any_more() -> None:
    bench = External()
    assert bench.serve(
        evolve(LONG, kv_transfer=KvTransfer(num_stored_blocks=4))
    ) == bench.right(LONG)
    assert len(bench.fetches) == 1
    [lost] = bench.reasons_of(LostBlocks)
    assert (lost.blocks, lost.error) == (4, "4 blocks are missing")
    assert [key for one in bench.saves for key in one.keys] == [*keys_of(LONG)]


@pytest.mark.parametrize("external", [True, False])
def test_a_store_that_fails_is_not_repeated(external: bool) -> None:
    config = evolve(
        BOTH, external_store=evolve(EXTERNAL, storing=1), host=evolve(HOST, storing=1)
    )
    bench = External(config)
    bench.late = True
    bench.turn(Submit(LONG))
    while bench.state.requests:
        bench.turn()
    waits = "external_queue" if external else "host_queue"
    assert getattr(bench.state.tiers, waits)
    at = next(
        at
        for at, one in enumerate(bench.oracle.moves)
        if isinstance(one, StoreBlocks) == external
    )
    before = len(bench.moves)
    bench.give(bench.oracle.finish_move(at, "full"))
    assert not getattr(bench.state.tiers, waits)
    assert len(bench.moves) == before
    bench.late = False
    bench.push_out()
    bench.serve(evolve(LONG, id="again"))  # published anew, and stored
    host = bench.state.tiers.host
    assert host is not None
    there = bench.oracle.outside if external else host.prefix.nodes
    assert all(key in there for key in keys_of(LONG))


def test_a_block_whose_parent_is_nowhere_is_not_stored() -> None:
    bench = External()
    bench.late = True
    bench.turn(Submit(LONG))
    while bench.state.requests:
        bench.turn()
    bench.give(*bench.ends("the disk is full"))
    bench.late = False
    bench.push_out()
    known = bench.state.tiers.external_keys
    assert not any(key in known for key in keys_of(LONG))
    child = evolve(AGAIN, prompt=(*LONG.prompt, 1, 2, 3))
    bench.serve(child)  # computed anew, and stored with its parents
    saved = [key for one in bench.saves for key in one.keys]
    assert saved[-5:] == [*keys_of(child, 5)]


def test_both_tiers_store() -> None:
    bench = External(BOTH)
    bench.serve(LONG)
    kinds = [type(one) for one in bench.moves]
    assert kinds[:2] == [Move, StoreBlocks]
    host = bench.state.tiers.host
    assert host is not None
    assert {*keys_of(LONG)} <= {*host.prefix.nodes}
    assert {*keys_of(LONG)} <= {*bench.oracle.outside}


@pytest.mark.parametrize(
    ("host", "external", "chosen"),
    [
        # (choice, seconds a page): a token is computed in 1 s, a block in 4
        ((BY_COST, 1.0), (BY_COST, 2.0), "host"),
        ((BY_COST, 2.0), (BY_COST, 1.0), "external"),
        ((BY_COST, 1.0), (BY_COST, 1.0), "host"),
        ((BY_COST, 5.0), (BY_COST, 3.0), "external"),
        ((BY_COST, 5.0), (BY_COST, 5.0), ""),
        ((BY_COST, 1.0), (LOAD, 9.0), "external"),
        ((LOAD, 9.0), (RECOMPUTE, 1.0), "host"),
        ((RECOMPUTE, 1.0), (RECOMPUTE, 1.0), ""),
    ],
)
def test_the_faster_tier_is_chosen(
    host: tuple[str, float], external: tuple[str, float], chosen: str
) -> None:
    tiers: list[dict[str, Any]] = [
        {"choice": choice, "page_seconds": page, "token_seconds": 1.0}
        for choice, page in (host, external)
    ]
    config = evolve(BOTH, host=HostTier(pages=64, **tiers[0]))
    bench = External(config, **tiers[1])
    bench.serve(LONG)
    bench.push_out()
    assert bench.serve(AGAIN) == bench.right(LONG)
    assert len(bench.loads) == (chosen == "host")
    assert len(bench.fetches) == (chosen == "external")
    [reason] = bench.reasons_of(Loading if chosen else Recomputing)
    assert (reason.kind is FETCH) == (chosen == "external")
    assert reason.recompute == 16


def test_a_request_that_pushes_has_all_its_blocks_stored_again() -> None:
    bench = External()
    bench.serve(LONG)
    bench.serve(
        evolve(
            LONG,
            id="other",
            prompt=(*LONG.prompt, 1, 2),
            kv_transfer=KvTransfer(push_to="x"),
        )
    )
    [first, second] = bench.saves[:1], bench.saves[1:]
    assert first[0].keys == keys_of(LONG)
    pushed = [key for one in second for key in one.keys]
    assert pushed[:4] == [*keys_of(LONG)]
    assert len(pushed) == 5


def test_pushed_blocks_are_stored_while_the_prompt_is_computed() -> None:
    config = evolve(ALONE, max_num_batched_tokens=4, max_num_seqs=4, depth=1)
    bench = External(config)
    bench.turn(Submit(evolve(LONG, kv_transfer=KvTransfer(push_to="x"))))
    while not bench.out.get(("long", 0)):
        bench.turn()
    assert len(bench.saves) == 4


def test_a_tier_that_sends_stores_only_what_is_for_another_engine() -> None:
    bench = External(push_only=True)
    bench.serve(ask("own", prompt=(40,) * 9, max_tokens=1))
    assert not bench.saves
    bench.serve(LONG)
    bench.serve(
        evolve(AGAIN, kv_transfer=KvTransfer(push_to="x"), prompt=(*LONG.prompt, 1, 2))
    )
    first = [key for one in bench.saves for key in one.keys]
    assert first == [*keys_of(evolve(LONG, prompt=(*LONG.prompt, 1, 2)), 5)]
    bench.push_out()
    assert bench.serve(evolve(LONG, id="more")) == bench.right(LONG)
    assert not bench.fetches  # they are not there any more
    assert len([key for one in bench.saves for key in one.keys]) == 5
    bench.serve(evolve(LONG, id="third", kv_transfer=KvTransfer(push_to="y")))
    assert [key for one in bench.saves for key in one.keys][5:] == [*keys_of(LONG)]
    assert not bench.state.tiers.push_keys


def test_only_what_the_other_engine_lacks_is_sent_and_fetched() -> None:
    first = External(push_only=True)
    first.serve(
        evolve(
            LONG,
            kv_transfer=KvTransfer(push_to="x", first_block=2),
        )
    )
    assert [key for one in first.saves for key in one.keys] == [*keys_of(LONG)[2:]]
    second = another(first)
    second.serve(evolve(LONG, id="begin", prompt=LONG.prompt[:10]))
    assert second.serve(
        evolve(AGAIN, kv_transfer=KvTransfer(num_stored_blocks=4, first_block=2))
    ) == second.right(LONG)
    [fetch] = second.fetches
    assert fetch.keys == keys_of(LONG)[2:]


def test_blocks_behind_a_gap_are_not_fetched() -> None:
    """The device has lost the blocks before those that were sent."""
    bench = External()
    bench.serve(evolve(LONG, id="begin", prompt=LONG.prompt[:6], max_tokens=1))
    keys = keys_of(LONG)
    bench.oracle.outside.clear()
    known = RecentKeys().add(keys[2:], 1000)
    bench.state = evolve(
        bench.state, tiers=evolve(bench.state.tiers, external_keys=known)
    )
    assert bench.serve(AGAIN) == bench.right(LONG)
    assert not bench.fetches


def test_windows_fetch_what_the_next_query_reads() -> None:
    groups = (CacheGroup(), CacheGroup(window=5))
    config = evolve(ALONE, num_blocks=16, groups=groups)
    first = External(config)
    first.serve(LONG)
    second = another(first, config)
    assert second.serve(
        evolve(AGAIN, kv_transfer=KvTransfer(num_stored_blocks=4))
    ) == second.right(LONG)
    [fetch] = second.fetches
    assert fetch.keys == (*keys_of(LONG), group_key(keys_of(LONG)[3], 1))
    assert second.reasons_of(Admitted)[-1].hit == 16


def test_known_keys_are_the_last_ones() -> None:
    known, names = RecentKeys(), [bytes((i,)) for i in range(9)]
    assert not known
    for at, name in enumerate(names):
        known = known.add((name,), 4)
        assert name in known
        assert len(known.young) <= 2
        assert len(known.old) <= 2
        assert sum(one in known for one in names) == min(at + 1, 3 + at % 2)
    assert not known.discard(names)
    assert names[8] not in known.discard(names[8:])
    assert names[7] in known.discard(names[8:])


@pytest.mark.parametrize(
    "wrong", [{"max_known_keys": 1}, {"storing": 0}, {"choice": "never"}]
)
def test_sizes_and_choices_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ExternalStore(**{"max_known_keys": 2, **wrong})
    with pytest.raises(
        ConfigError, match=r"max_known_keys \(15\) must be at least twice"
    ):
        evolve(ALONE, external_store=ExternalStore(max_known_keys=15))
    with pytest.raises(ConfigError, match="external_store must be"):
        evolve(CONFIG, external_store=HOST)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ParameterError, match="stored"):
        evolve(LONG, kv_transfer=KvTransfer(num_stored_blocks=-1))
    with pytest.raises(ParameterError, match="push_to"):
        evolve(LONG, kv_transfer=KvTransfer(push_to=1))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("storing", [1, 2, 512])
@pytest.mark.parametrize("length", [7, 13, 18, 23])
@pytest.mark.parametrize(
    "groups", [(CacheGroup(),), (CacheGroup(), CacheGroup(window=5))]
)
def test_blocks_on_their_way_to_one_engine_are_sent_to_another(
    groups: tuple[CacheGroup, ...], length: int, storing: int
) -> None:
    """What begins after the second request is for both; what had begun goes again."""
    config = evolve(ALONE, num_blocks=32, groups=groups)
    bench = External(config, push_only=True, storing=storing)
    bench.late = True
    bench.turn(Submit(evolve(LONG, kv_transfer=KvTransfer(push_to="x"))))
    while not bench.saves:
        bench.turn()
    before = len(bench.saves)
    prompt = (*LONG.prompt, 1, 2, 3, 4, 5)[:length]
    second = evolve(LONG, id="second", prompt=prompt, kv_transfer=KvTransfer(push_to="y"))
    bench.turn(Submit(second))
    bench.late = False
    bench.settle()
    saved = {key for one in bench.saves[before:] for key in one.keys}
    sent = [key for one in bench.saves for key in one.keys]
    assert {*keys_of(second, length // 4)} <= saved
    assert max(map(sent.count, sent)) <= 2
    assert not bench.state.tiers.push_keys


def test_blocks_that_were_lost_on_their_way_are_not_sent_to_another() -> None:
    bench = External(push_only=True)
    bench.late = True
    bench.turn(Submit(evolve(LONG, kv_transfer=KvTransfer(push_to="x"))))
    while not bench.saves:
        bench.turn()
    bench.turn(Submit(evolve(LONG, id="second", kv_transfer=KvTransfer(push_to="y"))))
    before = len(bench.saves)
    bench.give(*bench.ends("unreachable"))
    assert not bench.state.tiers.external_queue
    assert len(bench.saves) == before


def test_only_blocks_from_the_first_that_was_sent_are_believed_to_be_there() -> None:
    for first, stored in ((0, 3), (2, 4), (3, 3), (4, 2)):
        bench = External()
        bench.give(
            Submit(
                evolve(
                    LONG,
                    kv_transfer=KvTransfer(num_stored_blocks=stored, first_block=first),
                )
            )
        )
        known = bench.state.tiers.external_keys
        assert [at for at, key in enumerate(keys_of(LONG)) if key in known] == [
            *range(first, stored)
        ]
