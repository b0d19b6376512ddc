"""Draft heads change no token, whatever the engine does: MTP heads of tiny checkpoints of
all families, with their published names.
"""

from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

from bench.train_head import train
from minfer import LLM, SamplingParams
from minfer.records.messages import Loading, Preempted
from tests.circles import long
from tests.effects.live.test_llm_speculation import FEW, TIGHT, reported, requested
from tests.effects.live.test_llm_speculation import prompts as bundled_prompts
from tests.effects.live.test_states import BLOCK, SMALL, prompts, tight
from tests.effects.live.test_structured_speculation import serve as serve_structured
from tests.effects.test_kv_disk import disk, settle
from tests.effects.test_kv_host_memory import reasons_of
from tests.effects.tiny_families import VARIANTS
from tests.effects.tiny_heads import NAMES, save_with_mtp

FIRST: Final = ["Qwen3Next", "DeepseekV3"]
FAMILIES: Final = [*FIRST, *long(sorted(NAMES.keys() - {*FIRST}))]
VARIANT_OF: Final = dict(reversed([*VARIANTS]))  # the first of each family
MTP: Final = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
PARAMS: Final = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, max_tokens=10, ignore_eos=True, logprobs=1, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, n=2, max_tokens=9, seed=2),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=8, ignore_eos=True),
]
CASE: Final = "hits and chunks"
CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"enable_prefix_caching": False},
    CASE: {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "two steps in flight": {"steps_in_flight": 2},
    "one step in flight": {"steps_in_flight": 1},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save_with_mtp(folder, family, VARIANTS[family, VARIANT_OF[family]])
        return folder

    return make


def served(llm: LLM) -> list[Any]:
    """What is answered twice: the second time with what the first left in the cache."""
    texts = [[*text] for text in prompts()]
    params = [PARAMS[i % len(PARAMS)] for i in range(len(texts))]
    outputs = [
        output for _ in range(2) for output in llm.generate(texts, params, use_tqdm=False)
    ]
    return [
        (completion.token_ids, completion.finish_reason)
        for output in outputs
        for completion in output.outputs
    ]


@cache
def without(folder: Path) -> list[Any]:
    with LLM(model=str(folder), **SMALL) as llm:
        return served(llm)


@pytest.mark.parametrize("case", [CASE, *long(sorted(CASES.keys() - {CASE}))])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without(
    family: str, case: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    settings = {**SMALL, **CASES[case], "model": str(folder)}
    with LLM(speculative_config=MTP, **settings) as llm:
        assert served(llm) == without(folder)
        executor: Any = llm.worker.driver.executor
        assert executor.runner.drafter is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_through_preemption(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    folder, reasons = folder_of(family), list[Any]()
    settings = {**SMALL, "model": str(folder), "speculative_config": MTP}
    pages = tight(settings)
    for fewer in (2, 3, 6):
        with LLM(**{**settings, "num_gpu_blocks_override": pages - fewer}) as llm:
            reasons.append(reasons_of(llm))
            assert served(llm) == without(folder)
    assert any(isinstance(reason, Preempted) for reason in chain(*reasons))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_beside_host_memory(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    """Whether one is preempted, too, depends on when loads end."""
    folder = folder_of(family)
    settings = {**SMALL, "model": str(folder), "kv_host_memory": 1 << 24}
    settings |= {"kv_host_choice": "load", "speculative_config": MTP}
    with LLM(**{**settings, "num_gpu_blocks_override": tight(settings)}) as llm:
        reasons = reasons_of(llm)
        assert served(llm) == without(folder)
    assert any(isinstance(reason, Loading) for reason in reasons)


@pytest.mark.long
def test_a_trained_head_changes_no_token_of_the_bundled_model(tmp_path: Path) -> None:
    """Prompts in chunks, hits, preemption, n samples, penalties, grammars beside."""
    train(tmp_path, steps=25, rows=2)
    config = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    answers, wanted = list[Any](), requested(FEW)
    ways = (None, {**config, "adaptive": False}, {**config, "adaptive": True})
    for way, depth in zip(ways, (2, 2, 1), strict=True):
        settings = {**TIGHT, "steps_in_flight": depth, "speculative_config": way}
        with LLM(device="cpu", dtype="float32", **settings) as llm:
            outputs = llm.generate(bundled_prompts(FEW), wanted, use_tqdm=False)
            answers.append((reported(outputs), serve_structured(llm, 10)))
        if way is not None and not way["adaptive"]:
            assert sum(output.metrics.accepted_draft_tokens for output in outputs) > 0
            assert sum(output.metrics.preemptions for output in outputs) > 0
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


@pytest.mark.long
def test_two_ranks_draft_as_one(folder_of: Callable[[str], Path]) -> None:
    """Each with its part of the head's layer, and of the shared matrices."""
    answers, accepted = list[Any](), list[int]()
    for ranks in (1, 2):
        settings = {**SMALL, "model": str(folder_of("Glm4Moe"))}
        settings |= {"tensor_parallel_size": ranks, "speculative_config": MTP}
        with LLM(**settings) as llm:
            texts = [[*text] for text in prompts()]
            outputs = llm.generate(texts, PARAMS[0], use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        drafts = [output.metrics.accepted_draft_tokens for output in outputs]
        accepted.append(sum(drafts))
    assert answers[0] == answers[1]
    assert accepted[0] == accepted[1]


@pytest.mark.long
def test_blocks_on_disk_have_the_keys_of_a_head(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Another engine drafts from them as well as the first; one without a head does not
    read them.
    """
    settings = {**SMALL, **disk(tmp_path), "model": str(folder_of("Glm4Moe"))}
    text, accepted, cached = [*prompts()[4]], list[int](), list[int]()
    for way in (MTP, MTP, None):
        with LLM(**settings, speculative_config=way) as llm:
            [output] = llm.generate([text], PARAMS[0], use_tqdm=False)
            if not cached:
                settle(llm, len(text) // BLOCK)
        cached.append(output.num_cached_tokens or 0)
        accepted.append(output.metrics.accepted_draft_tokens)
    assert cached[1] > 0 == cached[0] == cached[2]
    assert accepted[2] == 0


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_changes_no_token(
    depth: int, folder_of: Callable[[str], Path]
) -> None:
    """One fails before anything is computed, two when the target has run."""
    folder, calls = folder_of("Qwen3Next"), 0
    settings = {**SMALL, "model": str(folder), "steps_in_flight": depth}
    with LLM(**settings, speculative_config=MTP) as llm:
        executor: Any = llm.worker.driver.executor
        step = executor.runner.step
        model = step.model

        def failing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("before")
            logits = model(*arguments)
            if calls in (9, 16):
                raise RuntimeError("behind")
            return logits

        step.model = failing
        assert served(llm) == without(folder)
    assert calls > 16
