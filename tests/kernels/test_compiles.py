"""A GPU's compiler takes the kernels."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from minfer import kernels
from tests.circles import claimed

from .conftest import CUDA


@pytest.mark.long
@pytest.mark.skipif(CUDA, reason="every other test compiles them here")
@pytest.mark.parametrize("skip_slow", [True, *claimed([False])])
def test_kernels_compile_for_a_gpu_that_is_not_there(
    tmp_path: Path, skip_slow: bool
) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    compiled = Counter[str]()
    names = ("compiles", "compiles_quantized", "compiles_recurrent", "compiles_lora")
    for script in names:
        command = [
            sys.executable,
            "-m",
            f"tests.kernels.{script}",
            *["--few"] * skip_slow,
        ]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-4000:]
        compiled.update(line.split()[1] for line in result.stdout.splitlines())
    if skip_slow:
        assert {"norm._normalise", "rope._rope", "sample_kernels.finish"} < {*compiled}
        assert compiled["quantized_kernels._dequantize"] >= 3
        assert compiled["quantized_kernels._round_rows"] >= 3
        assert compiled["quantized_kernels._round_groups"] >= 3
        assert {"lora_kernels.shrink_rows", "lora_kernels.expand_tiles"} < {*compiled}
        return
    assert compiled["linear_kernels.product"] >= 6
    assert compiled["attention_kernels.attend"] >= 3
    assert compiled["mla_kernels.attend_latent"] >= 6
    assert launched() == {*compiled}


def launched() -> set[str]:
    """Kernels that public functions launch: of their own file, or one they import."""
    files = Path(kernels.__file__).parent.resolve().glob("*.py")
    texts = {file.stem: file.read_text("utf-8") for file in files}
    return {
        f"{stem}.{name}"
        for launcher, text in texts.items()
        for name in re.findall(r"^ +(\w+)\[(?:.*|\n.*\n +)\]\(", text, re.M)
        for stem in texts
        if stem == launcher or f"kernels.{stem} import" in text
        if f"\ndef {name}(" in texts[stem]
    }
