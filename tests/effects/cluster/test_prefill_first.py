"""Prompts that are computed by one engine, and decoded by another."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.effects.cluster.link import link_messages as wire
from minfer.records.messages import Finished
from minfer.records.request import Request, SamplingParams
from tests.circles import seeds
from tests.effects.cluster import world as worlds
from tests.effects.cluster.test_placement import made_ready, settle, where
from tests.effects.cluster.world import CONFIG, Frontend, World

PROMPT = tuple(range(14))  # three full blocks
WHOLE = Request(
    id="a",
    prompt=PROMPT,
    max_tokens=12,
    keys=block_keys(b"", PROMPT, CONFIG.block_size),
)


def started(prefillers: int = 1, replicas: int = 2, elsewhere: int = 0) -> World:
    return made_ready(
        World(
            0,
            api_servers=1,
            replicas=replicas,
            prefillers=prefillers,
            elsewhere=elsewhere,
        )
    )


def handed(api_server: Frontend) -> int:
    prefill = api_server.remote._placement.prefill
    assert prefill is not None
    return prefill.handed_over


def over(api_server: Frontend, name: str = "a") -> Callable[[], bool]:
    return lambda: (name, 0) in api_server.ended


def test_a_prompt_is_computed_by_one_engine_and_decoded_by_another() -> None:
    world = started()
    [api_server] = world.api_servers
    for one in api_server.remote.replicas:
        one.machine = f"m{one.number}"
    world.ask(api_server, WHOLE)
    assert where(api_server, "a") == 0
    settle(world, lambda: where(api_server, "a") == 1)
    sendings = api_server.remote.live["a"].sendings
    placements = [
        (sending.placed.replica, sending.machine, sending.placed.why)
        for sending in sendings
    ]
    assert placements == [("0", "m0", "cost"), ("1", "m1", "handed over")]
    assert [one.role for one in api_server.remote.snapshot().replicas] == [
        "prefill",
        "decode",
    ]
    assert len(api_server.got["a", 0]) == 1
    settle(world, over(api_server))
    world.judge()
    assert handed(api_server) == 1
    assert world.fetched == 3
    assert api_server.ended["a", 0].cached == 0  # none was known before
    for prefills in (True, False):
        router = api_server.remote._placement.router_of(
            api_server.remote.replicas[not prefills]
        )
        assert router is not None
        assert not router.state.requests


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 1},  # nothing is left to decode
        {"prompt": PROMPT[:4], "keys": ()},  # computed as soon as it would be sent
        {"n": 2},
        {"sampling": SamplingParams(prompt_logprobs=0)},
    ],
)
def test_others_are_served_by_one(changes: dict[str, Any]) -> None:
    world = started()
    [api_server] = world.api_servers
    world.ask(api_server, evolve(WHOLE, **changes))
    assert where(api_server, "a") == 1
    settle(world, lambda: not api_server.remote.working)
    world.judge()
    assert not handed(api_server)


def test_what_the_decoding_engine_knows_is_not_computed_elsewhere() -> None:
    world = started()
    [api_server] = world.api_servers
    world.ask(api_server, WHOLE)
    settle(world, over(api_server))
    settle(
        world, lambda: not any(one.up or one.down for one in api_server.links.values())
    )
    for _ in range(400):
        world.move(hostile=False)  # the engine reports its keys
    world.ask(api_server, evolve(WHOLE, id="again"))
    assert where(api_server, "again") == 1
    settle(world, over(api_server, "again"))
    assert handed(api_server) == 1


def test_a_full_line_rejects_no_request_that_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caller has the first token."""
    small_config = evolve(
        CONFIG, max_waiting=1, max_num_seqs=1, max_num_batched_tokens=64
    )
    monkeypatch.setattr(worlds, "CONFIG", small_config)
    world = started(prefillers=3, replicas=4)
    [api_server] = world.api_servers
    for name in "abcd":
        tokens = tuple(range(ord(name) - 97, 14 + ord(name) - 97))
        keys = block_keys(b"", tokens, CONFIG.block_size)
        world.ask(
            api_server, evolve(WHOLE, id=name, prompt=tokens, keys=keys, max_tokens=30)
        )
    settle(world, lambda: not api_server.remote.working)
    assert handed(api_server) > 2
    assert {end.reason for end in api_server.ended.values()} == {"length"}


def test_only_blocks_that_the_decoding_engine_lacks_are_sent() -> None:
    """The next turn of a conversation."""
    world = started()
    [api_server] = world.api_servers
    world.ask(api_server, WHOLE)
    settle(world, over(api_server))
    for _ in range(600):
        world.move(hostile=False)  # the engine reports its keys
    world.sent.clear()
    fetched = world.fetched
    tokens = (*PROMPT, *api_server.got["a", 0][:-1])  # 25 tokens, six full blocks
    prompt = (*tokens, *range(20, 31))
    keys = block_keys(b"", prompt, CONFIG.block_size)
    world.ask(api_server, evolve(WHOLE, id="next", prompt=prompt, keys=keys))
    assert where(api_server, "next") == 0
    settle(world, over(api_server, "next"))
    world.judge()
    assert {*world.sent} == {*keys[6:]}
    assert world.fetched - fetched == len(keys) - 6


def test_a_token_that_ends_it_is_its_end() -> None:
    world = started()
    [api_server] = world.api_servers
    first = started()
    first.ask(first.api_servers[0], WHOLE)
    settle(first, over(first.api_servers[0]))
    [token, *_] = first.api_servers[0].got["a", 0]
    world.ask(api_server, evolve(WHOLE, stop_ids=frozenset([token])))
    settle(world, over(api_server))
    assert api_server.ended["a", 0].reason == "stop"
    assert not handed(api_server)


def test_blocks_that_are_lost_are_computed() -> None:
    world = started()
    [api_server] = world.api_servers
    world.ask(api_server, WHOLE)
    settle(world, lambda: where(api_server, "a") == 1)
    world.sent.clear()
    settle(world, over(api_server))
    world.judge()


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_dies_before_and_after(number: int) -> None:
    for moment in (0, 1):
        world = started()
        [api_server] = world.api_servers
        world.ask(api_server, WHOLE)
        if moment:
            settle(world, lambda: where(api_server, "a") == 1)  # noqa: B023 - at once
        world.kill(number)
        settle(world, over(api_server))
        world.judge()


def test_without_an_engine_that_decodes_the_other_one_does_it_all() -> None:
    world = started()
    [api_server] = world.api_servers
    world.replicas[1].host = world.replicas[1].engine = None
    world._cut(api_server, world.replicas[1], reported=False)
    world.ask(api_server, WHOLE)
    assert where(api_server, "a") == 0
    assert api_server.remote._requests.all()[0].handover is None
    settle(world, over(api_server))
    world.judge()


def test_an_engine_elsewhere_is_told_where_to_send() -> None:
    world = started(prefillers=0, elsewhere=1)
    [api_server] = world.api_servers
    replicas = api_server.remote.replicas
    replicas[0].listens = ("0.0.0.0", 7)  # noqa: S104 - whatever it is dialled at
    replicas[1].local_address = "::1"
    sent, send = list[wire.ToEngine](), replicas[1].send
    assert send is not None

    def note(message: wire.ToEngine) -> None:
        sent.append(message)
        send(message)

    replicas[1].send = note
    world.ask(api_server, WHOLE)
    assert where(api_server, "a") == 1
    [record] = api_server.remote._requests.all()
    assert record.handover is not None
    assert record.handover.push_to == "[::1]:7"
    [submitted] = [
        message for message in sent if isinstance(message, wire.SubmitRequests)
    ]
    transfer = submitted.requests[0].kv_transfer
    assert transfer is not None
    assert transfer.push_to == "[::1]:7"
    settle(world, over(api_server))
    world.judge()
    assert handed(api_server) == 1
    assert world.fetched == 3
    replicas[
        1
    ].local_address = ""  # its link is on this machine, and it knows others by name
    assert replicas[1].pushes_to(replicas[0]) == "0"


@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_elsewhere_that_is_gone_for_good_is_not_waited_for(
    *, dies: bool
) -> None:
    world = started(prefillers=0, elsewhere=1)
    [api_server] = world.api_servers
    world.ask(api_server, WHOLE)
    assert where(api_server, "a") == 1
    [record] = api_server.remote._requests.all()
    record.histories[0].deaths = 2  # it may have been the cause
    world.replicas[1].host = world.replicas[1].engine = None
    api_server.links.pop(1)
    api_server.remote.disconnect(1, cut=not dies)
    assert where(api_server, "a") == 0
    world.replicas.pop()
    settle(world, over(api_server))
    world.judge()


@pytest.mark.parametrize("ready", [False, True])
def test_what_the_engine_elsewhere_refuses_is_computed_here(*, ready: bool) -> None:
    world = started(prefillers=0, elsewhere=1)
    [api_server] = world.api_servers
    replicas = api_server.remote.replicas
    world.ask(api_server, WHOLE)
    assert where(api_server, "a") == 1
    if not ready:
        replicas[0].probing = "another"
    refused = Finished("a", 0, "rejected", 0, "too long")
    api_server.remote.receive(wire.ApiServerOutputs(0.0, finished=(refused,)), 1)
    replicas[0].probing = ""
    api_server.remote._placement.place_waiting()
    settle(world, over(api_server))
    world.judge()


@pytest.mark.long
@seeds(8, 300)
def test_no_request_loses_anything_whatever_is_lost(seeds: range) -> None:
    handed_over = fetched = 0
    for seed in seeds:
        rng = Random(f"disaggregated {seed}")
        replicas = rng.choice((2, 3, 4))
        prefill = rng.randrange(1, replicas)
        elsewhere = rng.randint(0, prefill)
        world = World(
            seed,
            api_servers=rng.choice((1, 2)),
            replicas=replicas,
            prefillers=prefill - elsewhere,
            elsewhere=elsewhere,
        )
        world.run(600)
        world.judge()
        for api_server in world.api_servers:
            for link in api_server.remote.replicas:
                router = api_server.remote._placement.router_of(link)
                assert router is not None
                assert not router.state.requests, "ended ones are on no replica"
            assert not api_server.remote._requests.unplaced
            handed_over += handed(api_server)
        fetched += world.fetched
    assert handed_over > len(seeds)
    assert fetched > len(seeds)
