"""The engine of a deployment of Ray Serve, without Ray Serve."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="the extra ray-serve is not installed")

from minfer.effects.cli import ray_serve, serve
from minfer.effects.serving.distributed.asgi_calls import post_head
from minfer.effects.serving.distributed.serve_engine import ServedEngine
from minfer.effects.serving.distributed.serve_router import NUMBER
from minfer.routing.messages import LoadReport

pytestmark = pytest.mark.long  # Ray takes a second to import


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedEngine]:
    here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: here)
    parser = ray_serve._Parser(add_help=False)
    serve.add_options(parser)
    options = parser.read({"dry_run": True, "preparers": 0, "max_num_seqs": 4})
    serve.complete(options)
    made = ServedEngine(options, bytes(32))
    yield made
    made.__del__()


def ask(engine: ServedEngine, body: dict[str, Any]) -> list[Any]:
    data = json.dumps(body).encode()

    async def run() -> list[Any]:
        head = post_head("/v1/completions", len(data))
        return [one async for one in engine.http(head, data)]

    return asyncio.run(run())


def test_an_answer_begins_with_the_replica(engine: ServedEngine) -> None:
    name, *batches = ask(engine, {"prompt": "a", "max_tokens": 3})
    assert name == "r1"
    start, *parts = [message for batch in batches for message in batch]
    assert start["status"] == 200
    answer = json.loads(b"".join(one["body"] for one in parts))
    assert answer["usage"]["completion_tokens"] == 3


def test_its_load_is_what_a_router_takes(engine: ServedEngine) -> None:
    first, second = engine.record_routing_stats(), engine.record_routing_stats()
    assert (first.pop(NUMBER), second.pop(NUMBER)) == (1, 2)
    load = LoadReport(**first)
    assert (load.replica, load.waiting, load.running, load.prefill) == ("r1", 0, 0, 0)
    json.dumps(first)  # it passes Ray Serve's controller


def test_an_engine_that_has_stopped_is_not_healthy(engine: ServedEngine) -> None:
    engine.check_health()
    engine._llm.close()
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        engine.check_health()
