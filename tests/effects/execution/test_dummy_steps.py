"""What traffic launches is among what dummy steps launch."""

import json
import os
import subprocess
import sys

import pytest

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.warming.dummy_steps import BOUNDS, counts, shapes
from minfer.kernels import pdl
from minfer.records.config import EngineConfig
from tests.circles import claimed
from tests.effects.setup.test_memory import QWEN_05B

SWEPT = [
    "graphs",
    "drafts",
    "coins",
    "eager",
    "float32",
    "windows",
    "norms",
    "wide",
    "norms of all heads",
    "gates",
    "scaled logits",
    "latents",
    "no gate",
    "parallel",
    "streams",
    "int8",
    "delta",
    "Mamba",
    "Kimi delta",
    "scan",
]


@pytest.mark.long
@pytest.mark.parametrize(
    "case", ["few", "first stage", "ranks", "adapters", *claimed(SWEPT)]
)
def test_nothing_is_launched_that_was_not_foreseen(case: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.effects.execution.launches"]
    finished = subprocess.run([*command, case], env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]
    report = json.loads(finished.stdout)
    assert report["unforeseen"] == []
    assert report["launched"] > 1 + len(report["kernels"])  # of all, in several ways
    num_kernels = {"drafts": 2, "coins": 2, "latents": 3, "int8": 1, "first stage": -11}
    num_kernels |= {"ranks": 1, "norms of all heads": 1, "gates": 1, "streams": 1}
    num_kernels |= {"adapters": 6, "delta": 8, "Mamba": 5, "Kimi delta": 10, "scan": 4}
    assert len(report["kernels"]) == 19 + num_kernels.get(case, 0)
    assert report["foreseen"] >= report["launched"]


def test_counts_stand_on_both_sides_of_each_bound() -> None:
    sizes = counts(5000)
    for count in (1, 2, 3, 5, 7, 16, 17, 40, 64, 65, 200, 511, 512, 1023, 1024, 4000):
        below = sum(bound < count for bound in BOUNDS)
        assert below in {sum(bound < size for bound in BOUNDS) for size in sizes}
    assert counts(3) == [1, 2, 3]
    assert max(counts(pdl.MAX_EARLY_ROWS)) == pdl.MAX_EARLY_ROWS


def test_kinds_keep_to_the_sizes_of_the_engine() -> None:
    config = EngineConfig(
        num_blocks=99,
        block_size=64,
        max_model_len=4096,
        max_num_seqs=40,
        max_num_batched_tokens=300,
        vocab_size=QWEN_05B.vocab_size,
    )
    all_shapes = shapes(QWEN_05B, config)
    assert len(all_shapes) == len({*all_shapes})
    assert max(shape.decode_rows for shape in all_shapes) == 64
    assert max(shape.tokens for shape in all_shapes) == 384  # a graph's, of 300
    # And those that none serves: of the budget, of more chunks than a graph has.
    assert 300 in {shape.tokens for shape in all_shapes}
    assert max(shape.chunks for shape in all_shapes) == 40
    assert {shape.splits > (1,) for shape in all_shapes} == {True, False}
    assert any(shape.tokens and not shape.draws for shape in all_shapes)
    assert StepShape(decode_rows=0, draws=1, tokens=1, chunks=1, longest=1) in all_shapes
