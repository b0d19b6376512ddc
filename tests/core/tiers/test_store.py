"""Which blocks are stored together, and which wait."""

from attrs import evolve

from minfer.blocks.keys import DIGEST, TAIL, group_key, tail_keys
from minfer.blocks.ownership import Blocks
from minfer.engine import step
from minfer.records.config import CacheGroup
from minfer.records.messages import (
    Admitted,
    Event,
    Execute,
    Executed,
    Move,
    Moved,
    Submit,
    Tick,
)
from minfer.records.request import Continuation
from minfer.records.state import EngineState, initial
from tests.core.test_engine import ask
from tests.core.tiers.hosted import HOST, TIGHT, Hosted
from tests.core.tiers.test_external import ALONE, BOTH, External
from tests.core.tiers.test_tiers import LONG, keys_of


def test_as_many_blocks_wait_as_the_pool_has() -> None:
    config = evolve(BOTH, max_num_batched_tokens=32, max_num_seqs=8)
    bench = External(evolve(config, host=evolve(HOST, storing=1)), storing=1)
    bench.late = True
    every = [ask(f"{i}", prompt=(30 + i,) * 4, max_tokens=1) for i in range(18)]
    for some in (every[:8], every[8:12], every[12:]):
        bench.turn(*map(Submit, some))
        while bench.state.requests:
            bench.turn()
        tiers = bench.state.tiers
        assert (len(tiers.host_queue), len(tiers.external_queue)) == (
            7,
            7,
        )  # one is on its way
    last = [key for one in every[-7:] for key in keys_of(one)]
    assert [*tiers.external_queue] == [*tiers.host_queue] == last


def test_pages_that_are_stored_at_once_are_counted() -> None:
    bench = External(
        evolve(BOTH, num_blocks=16, groups=(CacheGroup(pages=2),)), storing=5
    )
    bench.serve(LONG)
    assert [len(one.keys) for one in bench.saves] == [2, 2]


def test_partial_blocks_are_not_stored() -> None:
    groups = (CacheGroup(), CacheGroup(window=9))
    bench = External(evolve(ALONE, num_blocks=16, groups=groups))
    request = ask("a", prompt=(11, 12, 13, 14, 1, 2, 3), max_tokens=1)
    [key] = keys = keys_of(request)
    bench.serve(
        evolve(
            request,
            continuation=Continuation(tail_keys=tail_keys(b"", keys, request.prompt, 4)),
        )
    )
    whole = {key, group_key(key, 1)}
    tails = {*bench.state.blocks.prefix.nodes} - whole
    assert {len(one) for one in tails} == {DIGEST + 1, DIGEST + 2}
    assert {key for one in bench.saves for key in one.keys} == whole


def test_consecutive_blocks_are_one_run() -> None:
    bench = External(evolve(BOTH, max_num_batched_tokens=32))
    bench.late = True
    other = ask("other", prompt=(40,) * 9, max_tokens=1)
    bench.turn(Submit(LONG), Submit(other))
    while bench.state.requests:
        bench.turn()
    runs = [path.keys for one in bench.state.tiers.transfers for path in one.paths]
    assert runs == [keys_of(LONG), keys_of(other)] * 2  # to each tier


def test_no_more_is_stored_than_the_host_has_room_for() -> None:
    bench = Hosted(pages=2)
    bench.serve(LONG)
    assert bench.stores[0].sources == (0, 1)
    host = bench.state.tiers.host
    assert host is not None
    assert {*host.prefix.nodes} == {*keys_of(LONG, 2)}


def test_a_run_without_room_behind_its_parent_holds_nothing() -> None:
    """Host memory has the first two blocks, and another one that can be evicted."""
    bench = Hosted(pages=3)
    bench.serve(evolve(LONG, id="begin", prompt=LONG.prompt[:9], max_tokens=1))
    bench.serve(ask("x", prompt=(40,) * 5, max_tokens=1))
    longer = evolve(LONG, id="longer", prompt=LONG.prompt[:17], max_tokens=1)
    other = ask("y", prompt=(41,) * 5, max_tokens=1)
    bench.turn(Submit(longer), Submit(other))
    bench.settle()
    host = bench.state.tiers.host
    assert host is not None
    assert {*host.prefix.nodes} == {*keys_of(longer, 2), *keys_of(other, 1)}
    assert bench.state.blocks.available == bench.config.num_blocks


def test_a_key_that_begins_as_one_of_a_partial_block_is_of_a_whole_one() -> None:
    prompts = ((*divmod(i, 40), 1, 2, 3) for i in range(1600))
    prompt = next(one for one in prompts if keys_of(ask("a", prompt=one))[0][:1] == TAIL)
    bench = External()
    bench.serve(ask("a", prompt=prompt, max_tokens=1))
    assert len(bench.saves) == 1


def changed_nodes(context: int) -> int:
    """The most nodes of both indexes that a turn of a decode changes, behind a prompt of
    so many tokens.
    """
    room = context // 4 + 20
    config = evolve(
        TIGHT,
        num_blocks=room,
        max_model_len=4 * room,
        max_num_batched_tokens=context,
        host=evolve(HOST, pages=room),
    )
    state, moves, most = initial(config), list[Event](), 0
    request = ask("a", context, max_tokens=40)
    events: tuple[Event, ...] = (Submit(request),)
    for number in range(40):
        before = state
        turn = step(config, state, (Tick(float(number)), *events, *moves))
        state = turn.state
        moves = [Moved(one.number) for one in turn.commands if isinstance(one, Move)]
        plans = [one.plan for one in turn.commands if isinstance(one, Execute)]
        events = tuple([Executed(one.step, ((7,),) * len(one.rows)) for one in plans])
        if number > 5:
            most = max(most, changed(before.blocks, state.blocks), between(before, state))
    assert not state.tiers.host_queue
    assert state.tiers.host is not None
    assert len(state.tiers.host.prefix.nodes) > context // 4 + 5
    return most


def between(before: EngineState, after: EngineState) -> int:
    """The nodes of host memory that a turn changed."""
    first, second = before.tiers.host, after.tiers.host
    assert first is not None
    assert second is not None
    return changed(first, second)


def changed(before: Blocks, after: Blocks) -> int:
    old, new = before.prefix.nodes, after.prefix.nodes
    return sum(new[key] is not old.get(key) for key in new)


def test_a_block_is_stored_at_the_same_cost_behind_any_context() -> None:
    assert [changed_nodes(context) for context in (16, 160, 1600)] == [2, 2, 2]


def test_a_model_of_windows_alone_has_its_blocks_stored_and_loaded() -> None:
    bench = External(evolve(BOTH, num_blocks=16, groups=(CacheGroup(window=9),)))
    bench.serve(LONG)
    host = bench.state.tiers.host
    assert host is not None
    assert {*host.prefix.nodes} == {*bench.oracle.outside} == {*keys_of(LONG)}
    bench.state = evolve(bench.state, blocks=External(bench.config).state.blocks)
    assert bench.serve(evolve(LONG, id="again")) == bench.right(LONG)
    [load] = bench.loads
    assert len(load.targets) == 2  # what the next query reads
    assert bench.reasons_of(Admitted)[-1].hit == 16
