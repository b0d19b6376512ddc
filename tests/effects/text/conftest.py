"""Fixtures of the tests of text."""

from pathlib import Path

import pytest

from minfer.effects.text.tokenizer import Tokenizer
from tests.effects.text.trained import save


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save(tmp_path)
    return Tokenizer(tmp_path)
