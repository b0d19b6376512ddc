"""Engines of several ranks, as processes of the CPU, say what one process says."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from minfer import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tests.circles import claimed, long

TIE: Final = 1e-4  # of log-probabilities: two tokens are equally good
STORY: Final = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n"
)
PROMPTS: Final = [
    STORY,
    "import os\n",
    STORY + "\n\ndef write(",
    "class Node:\n",
    "x = 1",
]
LONG: Final = STORY * 12
GREEDY: Final = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
WORD: Final = StructuredOutputs(regex="[a-z]+;")
KINDS: Final = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=3, n=2, max_tokens=16),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20),
    "scored": SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1),
    "bound": SamplingParams(temperature=0, max_tokens=12, structured_outputs=WORD),
    "stopped": SamplingParams(temperature=0, max_tokens=30, stop=["return"]),
}
SMALL: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,  # prompts are computed in chunks
    "max_model_len": 640,
    "num_gpu_blocks_override": 60,
}
DRAFTED: Final = {"method": "ngram", "num_speculative_tokens": 3}
SETTINGS: Final[list[Any]] = [
    {"tensor_parallel_size": 2},
    *long(
        [
            {"tensor_parallel_size": 2, "steps_in_flight": 1},
            {"tensor_parallel_size": 2, "speculative_config": DRAFTED},
            {"tensor_parallel_size": 2, "num_gpu_blocks_override": 41},  # preempts
            {"tensor_parallel_size": 2, "kv_host_memory": 64 << 20},
            {"tensor_parallel_size": 4},
            {"pipeline_parallel_size": 2},
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        ]
    ),
    *claimed([{"pipeline_parallel_size": 3, "num_gpu_blocks_override": 41}]),
]


def engine(**settings: Any) -> LLM:
    return LLM(**{**SMALL, **settings})


@pytest.fixture(scope="module")
def wanted() -> Iterator[LLM]:
    """One process."""
    with closing(engine(num_gpu_blocks_override=400)) as llm:
        yield llm


def same(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two answers are equal up to a token that is as good as another."""
    for mine, its in zip(one.outputs, other.outputs, strict=True):
        for at, (a, b) in enumerate(zip(mine.token_ids, its.token_ids, strict=False)):
            if a == b:
                continue
            if not mine.logprobs:
                return False
            found = mine.logprobs[at]
            return b in found and abs(found[a].logprob - found[b].logprob) < TIE
        if len(mine.token_ids) != len(its.token_ids):
            return False
    return True


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ranks_say_what_one_process_says(settings: dict[str, Any], wanted: LLM) -> None:
    with closing(engine(**settings)) as llm:
        for names in (KINDS, ("greedy", "seeded")):  # the second time, from the cache
            for name in names:
                params = KINDS[name]
                if name == "scored" and "kv_host_memory" in settings:
                    continue
                mine = llm.generate(PROMPTS, params, use_tqdm=False)
                its = wanted.generate(PROMPTS, params, use_tqdm=False)
                for one, other in zip(mine, its, strict=True):
                    assert same(one, other), (name, one.outputs, other.outputs)
        long_prompts = [LONG + one for one in PROMPTS]
        mine = llm.generate(long_prompts, GREEDY, use_tqdm=False)
        its = wanted.generate(long_prompts, GREEDY, use_tqdm=False)
        assert all(map(same, mine, its))
        vectors = [one.embed(PROMPTS, use_tqdm=False) for one in (llm, wanted)]
        for vector, expected in zip(*vectors, strict=True):
            assert vector.embedding == pytest.approx(expected.embedding, abs=1e-4)
