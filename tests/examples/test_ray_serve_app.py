"""The application of Ray Serve: it is short, uses public names alone, and its replicas
answer chats as one engine does.
"""

import ast
import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import openai
import pytest

from minfer import LLM, SamplingParams

PATH: Final = Path(__file__).with_name("ray_serve_app.py")
MAX_LINES: Final = 200  # lines
MEMORY: Final = 80 * 2**20  # bytes of Ray's object store: nothing is in it
ENGINE: Final = '{"dtype": "float32", "num_gpu_blocks_override": 128}'
PROMPTS: Final = ("Hello!", "What is 6 times 7?", "Count to five.", "Write a function.")
TOKENS: Final = 24  # of each answer


def test_it_is_short_and_uses_public_names_alone() -> None:
    text = PATH.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom():
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Attribute():
                names.append(node.attr)
    assert "minfer.AsyncLLM" in names
    assert [name for name in names if name.startswith("_") or "._" in name] == []


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where Ray Serve listens, on a cluster of this machine."""
    ray = pytest.importorskip("ray", reason="the extra ray-serve is not installed")
    serve = pytest.importorskip("ray.serve", reason="the extra ray-serve is missing")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=MEMORY,
        include_dashboard=False,
        namespace="serve",
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.long
def test_two_replicas_stream_what_one_engine_says(url: str) -> None:
    from ray import serve

    from tests.examples.ray_serve_app import Arguments, build

    app = build(Arguments(name="small", num_replicas=2, engine=ENGINE))
    serve.run(app, name="minfer", route_prefix="/minfer")
    states = serve.status().applications["minfer"].deployments["Engine"].replica_states
    assert {str(state): count for state, count in states.items()} == {"RUNNING": 2}
    assert asyncio.run(streamed(f"{url}/minfer/v1")) == alone()


async def streamed(url: str) -> list[str]:
    """The greedy answers, all asked for at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:

        async def answer(prompt: str) -> str:
            stream = await client.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
            )
            deltas = [chunk.choices[0].delta async for chunk in stream]
            return "".join(delta.content or "" for delta in deltas)

        return list(await asyncio.gather(*map(answer, PROMPTS)))


def alone() -> list[str]:
    """The same of an engine in this process."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    with LLM(dtype="float32", num_gpu_blocks_override=128) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        return [output.outputs[0].text for output in llm.chat(chats, params)]
