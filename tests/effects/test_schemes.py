"""Quantized models in an engine: with hits, chunks, drafts and preemption, and beside
transformers' model with the same arithmetic.
"""

from typing import Any

import pytest

from minfer import LLM, SamplingParams
from tests.effects.schemes import CASES, SCHEMES, compare

TEXTS = ["def add(a, b):\n    return a", "import os\nimport sys\n", "class A:\n    x"]
# How far apart logits may be where tokens differ: an activation that is rounded the other
# way moves by 1 / 127 of its row's largest, or in FP8 by up to an eighth of itself.
GAPS = {"int8": 0.05, "fp8": 0.3, "fp8_per_block": 0.3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def tokens(**settings: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(dtype="float32", device="cpu", max_model_len=256, **settings) as llm:
        passes = [llm.generate(TEXTS, params, use_tqdm=False) for _ in range(2)]
    return [
        tuple(output.outputs[0].token_ids) for outputs in passes for output in outputs
    ]


@pytest.mark.long
@pytest.mark.parametrize("level", ["int8", "int4-g32", "fp8"])
def test_answers_do_not_depend_on_the_engine(level: str) -> None:
    expected = tokens(quantization=level, enable_prefix_caching=False)
    small = {"block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    for settings in (
        small,
        {"steps_in_flight": 1},
        {"speculative_config": NGRAM},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        small | {"num_gpu_blocks_override": 33},
    ):
        assert tokens(quantization=level, **settings) == expected


@pytest.mark.long
@pytest.mark.parametrize("level", SCHEMES)
@pytest.mark.parametrize(
    "key",
    [
        ("Qwen3", "attention_bias"),
        ("Qwen3Moe", "experts"),
        ("Falcon", "two norms"),
        ("Gemma3n", "all"),
        ("KimiLinear", "plain"),
        ("Jamba", "plain"),
    ],
)
def test_a_scheme_means_what_transformers_computes_with_it(
    key: tuple[str, str], level: str
) -> None:
    """Where tokens differ, as rounding went the other way, their logits hardly do."""
    assert key in CASES
    prompts = [[5, 9, 100, 3], [*range(7, 47)]]
    figures = compare(key, level, prompts, 24)
    assert figures["different_tokens"] > 10
    assert abs(figures["largest_gap"]) <= GAPS.get(level, 0.0)
