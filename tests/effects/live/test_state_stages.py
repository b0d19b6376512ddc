"""Hybrids in pipeline stages: each has the states of its own layers. Greedy tokens are
those of transformers' `generate`, as they are in one process.
"""

from pathlib import Path
from typing import Any, Final

import pytest

from minfer import LLM
from minfer.records.messages import Discarded, Preempted
from tests.circles import claimed, long
from tests.effects.live.test_states import (
    MADE,
    SMALL,
    generate,
    prompts,
    tight,
    tokens_of,
)
from tests.effects.test_kv_host_memory import reasons_of
from tests.effects.tiny_families import VARIANTS, greedy_tokens, save

NEMOTRON: Final = {"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2}
# With attention in both halves of their layers.
FAMILIES: Final = {
    "Qwen3Next": VARIANTS["Qwen3Next", "listed"],
    "Qwen3_5": VARIANTS["Qwen3_5", "listed"],
    "Qwen3_5Moe": VARIANTS["Qwen3_5Moe", "listed"],
    "GraniteMoeHybrid": VARIANTS["GraniteMoeHybrid", "experts"],
    "NemotronH": VARIANTS["NemotronH", "dense"] | NEMOTRON,
    "FalconH1": VARIANTS["FalconH1", "plain"],
    "Lfm2": VARIANTS["Lfm2", "plain"],
    "Lfm2Moe": VARIANTS["Lfm2Moe", "plain"],
    "KimiLinear": VARIANTS["KimiLinear", "plain"],
    "Jamba": VARIANTS["Jamba", "plain"],
}
NAMES: Final = [*FAMILIES]
STAGES: Final = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16}


def expected_tokens(folder: Path, name: str) -> list[list[int]]:
    """What transformers makes of a family's checkpoint, which is written to `folder`."""
    theirs = save(str(folder), name, FAMILIES[name])
    return [greedy_tokens(theirs, prompt, MADE) for prompt in prompts()]


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES[::3], *claimed((*NAMES[1::3], *NAMES[2::3]))])
def test_two_stages_make_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    """From an empty cache, then from kept states."""
    expected, texts = expected_tokens(tmp_path, name), prompts()
    with LLM(**{**SMALL, **STAGES, "model": str(tmp_path)}) as llm:
        passes = [generate(llm, texts) for _ in range(2)]
    assert [tokens_of(outputs) for outputs in passes] == [expected] * 2
    assert any(output.num_cached_tokens for output in passes[1])


CASES: Final[list[dict[str, Any]]] = [
    {"tensor_parallel_size": 2},
    {"kv_host_memory": 1 << 24, "kv_host_choice": "load"},
    {"steps_in_flight": 1},
    {"pipeline_parallel_size": 3},
]


@pytest.mark.parametrize("case", long(CASES), ids=str)
def test_stages_beside_ranks_tiers_and_preemption(
    case: dict[str, Any], tmp_path: Path
) -> None:
    """In a pool in which the rows do not fit together."""
    name = "FalconH1" if "pipeline_parallel_size" in case else "Qwen3Next"
    expected, texts = expected_tokens(tmp_path, name), prompts()
    settings = {**SMALL, **STAGES, **case, "model": str(tmp_path)}
    with LLM(**{**settings, "num_gpu_blocks_override": tight(settings)}) as llm:
        reasons = reasons_of(llm)
        passes = [generate(llm, texts) for _ in range(2)]
    assert [tokens_of(outputs) for outputs in passes] == [expected] * 2
    assert any(isinstance(reason, Preempted) for reason in reasons)
    assert not any(isinstance(reason, Discarded) for reason in reasons)
