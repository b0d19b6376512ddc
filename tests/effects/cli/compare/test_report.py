"""The table, the JSON and the picture of a comparison."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve

import minfer
from minfer.effects.cli.compare.measure_level import MeasuredLoad, held_bytes
from minfer.effects.cli.compare.report import Comparison, as_json, labels, table
from minfer.effects.cli.compare.results import LevelResult, Memory, Quality, Speed
from minfer.effects.cli.compare.text_windows import TextWindows
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.setup.device import DeviceInfo
from tests.effects.tiny_model import CONFIG

MIB: Final = 2**20
BASE: Final = LevelResult(
    level="bf16",
    model="m",
    dtype="bfloat16",
    matrices="plain",
    kv_dtype="bfloat16",
    state_dtype=None,
    memory=Memory(
        weights_planned=200 * MIB,
        weights_held=200 * MIB,
        kv_planned=64 * MIB,
        kv_held=65 * MIB,
        kv_blocks=64,
        kv_of_token=1024,
        state=0,
    ),
    quality=Quality(perplexity=5.0, kl_divergence=None, top1_agreement=None),
    speeds=(
        Speed(batch=1, ttft=0.01, tpot=0.002, throughput=480.0),
        Speed(batch=8, ttft=0.02, tpot=0.004, throughput=1900.5),
    ),
)
INT8: Final = evolve(
    BASE,
    level="/some/where/int8/",
    memory=evolve(BASE.memory, weights_held=120 * MIB),
    quality=Quality(perplexity=5.1, kl_divergence=0.01234, top1_agreement=0.975),
)
FOUND: Final = Comparison(
    device=DeviceInfo("cuda", "H100", 80, 70),
    threads=2,
    text=TextWindows("text", "0" * 64, ((1, 2, 3), (4, 5, 6))),
    load=MeasuredLoad(batches=(1, 8), prompt=128, output=64, seed=3),
    is_random=False,
    levels=(BASE, INT8),
)


def test_the_table_has_a_column_for_each_level() -> None:
    heading, _, rows = table(FOUND).partition("\n\n")
    assert "text    text: 4 positions in 2 windows of 3 tokens" in heading.splitlines()
    assert rows.splitlines() == [
        "                           bf16          int8",
        "dtype                  bfloat16      bfloat16",
        "weights, planned     200.00 MiB    200.00 MiB",
        "weights, held        200.00 MiB    120.00 MiB",
        "  of the base's          100.0%         60.0%",
        "KV cache, planned     64.00 MiB     64.00 MiB",
        "KV cache, held        65.00 MiB     65.00 MiB",
        "KV of a token          1.00 KiB      1.00 KiB",
        "perplexity               5.0000        5.1000",
        "  to the base's               -        +2.00%",
        "KL divergence                 -   0.0123 nats",
        "top-1 agreement               -        97.50%",
        "TTFT, batch 1          10.00 ms      10.00 ms",
        "TPOT, batch 1          2.000 ms      2.000 ms",
        "output, batch 1     480.0 tok/s   480.0 tok/s",
        "TTFT, batch 8          20.00 ms      20.00 ms",
        "TPOT, batch 8          4.000 ms      4.000 ms",
        "output, batch 8    1900.5 tok/s  1900.5 tok/s",
    ]


def test_it_says_that_weights_are_random() -> None:
    assert "random" not in table(FOUND)
    assert "weights random: figures of the text" in table(evolve(FOUND, is_random=True))


def test_levels_whose_short_names_are_equal_keep_their_paths() -> None:
    same_name = evolve(INT8, level="elsewhere/int8")
    assert labels(FOUND) == ["bf16", "int8"]
    assert labels(evolve(FOUND, levels=(INT8, same_name))) == [
        INT8.level,
        same_name.level,
    ]


def test_json_says_what_figures_depend_on() -> None:
    broken = evolve(INT8, quality=evolve(INT8.quality, perplexity=math.inf))
    report = as_json(evolve(FOUND, levels=(BASE, broken)))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["minfer"] == minfer.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["device"]["name"] == "H100"
    assert report["load"] == {
        "batches": [1, 8],
        "prompt": 128,
        "output": 64,
        "seed": 3,
        "runs": 3,
    }
    first, second = report["levels"]
    assert first["memory"]["weights_held"] == 200 * MIB
    assert first["speeds"][1]["throughput"] == 1900.5
    assert second["quality"]["perplexity"] is None


@pytest.mark.long
def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from minfer.effects.cli.compare.plot import draw

    for name in ("one.svg", "two.svg", "one.png"):
        draw(FOUND, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "two.svg").read_bytes()
    for text in ("weights held, MiB", "top-1 97.5%", "output tokens/s", "int8"):
        assert text.encode() in drawn
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_shared_memory_is_held_once() -> None:
    spec = parse_spec(CONFIG, "", None)
    tied = parse_spec({**CONFIG, "tie_word_embeddings": True}, "", None)
    untied_weights, tied_weights = (
        random_weights(model_spec, "float32") for model_spec in (spec, tied)
    )
    embedding = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert held_bytes(untied_weights) - held_bytes(tied_weights) == embedding
    module = torch.nn.Linear(3, 5)

    def function(batch: Any) -> Any:
        return module(batch), tied_weights

    assert (
        held_bytes([untied_weights, {"a": function}])
        == held_bytes(untied_weights) + held_bytes(tied_weights) + 80
    )
