"""OpenAI's and Anthropic's SDKs through `minfer route`, against a server of minfer's."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from minfer.effects.cli.main import main
from tests.effects.served import Serving

ASK = "What is 17 + 25?"


@pytest.fixture(scope="module")
def url(bundled: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router in a process of its own, with one server that is there and one that is
    not; its journal replays in the end.
    """
    folder = tmp_path_factory.mktemp("router") / "runs"
    command = [sys.executable, "-m", "minfer", "route", "--port=0"]
    command += [f"--backend={bundled.url}/v1", "--backend=http://127.0.0.1:9"]
    command += [f"--journal={folder}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("minfer: 2 servers by prefix at http://127.0.0.1:")
        yield line.split()[-1].removesuffix("/v1")
        process.terminate()
        assert process.wait(20) == 0
        assert process.stderr is not None
        process.stderr.read()
    _replays(folder)


def _replays(folder: Path) -> None:
    assert main(["replay", str(folder)]) == 0


@pytest.mark.long
def test_openais_sdk(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        (model,) = [model.id for model in client.models.list() if "/" not in model.id]
        ask: Any = [{"role": "user", "content": ASK}]
        completion = client.chat.completions.create(
            model=model,
            messages=ask,
            temperature=0,
            max_tokens=16,
        )
        assert "42" in (completion.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model=model,
            messages=ask,
            temperature=0,
            max_tokens=16,
            stream=True,
        )
        texts = [
            event.choices[0].delta.content or "" for event in stream if event.choices
        ]
        assert "".join(texts) == completion.choices[0].message.content
        answer = client.responses.create(model=model, input=ASK, max_output_tokens=16)
        assert answer.id.startswith("resp")
        vectors = client.embeddings.create(model=model, input=["a", "b"])
        assert len(vectors.data) == 2
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model=model, input="a", previous_response_id="r")
        with pytest.raises(openai.NotFoundError, match="the router does not pass on"):
            client.files.list()


@pytest.mark.long
def test_anthropics_sdk(url: str) -> None:
    with Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        ask: Any = [{"role": "user", "content": ASK}]
        message = client.messages.create(model="bundled", max_tokens=16, messages=ask)
        assert [block.type for block in message.content] == ["text"]
        with client.messages.stream(
            model="bundled", max_tokens=16, messages=ask
        ) as stream:
            assert "".join(stream.text_stream)
        count = client.messages.count_tokens(model="bundled", messages=ask)
        assert count.input_tokens == message.usage.input_tokens
