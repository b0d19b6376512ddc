"""`minfer plan`: what fits, before anything is loaded."""

import re
from pathlib import Path

import pytest

from minfer.effects.cli.main import main
from tests.effects.cli.test_generate import SMALL
from tests.effects.cli.test_generate import folder as folder
from tests.effects.tiny_model import write_checkpoint


def test_plan_prints_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", str(folder), *SMALL, "--max-num-batched-tokens", "64"])
        == 0
    )
    out = capsys.readouterr().out
    assert "256 tokens at batch 1" in out
    assert "largest batch at 256  2 sequences" in out
    assert (
        main(["plan", "--model", str(folder), "--memory", "256M", "--dtype", "half"]) == 0
    )
    out = capsys.readouterr().out
    assert "of 256.00 MiB that may be used" in out
    assert "float16" in out


def test_plan_prints_one_of_a_thing_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, num_hidden_layers=1)
    settings = ["--max-num-seqs", "1", "--max-model-len", "16", "--block-size", "16"]
    blocks = ["--num-gpu-blocks-override", "1", "--max-num-batched-tokens", "16"]
    assert main(["plan", "--model", str(folder), *settings, *blocks]) == 0
    out = capsys.readouterr().out
    for words in ("in 1 layer\n", "in 1 block\n", "largest batch at 16   1 sequence\n"):
        assert words in out
    assert not re.search(r"\b1 \w+s\b", out)


@pytest.mark.parametrize("model", ["model.gguf", "org/name"])
def test_a_model_without_its_option_is_refused_with_the_option(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", model])
    assert left.value.code == 2
    assert f"name a model by --model {model};" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "named"),
    [("int8", "exact on this processor"), ("int4-g32", "4-bit"), ("fp8", "dequantized")],
)
def test_plan_prints_what_multiplies_quantized_matrices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, named: str
) -> None:
    folder = write_checkpoint(tmp_path, hidden_size=64, intermediate_size=96)
    assert main(["plan", "--model", str(folder), *SMALL, "--quantization", level]) == 0
    [line] = [
        row for row in capsys.readouterr().out.splitlines() if "matrix products" in row
    ]
    assert named in line
