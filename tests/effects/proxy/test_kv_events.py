"""Servers that report what they cache, as vLLM does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from minfer.blocks.keys import block_keys
from minfer.effects.proxy.backends import KvSource, read_sources
from minfer.effects.proxy.kv_events import KvEventError, ReportedCache
from minfer.effects.proxy.kv_subscriber import KvSubscriber
from minfer.effects.proxy.token_keys import TokenKeys, tokens_root
from minfer.effects.serving.access.reasoning_cipher import encrypt, reasoning_key
from minfer.effects.setup.folders import bundled_folder
from minfer.routing.messages import BlocksEvicted, BlocksPublished, CacheCleared
from minfer.values.checks import ConfigError
from tests.effects.proxy.fakes import routing
from tests.effects.proxy.publisher import (
    SIZE,
    AllBlocksCleared,
    Publisher,
    batch,
    keys,
    removed,
    stored,
)
from tests.effects.waiting import soon


def published(*firsts: int, last: int = 1) -> BlocksPublished:
    return BlocksPublished("a", keys(*firsts)[-last:])


def test_blocks_that_are_stored_and_removed() -> None:
    cache = ReportedCache("a", SIZE)
    first = batch(stored(0, b"1", 2), stored(50, 3, after=2))
    assert cache.read(first) == [published(0, 4, last=2), published(0, 4, 50)]
    assert {*cache.cached()} == {*keys(0, 4, 50)}
    events = cache.read(batch(removed(3, 99), removed(b"1", medium="CPU")))
    assert events == [BlocksEvicted("a", keys(0, 4, 50)[-1:])]
    assert cache.read(batch(AllBlocksCleared())) == [CacheCleared("a")]
    assert cache.cached() == ()


def test_arrays_as_older_versions_have_them() -> None:
    cache = ReportedCache("a", SIZE)
    events: list[Any] = [
        ["BlockStored", [1], None, [0, 1, 2, 3], SIZE, None, "GPU"],
        ["BlockStored", [2], 1, [4, 5, 6, 7], SIZE, None],
        ["BlockRemoved", [2]],
        ["AllBlocksCleared"],
        ["SomethingNew", 1],
    ]
    read_events = cache.read(msgspec.msgpack.encode([1.0, events]))
    assert read_events == [
        published(0),
        published(0, 4),
        BlocksEvicted("a", keys(0, 4)[-1:]),
        CacheCleared("a"),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "l"},
        {"lora_id": 1},
        {"extra_keys": [["salt"]]},
        {"medium": "CPU"},
        {"kv_cache_spec_sliding_window": 128, "group_idx": 1},
        {"group_idx": 1},
        {"after": b"unknown"},
    ],
)
def test_what_is_not_followed(fields: dict[str, Any]) -> None:
    cache = ReportedCache("a", SIZE)
    assert cache.read(batch(stored(0, 1, group_idx=0))) == [published(0)]
    assert cache.read(batch(stored(20, 2, **fields))) == []
    assert cache.read(batch(removed(1, group_idx=1))) == []
    assert cache.read(batch(stored(20, 4, block_size=2 * SIZE))) == []
    assert cache.cached() == keys(0)


def test_a_block_shows_that_those_before_it_are_there() -> None:
    cache = ReportedCache("a", SIZE)
    cache.read(batch(stored(0, 1, 2), stored(30, 7)))
    assert cache.note_missed() == CacheCleared("a")
    assert cache.read(batch(stored(8, 3, after=2))) == [published(0, 4, 8, last=3)]
    assert {*cache.cached()} == {*keys(0, 4, 8)}
    cache.note_restart()
    assert cache.read(batch(stored(12, 4, after=3))) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"\x93\x01",
        b"\x91" * 10**6 + b"\xc0",  # an array in an array in an array
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.0, 5]),
        msgspec.msgpack.encode([1.0, [{"block_hashes": []}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored"]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [-1] * SIZE, SIZE]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [2**40] * 4, SIZE]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [[]], None, [1] * SIZE, SIZE]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2], None, [1] * 4, SIZE]]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", 5]]]),
        msgspec.msgpack.encode({"ts": 1}),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(KvEventError, match="no batch of KV events"):
        ReportedCache("a", SIZE).read(payload)


@contextlib.asynccontextmanager
async def following(publisher: Publisher, cache: ReportedCache) -> AsyncIterator[Any]:
    """What a router hears of a publisher."""
    heard: list[Any] = []
    source = read_sources([publisher.url], ["a"])["a"]
    subscriber = KvSubscriber(source, cache, lambda *events: heard.extend(events))
    tasks = [
        asyncio.create_task(coroutine)
        for coroutine in (publisher.replay(), subscriber.run())
    ]
    try:
        yield heard
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.close()


async def heard_again(publisher: Publisher, number: int, heard: list[Any]) -> None:
    """Send a batch until it is heard: subscribers are not there at once."""
    before = len(heard)
    async with asyncio.timeout(10):
        while len(heard) == before:
            await publisher.send(number, batch(stored(900, 900)), keeps=False)
            await asyncio.sleep(0.02)


def test_batches_are_followed_from_the_first_on_and_missed_ones_are_sent_again() -> None:
    async def case() -> None:
        publisher = Publisher()
        publisher.kept = [(0, batch(stored(0, 1))), (1, batch(stored(4, 2, after=1)))]
        async with following(publisher, ReportedCache("a", SIZE)) as heard:
            await soon(lambda: len(heard) == 2)
            assert heard == [published(0), published(0, 4)]
            await heard_again(publisher, 2, heard)
            del heard[:]
            publisher.kept.append((3, batch(stored(8, 3, after=2))))  # is missed
            await publisher.send(4, batch(removed(3)))
            await soon(lambda: len(heard) == 2)
            assert heard == [
                published(0, 4, 8),
                BlocksEvicted("a", keys(0, 4, 8)[-1:]),
            ]
            assert publisher.asked == [0, 3]
            await publisher.send(5, b"no batch")
            await soon(lambda: len(heard) == 3)
            assert heard[2] == CacheCleared("a")
            del heard[:]
            publisher.kept += [(6, batch(stored(50, 6))), (7, batch(stored(60, 7)))]
            await publisher.send(8, batch(stored(70, 8)))
            await publisher.send(9, batch(stored(80, 9)))  # comes twice, as it was kept
            await soon(lambda: len(heard) == 4)
            await publisher.send(10, batch(stored(90, 10)))
            await soon(lambda: len(heard) == 5)
            assert heard == [*map(published, (50, 60, 70, 80, 90))]
            publisher.kept = []  # it is started again
            del heard[:]
            await publisher.send(0, batch(stored(40, 1)))
            await soon(lambda: len(heard) == 2)
            assert heard == [CacheCleared("a"), published(40)]

    asyncio.run(case())


def test_without_a_second_address_what_was_missed_is_unknown() -> None:
    async def case() -> None:
        publisher = Publisher(replays=False)
        async with following(publisher, ReportedCache("a", SIZE)) as heard:
            await heard_again(publisher, 7, heard)
            assert heard[0] == CacheCleared("a"), "of what was there before"
            del heard[:]
            await publisher.send(8, batch(stored(0, 1)))
            await publisher.send(10, batch(stored(4, 2, after=1)))
            await soon(lambda: len(heard) == 3)
            assert heard == [published(0), CacheCleared("a"), published(0, 4, last=2)]
            assert publisher.asked == []

    asyncio.run(case())


def test_requests_go_where_their_blocks_are_reported() -> None:
    async def case() -> None:
        ids = [*range(10, 10 + 8 * SIZE)]
        publisher = Publisher()
        publisher.kept = [(0, batch(stored(10, *range(8))))]
        source = KvSource(*publisher.url.split(","))
        options = {"model": str(bundled_folder()), "kv_block_size": SIZE}
        with contextlib.closing(publisher):
            await ask(
                publisher, ids, late_sources=lambda urls: {urls[1]: source}, **options
            )

    async def ask(publisher: Publisher, ids: list[int], **options: Any) -> None:
        async with routing(2, **options) as harness:
            replaying = asyncio.create_task(publisher.replay())
            dispatcher = harness.router.dispatcher
            await soon(lambda: bool(dispatcher.state.index.shards))
            for _ in range(2):
                answer = await harness.http.post("/v1/completions", json={"prompt": ids})
                assert answer.json()["by"] == "b"
            assert dispatcher.counts.hit_blocks == 16
            harness.backends[1].health = 500
            await harness.health(harness.backends[1].url)
            harness.backends[1].health = 200
            await harness.health(harness.backends[1].url)
            answer = await harness.http.post("/v1/completions", json={"prompt": ids})
            assert answer.json()["by"] == "b", "what it has is known when it is back"
            replaying.cancel()
            await asyncio.gather(replaying, return_exceptions=True)

    asyncio.run(case())


@pytest.mark.long
def test_ids_of_a_conversation_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = bundled_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Sort 42, 7, 19, 3. " * 20}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    reader = TokenKeys(str(folder), 16)
    body = {"model": "any", "messages": messages, "stream": True}
    prompt = reader.read("/v1/chat/completions", json.dumps(body).encode())
    assert (prompt.keys, prompt.tokens) == (block_keys(tokens_root(), ids, 16), len(ids))
    salted = json.dumps({**body, "cache_salt": "s"}).encode()
    assert not {*reader.read("/v1/chat/completions", salted).keys} & {*prompt.keys}
    refused = reader.read("/v1/chat/completions", b'{"messages": 5}')
    assert refused.keys == ()


def test_a_router_reads_no_encrypted_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its environment has."""
    monkeypatch.setenv("MINFER_CACHE_SECRET", "secret")
    reader = TokenKeys(str(bundled_folder()), 16)
    thought: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
    question = {"role": "user", "content": "Sort 42, 7, 19, 3. " * 20}

    def keys(fields: dict[str, Any]) -> object:
        body = {"model": "any", "input": [question, {**thought, **fields}, question]}
        return reader.read("/v1/responses", json.dumps(body).encode()).keys

    assert keys({})
    hidden = encrypt(reasoning_key("secret"), "They are four numbers.")
    assert keys({"encrypted_content": hidden}) == ()


@pytest.mark.parametrize("text", ["", "host:1", "tcp://", "tcp://a:1,", "http://a:1"])
def test_what_is_no_address_of_events_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        read_sources([text], ["a"])


def test_addresses_of_events() -> None:
    sources = read_sources(["-", "tcp://a:1", "ipc:///b,tcp://c:2"], ["x", "y", "z"])
    assert sources == {"y": KvSource("tcp://a:1"), "z": KvSource("ipc:///b", "tcp://c:2")}
    assert read_sources([], ["x"]) == {}
    with pytest.raises(ConfigError, match="as often as --backend"):
        read_sources(["-"], ["x", "y"])
