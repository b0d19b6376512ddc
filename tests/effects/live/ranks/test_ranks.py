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
def reference() -> Iterator[LLM]:
    """One process."""
    with closing(engine(num_gpu_blocks_override=400)) as llm:
        yield llm


def same(first: RequestOutput, second: RequestOutput) -> bool:
    """Whether two answers are equal up to a token that is as good as another."""
    for first_sample, second_sample in zip(first.outputs, second.outputs, strict=True):
        for place, (a, b) in enumerate(
            zip(first_sample.token_ids, second_sample.token_ids, strict=False)
        ):
            if a == b:
                continue
            if not first_sample.logprobs:
                return False
            logprobs = first_sample.logprobs[place]
            return b in logprobs and abs(logprobs[a].logprob - logprobs[b].logprob) < TIE
        if len(first_sample.token_ids) != len(second_sample.token_ids):
            return False
    return True


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ranks_say_what_one_process_says(
    settings: dict[str, Any], reference: LLM
) -> None:
    with closing(engine(**settings)) as llm:
        for names in (KINDS, ("greedy", "seeded")):  # the second time, from the cache
            for name in names:
                params = KINDS[name]
                if name == "scored" and "kv_host_memory" in settings:
                    continue
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
                single_outputs = reference.generate(PROMPTS, params, use_tqdm=False)
                for output, expected_output in zip(outputs, single_outputs, strict=True):
                    assert same(output, expected_output), (
                        name,
                        output.outputs,
                        expected_output.outputs,
                    )
        long_prompts = [LONG + prompt for prompt in PROMPTS]
        outputs = llm.generate(long_prompts, GREEDY, use_tqdm=False)
        single_outputs = reference.generate(long_prompts, GREEDY, use_tqdm=False)
        assert all(map(same, outputs, single_outputs))
        vectors = [engine.embed(PROMPTS, use_tqdm=False) for engine in (llm, reference)]
        for vector, expected in zip(*vectors, strict=True):
            assert vector.embedding == pytest.approx(expected.embedding, abs=1e-4)
