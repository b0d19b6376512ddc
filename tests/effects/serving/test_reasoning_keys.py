"""All processes of a server read the reasoning that any of them encrypted, and with a
configured secret those of the next start do.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import minfer
from tests.effects.scripted import TEMPLATE, write_talker

pytestmark = pytest.mark.long
SECONDS = 60
KEEPS = {"include": ["reasoning.encrypted_content"], "max_output_tokens": 8}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose answers begin within reasoning."""
    ending = "{% if add_generation_prompt %}<think>{% endif %}{% if false %}</think>"
    folder = tmp_path_factory.mktemp("keys") / "m"
    return write_talker(folder, TEMPLATE + ending + "{% endif %}")


@contextlib.contextmanager
def served(model: str, *options: str) -> Iterator[str]:
    """The address of a server with two API servers, which is ready."""
    command = [sys.executable, "-m", "minfer", "serve", "--model", model, "--dry-run"]
    command += ["--port", "0", "--api-processes", "2", "--num-gpu-blocks-override", "200"]
    root = str(Path(minfer.__file__).parents[1])
    with subprocess.Popen(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": root, "MINFER_CACHE_SECRET": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            url = next(
                match[0]
                for line in process.stdout
                if (match := re.search(r"http://127.0.0.1:\d+", line))
            )
            end = time.monotonic() + SECONDS
            while asked(url, HI).status_code != 200:
                assert time.monotonic() < end
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def asked(url: str, *items: dict[str, Any]) -> httpx.Response:
    """A response, on a connection of its own: any API server may take it."""
    body = {"input": [HI, *items], **KEEPS}
    return httpx.post(f"{url}/v1/responses", json=body, timeout=SECONDS)


def reasoning(url: str) -> dict[str, Any]:
    item: dict[str, Any] = asked(url).json()["output"][0]
    assert item["encrypted_content"]
    return item


def test_each_process_reads_what_another_encrypted(model: str) -> None:
    with served(model) as url:
        items = [reasoning(url) for _ in range(4)]
        assert {asked(url, item).status_code for item in items * 4} == {200}
        old = items[0]
    with served(model) as url:
        refused = asked(url, old)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[1].encrypted_content"


def test_a_secret_outlives_a_restart(model: str) -> None:
    with served(model, "--cache-secret", "s") as url:
        item = reasoning(url)
    with served(model, "--cache-secret", "s") as url:
        assert asked(url, item).status_code == 200
