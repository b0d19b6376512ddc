"""A model double with room for the prompts of agents."""

from collections.abc import Iterator

import pytest

from tests.effects.scripted import write_talker
from tests.effects.served import Serving, serving
from tests.effects.serving.agents.claude_code import CONTEXT


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = write_talker(tmp_path_factory.mktemp("talker"), context=CONTEXT)
    with serving(path, executor="dry", num_gpu_blocks_override=60_000) as server:
        yield server
