"""What tests of live engines share."""

import pytest

from minfer.effects.live.constraints import grammar_masks
from tests.effects.live.matchers import Clock
from tests.effects.tiny_model import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, which no test changes."""
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of masks."""
    clock_stub = Clock()
    monkeypatch.setattr(grammar_masks, "time", clock_stub)
    return clock_stub
