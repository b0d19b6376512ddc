"""What tests of models outside the family table share."""

from pathlib import Path

import pytest

from tests.effects.tiny_fallback import save


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "neox"
    save(folder, "gpt_neox")
    return folder
