"""Which blocks of a waiting sequence are loaded, and from where."""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import group_key
from minfer.records.config import CacheGroup
from minfer.records.messages import Admitted, Loading, Preempted, Recomputing, Submit
from minfer.records.request import KvTransfer
from minfer.records.tiers import BY_COST, RECOMPUTE, HostTier, RecentKeys, TransferKind
from tests.core.test_engine import ask
from tests.core.tiers.hosted import HOST, TIGHT, Hosted
from tests.core.tiers.test_external import ALONE, BOTH, EXTERNAL, FETCH, External, another
from tests.core.tiers.test_tiers import AGAIN, LONG, keys_of


def test_a_tier_is_asked_for_what_follows_the_blocks_of_the_device() -> None:
    """It does not have those, and the device has no others."""
    bench = External()
    bench.serve(LONG)
    bench.serve(ask("other", prompt=(40,) * 23, max_tokens=1))
    assert {*keys_of(LONG)} & {*bench.state.blocks.prefix.nodes} == {*keys_of(LONG, 2)}
    known = RecentKeys().add(keys_of(LONG)[2:], 100)
    bench.state = evolve(
        bench.state, tiers=evolve(bench.state.tiers, external_keys=known)
    )
    assert bench.serve(AGAIN) == bench.right(LONG)
    [fetch] = bench.fetches
    assert fetch.keys == keys_of(LONG)[2:]


@pytest.mark.parametrize(
    ("have", "page", "external"),
    [
        (0, 2.4, True),
        (0, 2.5, True),
        (0, 2.6, False),
        (1, 2.9, True),
        (1, 3.0, True),
        (1, 3.1, False),
    ],
)
def test_what_a_tier_lacks_is_computed_at_the_same_cost(
    have: int, page: float, external: bool
) -> None:
    """A block is computed in 4 s. Host memory has 2 of 4, at 1 s each: 10 s in all, or 9
    if the device has the first one. Of equal ones, the tier with more is taken.
    """
    bench = two_of_four(have, {"choice": BY_COST, "token_seconds": 1.0}, page)
    bench.serve(AGAIN)
    assert (bench.reasons_of(Loading)[-1].kind is FETCH) == external


def test_the_tier_with_most_is_told_of() -> None:
    bench = two_of_four(0, {"choice": RECOMPUTE}, 1.0)
    bench.serve(AGAIN)
    [reason] = bench.reasons_of(Recomputing)
    assert (reason.blocks, reason.kind) == (4, FETCH)


def two_of_four(have: int, costs: dict[str, Any], page: float) -> External:
    """Host memory has 2 blocks of 4, the external store all, and the device `have`."""
    config = evolve(BOTH, host=HostTier(pages=2, page_seconds=1.0, **costs))
    bench = External(config, page_seconds=page, **costs)
    bench.serve(LONG)
    bench.state = evolve(bench.state, blocks=External(config).state.blocks)
    if have:
        bench.serve(evolve(LONG, id="begin", prompt=LONG.prompt[: 4 * have + 1]))
    return bench


def test_the_window_of_a_group_is_fetched_where_another_group_has_all() -> None:
    config = evolve(ALONE, num_blocks=16, groups=(CacheGroup(), CacheGroup(window=5)))
    bench = External(config)
    bench.serve(LONG)
    bench.serve(ask("other", prompt=(40,) * 20, max_tokens=1))
    keys, begin = keys_of(LONG), evolve(AGAIN, prompt=LONG.prompt[:9])
    lacks = group_key(keys[1], 1)
    assert {lacks, *keys} - {*bench.state.blocks.prefix.nodes} == {lacks}
    assert bench.serve(begin) == bench.right(begin)
    [fetch] = bench.fetches
    assert fetch.keys == (lacks,)


def test_a_load_does_not_wait_for_other_transfers() -> None:
    bench = External()
    bench.serve(LONG)
    bench.push_out()
    bench.late = True
    bench.turn(Submit(ask("new", prompt=(45,) * 9, max_tokens=1)))
    while bench.state.requests:
        bench.turn()
    assert bench.state.tiers.transfers_of(TransferKind.STORE_TO_EXTERNAL)
    bench.turn(Submit(AGAIN))
    assert [one.keys for one in bench.fetches] == [keys_of(LONG)]


def test_a_resumed_request_pushes_the_blocks_of_its_prompt() -> None:
    bench = External(push_only=True)
    output = bench.right(evolve(LONG, max_tokens=8))[:7]
    bench.serve(
        evolve(LONG, output=output, max_tokens=8, kv_transfer=KvTransfer(push_to="x"))
    )
    assert [key for one in bench.saves for key in one.keys] == [*keys_of(LONG)]


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("window", [5, 8, 9])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("first", "other"), [(13, 17), (13, 15), (17, 17), (9, 19)])
def test_a_load_evicts_nothing_that_its_own_hit_needs(
    first: int, other: int, order: int, window: int, external: bool
) -> None:
    """The device has a part of the window, as of what was used last before the others."""
    groups = (CacheGroup(), CacheGroup(window=window))[::order]
    config = evolve(BOTH if external else TIGHT, num_blocks=12, groups=groups)
    bench = (External if external else Hosted)(
        evolve(config, host=None if external else HOST)
    )
    begin = ask("a", prompt=tuple(range(first)), max_tokens=1)
    bench.serve(begin)
    bench.serve(ask("b", prompt=tuple(range(20, 20 + other)), max_tokens=1))
    assert bench.serve(evolve(begin, id="again")) == bench.right(begin)
    loads, hit = bench.reasons_of(Loading), bench.reasons_of(Admitted)[-1].hit
    assert hit == 4 * loads[-1].blocks if loads else hit == (first - 1) // 4 * 4


@pytest.mark.parametrize("external", [True, False])
def test_where_no_cost_is_known_loading_counts_as_fast(external: bool) -> None:
    bench = External(choice=BY_COST) if external else Hosted(choice=BY_COST)
    bench.serve(LONG)
    bench.push_out()
    bench.serve(AGAIN)
    [reason] = bench.reasons_of(Loading)
    assert (reason.seconds, reason.recompute) == (0, 0)
    assert (reason.kind is FETCH) == external


def test_a_load_waits_for_others_from_its_tier_alone() -> None:
    """A page takes a second. Before the two loads from host memory begin, blocks of
    others are on their way: to it, and from the external store.
    """
    first = External()
    first.serve(LONG)
    config = evolve(BOTH, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64)
    tiers = evolve(EXTERNAL, page_seconds=1.0), evolve(HOST, page_seconds=1.0)
    bench = another(first, evolve(config, external_store=tiers[0], host=tiers[1]))
    inside = [ask(f"in {i}", prompt=(40 + i,) * 9, max_tokens=1) for i in range(2)]
    for one in inside:
        bench.serve(one)
    known = evolve(bench.state.tiers, external_keys=RecentKeys())
    bench.state = evolve(bench.state, blocks=External(config).state.blocks, tiers=known)
    bench.late = True
    bench.turn(Submit(ask("new", prompt=(45,) * 9, max_tokens=1)))
    while bench.state.requests:
        bench.turn()
    assert bench.state.tiers.transfers_of(TransferKind.STORE_TO_HOST)
    bench.turn(Submit(evolve(AGAIN, kv_transfer=KvTransfer(num_stored_blocks=4))))
    for one in inside:
        bench.turn(Submit(evolve(one, id=f"again {one.id}")))
    told = [(one.kind is FETCH, one.seconds) for one in bench.reasons_of(Loading)]
    assert told == [(True, 4.0), (False, 2.0), (False, 4.0)]


def test_a_preempted_sequence_chooses_again_where_its_blocks_come_from() -> None:
    """They were loaded when it came, too."""
    bench = External(evolve(ALONE, num_blocks=9, max_model_len=40))
    both = [ask("a", 8, max_tokens=20), ask("bb", 8, max_tokens=20)]
    bench.serve(evolve(both[1], id="first", max_tokens=1))
    bench.push_out()
    bench.turn(*map(Submit, both))
    bench.settle()
    assert [one.id for one in bench.reasons_of(Preempted)] == ["bb"]
    assert [one.id for one in bench.reasons_of(Loading)] == ["bb", "bb"]
    for one in both:
        assert bench.out[one.id, 0] == bench.right(one)
