"""Servers that tests share: the bundled model, and an oracle slow enough to be met."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.effects.served import Serving, events, serving
from tests.effects.serving.raw_requests import NEIGHBOUR, SLOW
from tests.effects.tiny_model import write_checkpoint


@pytest.fixture(scope="session")
def bundled() -> Iterator[Serving]:
    names = ("bundled", "alias/of-it")
    # In bfloat16, who else is in a batch would decide more than the last bits of a draw.
    with serving(names=names, num_gpu_blocks_override=128, dtype="float32") as server:
        yield server


@pytest.fixture(scope="session")
def client(bundled: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with so long a context that it could write for minutes."""
    path = tmp_path_factory.mktemp("tiny") / "a-tiny-model"
    return str(write_checkpoint(path, max_position_embeddings=100_000))


@pytest.fixture(scope="session")
def slow(folder: str) -> Iterator[Serving]:
    with serving(folder, **SLOW) as server:
        yield server


@pytest.fixture(scope="session")
def quiet(slow: Serving) -> list[str]:
    """What the neighbour gets when it is alone."""
    answer = slow.post("completions", **NEIGHBOUR)
    return [e["choices"][0]["text"] for e in events(iter(answer.text.split("\n")))]
