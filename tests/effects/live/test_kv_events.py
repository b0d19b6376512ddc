"""KV events of an engine: as minfer's own router and Dynamo's indexer read them."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from attrs import evolve

from minfer import LLM, SamplingParams
from minfer.blocks.keys import Key, block_keys, root_key
from minfer.effects.live.kv_events.engine_events import EngineEvents, check_layers
from minfer.effects.live.kv_events.event_messages import AllBlocksCleared, EventBatch
from minfer.effects.live.kv_events.zmq_publisher import ZmqPublisher
from minfer.effects.proxy.backends import KvSource
from minfer.effects.proxy.kv_events import ReportedCache
from minfer.effects.proxy.kv_subscriber import KvSubscriber
from minfer.effects.proxy.token_keys import tokens_root
from minfer.effects.setup.kv_events_settings import KvEventsConfig
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Emit, Submit
from minfer.records.request import Request
from minfer.values.checks import ConfigError
from tests.core.routing.test_replica_events import content
from tests.core.simulation.clocked import Run
from tests.core.simulation.test_simulate import config_of
from tests.effects.waiting import soon, until

ON: dict[str, Any] = {"enable_kv_cache_events": True}
ROOT = root_key(b"model")


class Recorder:
    """A publisher whose batches are kept, as they would be sent."""

    rank = 3

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def publish(self, batch: EventBatch) -> None:
        self.payloads.append(msgspec.msgpack.encode(batch))

    def close(self) -> None:
        """Keep all."""

    @property
    def events(self) -> list[Any]:
        batches = map(msgspec.msgpack.decode, self.payloads)
        return [event for _, events, _ in batches for event in events]


def asked(
    name: str, prompt: tuple[int, ...], root: Key = ROOT, max_tokens: int = 6
) -> Request:
    keys = block_keys(root, prompt, 4)
    return Request(id=name, prompt=prompt, root=root, keys=keys, max_tokens=max_tokens)


def published(
    config: EngineConfig, *requests: Request, roots: Iterator[Key] | None = None
) -> tuple[Run, Recorder]:
    """What an engine publishes that serves requests, one after another; `roots` are those
    of requests without a salt, turn by turn.
    """
    recorder, run = Recorder(), Run(config)
    events = EngineEvents(config, recorder, lambda: next(roots) if roots else ROOT)
    for request in requests:
        run.turn(Submit(request))
        run.drain()
    for turn in run.turns:
        events.observe(turn.before, turn.transition)
    return run, recorder


def test_a_router_that_reads_the_events_has_the_blocks_of_the_engine() -> None:
    """Also when blocks are evicted all the time."""
    config = config_of(num_blocks=12, max_model_len=40)
    prompts = [(kind,) * 9 + (number,) * 6 for number, kind in enumerate([1, 2, 1, 3, 1])]
    tokens: dict[Key, Key] = {}  # by content key, the key that a router has
    run, recorder = published(
        config, *(asked(f"{i}", prompt) for i, prompt in enumerate(prompts))
    )
    cache = ReportedCache("a", config.block_size)
    for payload in recorder.payloads:
        assert cache.read(payload)
    outputs: dict[str, list[int]] = defaultdict(list)
    for turn in run.turns:
        for command in turn.transition.commands:
            if isinstance(command, Emit):
                for (name, _), new in zip(command.ids, command.tokens, strict=True):
                    outputs[name] += new
    for i, prompt in enumerate(prompts):
        known = (*prompt, *outputs[f"{i}"])
        own, theirs = (
            block_keys(root, known, config.block_size) for root in (ROOT, tokens_root())
        )
        tokens.update(zip(own, theirs, strict=True))
    assert {event["type"] for event in recorder.events} == {"BlockStored", "BlockRemoved"}
    assert {*cache.cached()} == {tokens[key] for key in content(run.state, 0)}


def test_an_event_has_the_fields_of_vllm_and_their_order_does_not_matter() -> None:
    _, recorder = published(config_of(depth=1), asked("1", (1,) * 9, max_tokens=1))
    (payload,) = recorder.payloads
    seconds, events, rank = msgspec.msgpack.decode(payload)
    assert (type(seconds), rank) == (float, 3)
    first, second = (
        int.from_bytes(key[-8:], "big") for key in block_keys(ROOT, (1,) * 9, 4)
    )
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [first, second],
            "parent_block_hash": None,
            "token_ids": [1] * 8,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_blocks_of_tenants_are_no_hits_of_others() -> None:
    salted = root_key(b"model", b"tenant")
    config = config_of()
    _, recorder = published(config, asked("1", (1,) * 9, salted))
    cache = ReportedCache("a", config.block_size)
    assert [cache.read(payload) for payload in recorder.payloads] == [
        [] for _ in recorder.payloads
    ]
    stored, *later = recorder.events
    assert stored["extra_keys"] == [[salted.hex()], None]
    assert all("extra_keys" not in event for event in later)


def test_a_reset_clears_all_blocks() -> None:
    config = config_of()
    after = root_key(ROOT, b"reset 1")
    first, second = asked("1", (1,) * 9), asked("2", (1,) * 9, after)
    plain, _ = published(config, first)
    roots = iter([ROOT] * (1 + len(plain.turns)) + [after] * 99)
    _, recorder = published(config, first, second, roots=roots)
    kinds = [event["type"] for event in recorder.events]
    assert kinds.count("AllBlocksCleared") == 1
    cache = ReportedCache("a", config.block_size)
    for payload in recorder.payloads:
        cache.read(payload)
    prompt_keys = block_keys(tokens_root(), (1,) * 9, config.block_size)
    assert set(prompt_keys) <= {*cache.cached()}
    assert len(cache.cached()) == 3, "those of the second request alone"


def test_layers_that_all_have_windows_have_no_events() -> None:
    config = evolve(config_of(), groups=(CacheGroup(window=8),))
    _, recorder = published(config, asked("1", (1,) * 9))
    assert recorder.payloads == []
    with pytest.raises(ConfigError, match="all layers of this model have a window"):
        check_layers(ON, config)
    check_layers({**ON, "publisher": "null"}, config)
    check_layers(None, config)


# --- over ZeroMQ ------------------------------------------------------------------------


def addresses(folder: Path) -> dict[str, Any]:
    names = {"endpoint": "events", "replay_endpoint": "replay"}
    return ON | {key: f"ipc://{folder / name}" for key, name in names.items()}


def number(count: int) -> EventBatch:
    return EventBatch(float(count), (AllBlocksCleared(),), 0)


def numbers(heard: list[bytes]) -> list[int]:
    return [int(msgspec.msgpack.decode(payload)[0]) for payload in heard]


def test_batches_that_were_missed_are_sent_again(tmp_path: Path) -> None:
    config = KvEventsConfig(**addresses(tmp_path), buffer_steps=3, topic="kv")
    heard: list[bytes] = []

    class Cache(ReportedCache):
        def read(self, payload: bytes) -> Any:
            heard.append(payload)
            return super().read(payload)

    async def case(publisher: ZmqPublisher) -> None:
        for count in range(5):
            publisher.publish(number(count))
        source = KvSource(config.endpoint, config.replay_endpoint or "")
        subscriber = KvSubscriber(source, Cache("a", 4), lambda *_: None)
        task = asyncio.create_task(subscriber.run())
        await soon(lambda: len(heard) == 3)
        count = 4
        while numbers(heard)[-1] < 7:  # subscribers are not there at once
            publisher.publish(number(count := count + 1))
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with contextlib.closing(ZmqPublisher(config)) as publisher:
        asyncio.run(case(publisher))
    assert numbers(heard) == [*range(2, 2 + len(heard))]
    publisher.close()  # again


def test_topics_and_numbers_are_those_of_vllm(tmp_path: Path) -> None:
    config = KvEventsConfig(**addresses(tmp_path), topic="kv@pod@model")
    context = zmq.Context()
    with contextlib.closing(ZmqPublisher(config)) as publisher:
        reader, replay = context.socket(zmq.SUB), context.socket(zmq.REQ)
        with reader, replay:
            reader.subscribe(b"kv@pod")
            reader.connect(config.endpoint)
            while not reader.poll(10):  # subscribers are not there at once
                publisher.publish(number(7))
            topic, sequence, payload = reader.recv_multipart()
            assert topic == b"kv@pod@model"
            assert len(sequence) == 8
            assert msgspec.msgpack.decode(payload) == [
                7.0,
                [{"type": "AllBlocksCleared"}],
                0,
            ]
            replay.connect(str(config.replay_endpoint))
            replay.send(b"not a number")  # is logged, and not answered
            with context.socket(zmq.REQ) as other:
                other.connect(str(config.replay_endpoint))
                other.send((0).to_bytes(8, "big"))
                assert other.recv_multipart() == [(0).to_bytes(8, "big"), payload]
    context.destroy(linger=0)


def test_a_batch_that_does_not_fit_leaves_a_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZmqPublisher, "_run", lambda _: None)
    config = KvEventsConfig(**addresses(tmp_path), max_queue_size=2)
    with contextlib.closing(ZmqPublisher(config)) as publisher:
        for count in range(4):
            publisher.publish(number(count))
        kept = [publisher._queue.get_nowait() for _ in range(2)]
        assert [entry and entry.number for entry in kept] == [0, 1]
        publisher.publish(number(4))
        assert (entry := publisher._queue.get_nowait()) is not None
        assert entry.number == 4
    assert caplog.text.count("KV events are lost: 2 batches wait") == 1


def test_an_address_that_is_taken_is_an_error_before_anything_is_loaded() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        config = {**ON, "endpoint": f"tcp://*:{port}"}
        with pytest.raises(ConfigError, match=r"cannot listen at tcp://\*:.* choose"):
            LLM("no such model", kv_events_config=config)


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="the prefix cache, which is off"):
        LLM(kv_events_config=ON, enable_prefix_caching=False)


@pytest.mark.long
def test_an_llm_publishes_and_hits_are_as_a_router_sees_them(
    folder: str, tmp_path: Path
) -> None:
    context = zmq.Context()
    cache, prompt = ReportedCache("a", 16), [*range(10, 110)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(folder, block_size=16, kv_events_config=addresses(tmp_path)) as llm:
        reader = context.socket(zmq.SUB)
        with reader:
            reader.subscribe(b"")
            reader.connect(f"ipc://{tmp_path / 'events'}")
            until(lambda: llm.generate([[1] * 40], params) and reader.poll(10))
            (output,) = llm.generate([prompt], params)
            known = [*prompt, *output.outputs[0].token_ids]
            while reader.poll(300):
                cache.read(reader.recv_multipart()[2])
            keys = block_keys(tokens_root(), known, 16)
            hit = sum(key in cache.cached() for key in keys) * 16
            (again,) = llm.generate([known], params)
            assert hit == again.num_cached_tokens == 128
            llm.reset_prefix_cache()
            llm.generate([[2] * 40], params)
            while reader.poll(300):
                cache.read(reader.recv_multipart()[2])
            assert {*keys}.isdisjoint(cache.cached())
    context.destroy(linger=0)


# --- Dynamo -----------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def asked_of_indexer(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - http, as below
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        return json.load(answer)


@contextlib.contextmanager
def indexer() -> Iterator[str]:
    """Dynamo's KV indexer; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    process = subprocess.Popen([*command, "--threads", "1"])
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(asked_of_indexer(f"{url}/workers") == [])
        return False

    try:
        until(answers)
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None,
    reason="needs ai-dynamo-runtime, which is no dependency: 75 MB, to be tried by hand",
)
def test_dynamos_indexer_sees_hits_as_they_are(folder: str) -> None:
    ports = free_port(), free_port()
    events = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[kind] * 50 + [number] * 50 for kind in (3, 4) for number in (5, 6)]
    with (
        LLM(folder, block_size=16, kv_events_config=ON | events) as llm,
        indexer() as url,
    ):
        llm.generate([prompts[0]], params)  # before the indexer listens: it is sent again
        worker = {"instance_id": 1, "model_name": "m", "block_size": 16, "dp_rank": 0}
        urls = (f"tcp://127.0.0.1:{port}" for port in ports)
        places = dict(zip(("endpoint", "replay_endpoint"), urls, strict=True))
        asked_of_indexer(f"{url}/register", worker | places)

        def seen(ids: list[int]) -> int:
            query = {"token_ids": ids, "model_name": "m"}
            scores = asked_of_indexer(f"{url}/query", query)["scores"]
            return int(scores.get("1", {}).get("0", 0))

        until(lambda: llm.generate([[9] * 40], params) and seen([9] * 40) == 32)
        for output in llm.generate(prompts, params):
            known = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
            for length in (20, 60, 100, 135):
                until(lambda: seen(known[:length]) == length // 16 * 16)  # noqa: B023
                (again,) = llm.generate([known[:length]], SamplingParams(max_tokens=1))
                assert again.num_cached_tokens == (length - 1) // 16 * 16
