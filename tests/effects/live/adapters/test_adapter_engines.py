"""Rows with adapters in one batch answer as transformers' merged models do, whatever else
the engine does.
"""

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from minfer import LLM, LoRARequest, SamplingParams
from tests.circles import claimed
from tests.effects.tiny_adapters import merged, write_adapter
from tests.effects.tiny_families import VARIANTS, greedy_tokens, save

RANKS, ALPHA, TOKENS = (4, 16, 9), 8, 8
KEY = ("Qwen3Moe", "experts")
PROMPTS = [[(7 * i + 3 * j) % 150 + 1 for j in range(9 + i)] for i in range(8)]
# With a prefix in common, which is cached for each adapter by itself.
PROMPTS += [[*range(20, 36), i] for i in range(8)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SMALL = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 6}


TIERS = {"kv_host_memory": 1 << 24, "kv_host_choice": "load"}


@frozen(eq=False)
class Served:
    """A checkpoint, its adapters, and what is expected of each prompt."""

    folder: Path
    adapters: list[LoRARequest | None]  # of the prompts
    expected: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("adapters")
    model = save(str(folder / "model"), KEY[0], VARIANTS[KEY])
    models, adapters = [model], list[LoRARequest | None]([None])
    for index, rank in enumerate(RANKS):
        path = folder / str(index)
        pairs = write_adapter(path, model, rank=rank, seed=index, lora_alpha=ALPHA)
        models.append(merged(model, pairs, ALPHA / rank))
        adapters.append(LoRARequest(f"adapter {index}", index + 1, str(path)))
    every = [index % len(models) for index in range(len(PROMPTS))]
    expected = [
        greedy_tokens(models[index], prompt, TOKENS)
        for index, prompt in zip(every, PROMPTS, strict=True)
    ]
    return Served(folder / "model", [adapters[index] for index in every], expected)


def check(served: Served, **settings: Any) -> None:
    """Serves all prompts at once, twice."""
    with LLM(
        str(served.folder),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=64,
        enable_lora=True,
        **{"max_loras": 2, "max_lora_rank": 16} | settings,
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS],
                PARAMS,
                use_tqdm=False,
                lora_request=served.adapters,
            )
            found = [[*output.outputs[0].token_ids] for output in outputs]
            assert found == served.expected


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        SMALL | {"num_gpu_blocks_override": 26, "steps_in_flight": 1, "max_loras": 1},
        {"speculative_config": NGRAM, "max_loras": 3},
        {"enable_prefix_caching": False, "max_lora_rank": 64},
        SMALL | TIERS | {"num_gpu_blocks_override": 26},
    ],
    ids=str,
)
def test_answers_are_those_of_merged_models(
    served: Served, settings: dict[str, Any]
) -> None:
    check(served, **settings)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fp8", "int8_per_token_head"])
def test_answers_with_a_cache_in_8_bits_are_those_alone(
    served: Served, kind: str
) -> None:
    with LLM(
        str(served.folder),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=64,
        enable_lora=True,
        max_loras=2,
        kv_cache_dtype=kind,
    ) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        alone = [
            llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=adapter)[0]
            for prompt, adapter in zip(prompts, served.adapters, strict=True)
        ]
        together = llm.generate(
            prompts, PARAMS, use_tqdm=False, lora_request=served.adapters
        )
    for output, single in zip(together, alone, strict=True):
        assert output.outputs[0].token_ids == single.outputs[0].token_ids


@pytest.mark.parametrize(
    "settings",
    claimed(
        [
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"pipeline_parallel_size": 2},
        ]
    ),
    ids=str,
)
def test_ranks_load_their_parts(served: Served, settings: dict[str, Any]) -> None:
    check(served, **settings)
