"""On a GPU: requests that have their logits changed get the tokens that the CPU gives.

Most of it can be tried without one: set DEVICE to "cpu".
"""

import random
from typing import Any, Final

import pytest
import torch

from minfer import LLM, SamplingParams

DEVICE: str = "cuda"
CUDA: Final = torch.cuda.is_available()
SETTINGS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "block_size": 64,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 256,
}
WORDS: Final = ("self", "return None", "import os", "def")

pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not CUDA, reason="needs a CUDA GPU")


def requested(count: int = 40) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters, most of which ask for something."""
    rng = random.Random(11)
    prompts = [
        [rng.randrange(300, 900) for _ in range(rng.randrange(1, 200))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            typical_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            presence_penalty=rng.choice([0.0, -0.4]),
            logit_bias=rng.choice([{}, {rng.randrange(900): 4.0, 301: -100}]),
            allowed_token_ids=rng.choice([None, None, range(200, 900)]),
            bad_words=rng.choice([(), WORDS]),
            min_tokens=rng.choice([0, 20]),
            max_tokens=48,
            seed=i,
        )
        for i in range(count)
    ]
    return prompts, params


def made(device: str, **settings: Any) -> list[list[int]]:
    """What becomes of them: twice, the second time with graphs of mixed steps."""
    with LLM(device=device, **{**SETTINGS, **settings}) as llm:
        runs = [llm.generate(*requested(), use_tqdm=False) for _ in range(2)]
    first, second = ([output.outputs[0].token_ids for output in run] for run in runs)
    assert first == second
    return first


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return made("cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"steps_in_flight": 1},
        {"num_gpu_blocks_override": 24},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_cpu(
    expected: list[list[int]], settings: dict[str, Any]
) -> None:
    assert made(DEVICE, **settings) == expected
    assert len(set(map(tuple, expected))) == len(expected)
