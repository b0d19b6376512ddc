"""The shape that bench.cpu_experts measures gives transformers' tokens."""

import random
from pathlib import Path
from typing import Final

import pytest

from bench.cpu_experts import config
from minfer import LLM, SamplingParams
from tests.effects.parity import their_tokens
from tests.effects.tiny_families import save

TOKENS: Final = 8


@pytest.mark.long
def test_tokens_of_a_small_mixture_are_transformers(tmp_path: Path) -> None:
    sizes = config("small") | {"num_hidden_layers": 2, "vocab_size": 512}
    model = save(str(tmp_path), "Qwen3Moe", sizes)
    rng = random.Random(0)
    prompts = [rng.choices(range(512), k=length) for length in (5, 17, 9, 2)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(
        str(tmp_path),
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=16,
        max_model_len=64,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    continuations = [list(output.outputs[0].token_ids) for output in outputs]
    assert continuations == their_tokens(model, prompts, TOKENS)
    assert len({*map(tuple, continuations)}) == len(prompts)
