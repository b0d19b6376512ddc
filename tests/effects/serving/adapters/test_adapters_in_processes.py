"""Adapters in a server of several processes: all of them know the same names, and an
engine that begins again needs to be told nothing.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.effects.serving.process_deaths import server
from tests.effects.small_adapters import write_adapter
from tests.effects.tiny_model import write_checkpoint
from tests.effects.waiting import until

HEAD = {"Authorization": "Bearer root"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write_checkpoint(tmp_path / "tiny")
    for seed, name in enumerate(("a", "b")):
        write_adapter(tmp_path / "allowed" / name, model, seed=seed)
    keys = [{"name": "root", "key": "root", "admin": True}]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    return tmp_path


def options(folder: Path) -> Iterator[str]:
    yield from ("--model", str(folder / "tiny"), "--enable-lora", "--max-loras", "1")
    yield from ("--api-processes", "2", "--replicas", "2")
    yield from ("--lora-modules", f"start={folder / 'allowed' / 'a'}")
    yield from (
        "--lora-folders",
        str(folder / "allowed"),
        "--allow-runtime-lora-updating",
    )
    yield from ("--api-keys-file", str(folder / "keys.json"), "--device", "cpu")
    yield from ("--num-gpu-blocks-override", "64", "--vllm-metrics")


def ask(url: str, model: str, **body: Any) -> httpx.Response:
    """A request on a connection of its own: any API server may get it."""
    fields = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return httpx.post(
        f"{url}/v1/completions",
        json={"model": model, **fields, **body},
        headers=HEAD,
        timeout=60,
    )


def text(url: str, model: str) -> str:
    answer = ask(url, model)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def update(url: str, verb: str, **body: Any) -> int:
    url = f"{url}/v1/{verb}_lora_adapter"
    return httpx.post(url, json=body, headers=HEAD, timeout=60).status_code


@pytest.mark.long
def test_processes_know_the_same_adapters(folder: Path) -> None:
    with server(*options(folder)) as running, ThreadPoolExecutor(8) as pool:
        url = running.url
        running.drain()
        base, first = text(url, "tiny"), text(url, "start")
        assert base != first
        assert update(url, "load", lora_name="new", lora_path="b") == 200
        # The next requests, at whichever API server and replica.
        second = set(pool.map(lambda _: text(url, "new"), range(16)))
        assert len(second) == 1
        assert second != {first}
        assert set(pool.map(lambda _: text(url, "b"), range(8))) == second  # first use
        metrics = httpx.get(f"{url}/metrics").text
        assert 'minfer_adapter_requests_total{adapter="new"' in metrics
        assert 'vllm:lora_requests_info{max_lora="1"' in metrics
        assert httpx.get(f"{url}/ready").json()["adapters"]["named"] == 3

        # Requests go on after the deaths of both engines.
        answers = [pool.submit(ask, url, "start", max_tokens=180) for _ in range(4)]
        for name in [name for name in running.children() if "engine" in name]:
            running.kill(name)
        assert {answer.result().status_code for answer in answers} == {200}
        until(lambda: ask(url, "tiny").status_code == 200)
        assert set(pool.map(lambda _: text(url, "new"), range(8))) == second

        assert update(url, "unload", lora_name="new") == 200
        gone = set(pool.map(lambda _: ask(url, "new").status_code, range(8)))
        assert gone == {404}
        assert update(url, "unload", lora_name="new") == 404
