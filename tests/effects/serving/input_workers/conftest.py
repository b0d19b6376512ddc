"""The model whose requests workers prepare."""

import contextlib
from collections.abc import Iterator

import pytest

from minfer.effects.live.async_llm import AsyncLLM


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with contextlib.closing(AsyncLLM(executor="dry")) as llm:
        yield llm
