"""Scripts of vLLM 0.33.0's own examples, with their imports and models changed alone.

They are in its source distribution, and not here. With VLLM_EXAMPLES, the path of its
folder `examples`, each runs on the bundled model:

    pip download --no-deps --no-binary=vllm vllm==0.33.0
    VLLM_EXAMPLES=vllm-0.33.0/examples pytest --all tests/examples/test_vllm_examples.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from minfer.effects.setup.folders import bundled_folder
from tests.effects.setup.vllm_usage import EXAMPLES

FOLDER: Final = os.environ.get("VLLM_EXAMPLES")
# Modules of vLLM, and those of minfer with the same names; of others, `minfer` has them.
MODULES: Final = {"vllm.v1.metrics.reader": "minfer.effects.live.engine_metrics"}
_IMPORT: Final = re.compile(r"^from (vllm[\w.]*) import", re.MULTILINE)
_MODEL: Final = re.compile(r"\bmodel=\"[^\"]+\"")
REFUSED: Final = "LLMEngine"  # of the one script that is refused
CONTEXT: Final = 16384  # tokens: one prompt is longer than the bundled model's context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a longer context."""
    folder = shutil.copytree(bundled_folder(), tmp_path_factory.mktemp("model") / "toy")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(source: str, model: Path) -> str:
    """The script with its imports and its model changed, and nothing else."""
    source = _IMPORT.sub(
        lambda match: f"from {MODULES.get(match[1], 'minfer')} import", source
    )
    return _MODEL.sub(f'model="{model}"', source)


@pytest.mark.claimed
@pytest.mark.skipif(FOLDER is None, reason="VLLM_EXAMPLES names no folder")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_with_imports_and_models_changed_alone(
    name: str, model: Path, tmp_path: Path
) -> None:
    script = tmp_path / Path(name).name
    source = (Path(str(FOLDER)) / name).read_text("utf-8")
    script.write_text(changed(source, model), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if REFUSED in source:
        assert "minfer has no LLMEngine: " in done.stderr
        assert "use LLM.stream" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    print(done.stdout)
