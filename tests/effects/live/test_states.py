"""Engines of models with recurrent layers: greedy tokens are those of transformers'
`generate`, whatever the engine does.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve, frozen

from minfer import LLM, RequestOutput, SamplingParams
from minfer.effects.setup import recurrent_layers
from minfer.records.messages import Discarded, Loading, Preempted
from tests.circles import claimed, long
from tests.effects.test_kv_host_memory import reasons_of
from tests.effects.tiny_families import VARIANTS, greedy_tokens, save

FAMILIES: Final = {
    "Qwen3Next": ("Qwen3Next", "plain"),
    "GraniteMoeHybrid": ("GraniteMoeHybrid", "experts"),
    # Each layer has an attention and a recurrent sublayer beside it.
    "FalconH1": next(key for key in VARIANTS if key[0] == "FalconH1"),
    "KimiLinear": ("KimiLinear", "plain"),
    "Jamba": ("Jamba", "plain"),
}
NAMES: Final = [*list(FAMILIES)[:3], *long(list(FAMILIES)[3:])]
MADE: Final = 12  # tokens of a request
BLOCK: Final = 8
SMALL: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 400,
    "skip_tokenizer_init": True,
}
GREEDY: Final = SamplingParams(temperature=0, max_tokens=MADE, ignore_eos=True)
NGRAM: Final = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,
}
HOST: Final = {"kv_host_memory": 1 << 24, "kv_host_choice": "load"}


@frozen
class Reference:
    """A checkpoint, and the tokens that transformers makes with it."""

    folder: Path
    tokens: Callable[[tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @cache
    def make(name: str) -> Reference:
        folder = tmp_path_factory.mktemp("model")
        theirs = save(str(folder), FAMILIES[name][0], VARIANTS[FAMILIES[name]])

        @cache
        def tokens(prompt: tuple[int, ...]) -> list[int]:
            return greedy_tokens(theirs, prompt, MADE)

        return Reference(folder, tokens)

    return make


def prompts() -> list[tuple[int, ...]]:
    """Of all lengths; some begin alike, in whole blocks and within one."""
    draw = random.Random(0)
    lengths = (1, BLOCK, 21, 40, 64, 5)
    alone = [tuple(draw.choices(range(160), k=length)) for length in lengths]
    shared = alone[3]
    return [*alone, shared[:32] + alone[2], shared[:19] + alone[5], (*shared, *alone[1])]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*output.outputs[0].token_ids] for output in outputs]


def generate(llm: LLM, texts: list[tuple[int, ...]]) -> list[RequestOutput]:
    return llm.generate([[*text] for text in texts], GREEDY, use_tqdm=False)


CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"enable_prefix_caching": False},
    "prefix cache": {},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "few rows": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
}
INSIDE: Final = {"prefix cache": 9, "chunked prefill": 1}  # cases that keep states inside


@pytest.mark.parametrize("depth", [2, *long([1]), *claimed([3])])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(
    name: str,
    case: str,
    depth: int,
    reference_of: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = INSIDE.get(case, 2048) - 1
    monkeypatch.setattr(recurrent_layers, "captured_tokens", lambda *_: graph)
    reference, texts = reference_of(name), prompts()
    expected = [reference.tokens(text) for text in texts]
    settings = {**SMALL, **CASES[case], "model": str(reference.folder)}
    with LLM(steps_in_flight=depth, **settings) as llm:
        passes = [generate(llm, texts) for _ in range(2)]
    for outputs in passes:
        assert tokens_of(outputs) == expected
    hits = sum(output.num_cached_tokens for output in passes[1])
    assert (hits > 0) == (case != "plain")


@pytest.mark.parametrize("depth", [2, *long([1])])
@pytest.mark.parametrize("name", NAMES)
def test_preempted_requests_go_on_from_a_kept_state(
    name: str, depth: int, reference_of: Callable[[str], Reference]
) -> None:
    reference, texts = reference_of(name), prompts()
    settings = {**SMALL, "model": str(reference.folder), "steps_in_flight": depth}
    with LLM(**{**settings, "num_gpu_blocks_override": tight(settings)}) as llm:
        reasons = reasons_of(llm)
        passes = [generate(llm, texts) for _ in range(2)]
    for outputs in passes:
        assert tokens_of(outputs) == [reference.tokens(text) for text in texts]
    assert any(isinstance(reason, Preempted) for reason in reasons)


def tight(settings: dict[str, Any]) -> int:
    """A pool in which the rows do not fit together."""
    with LLM(**settings) as llm:
        config = llm.worker.driver.config
    return 2 * config.most_pages(10)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_goes_on_where_the_first_ended(
    name: str, reference_of: Callable[[str], Reference]
) -> None:
    """Of its prompt, what the first turn read and wrote is found, but for less than a
    block.
    """
    reference, text = reference_of(name), prompts()[3]
    with LLM(**{**SMALL, "model": str(reference.folder)}) as llm:
        for _ in range(3):
            [output] = generate(llm, [text])
            made = tokens_of([output])[0]
            assert made == reference.tokens(text)
            known = len(text) + len(made) - 1  # the last token is not an input
            text = (*text, *made, 5, 9, 11)
            [again] = llm.generate([[*text]], evolve(GREEDY, max_tokens=1))
            assert again.num_cached_tokens == known // BLOCK * BLOCK


@pytest.mark.parametrize("name", NAMES)
def test_states_come_back_from_host_memory(
    name: str, reference_of: Callable[[str], Reference]
) -> None:
    """Prompts one by one, more than the pool holds, and the first of them again."""
    reference, draw = reference_of(name), random.Random(1)
    texts = [tuple(draw.choices(range(160), k=70)) for _ in range(4)]
    settings = {**SMALL, **HOST, "model": str(reference.folder)}
    with LLM(**{**settings, "num_gpu_blocks_override": tight(settings)}) as llm:
        reasons = reasons_of(llm)
        for text in (*texts, texts[0]):
            assert tokens_of(generate(llm, [text])) == [reference.tokens(text)]
        loads = [reason for reason in reasons if isinstance(reason, Loading)]
    assert [(load.blocks, load.hit) for load in loads] == [(8, 0)]


@pytest.mark.parametrize(
    ("depth", "drafts"), [(2, False), *long([(1, False), (3, False), (2, True)])]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_failed_step_leaves_no_trace_in_states(
    name: str, depth: int, drafts: bool, reference_of: Callable[[str], Reference]
) -> None:
    """One fails before anything is computed, two when all is, states included, but for
    those of rows with drafts.
    """
    reference, texts, calls = reference_of(name), prompts(), 0
    settings = {**SMALL, "max_num_batched_tokens": 16, "model": str(reference.folder)}
    if drafts:
        settings["speculative_config"] = NGRAM
    with LLM(**settings, steps_in_flight=depth) as llm:
        step: Any = llm.worker.driver.executor
        step = step.runner.step
        model, reasons = step.model, reasons_of(llm)

        def failing(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("before")
            logits: torch.Tensor = model(*arguments)
            if calls in (9, 16):
                raise RuntimeError("behind")
            return logits

        step.model = failing
        outputs = generate(llm, texts)
    assert tokens_of(outputs) == [reference.tokens(text) for text in texts]
    assert sum(isinstance(reason, Discarded) for reason in reasons) >= 3


@pytest.mark.parametrize(
    ("depth", "drafts"), [(2, False), *long([(1, False), (2, True)])]
)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_half_of_a_state_each(
    name: str, depth: int, drafts: bool, reference_of: Callable[[str], Reference]
) -> None:
    reference, texts = reference_of(name), prompts()
    settings = {**SMALL, "max_num_batched_tokens": 16, "model": str(reference.folder)}
    if drafts:
        settings["speculative_config"] = NGRAM
    ranks = {"tensor_parallel_size": 2, "steps_in_flight": depth}
    with LLM(**{**settings, **ranks}) as llm:
        for _ in range(2):
            outputs = generate(llm, texts)
            assert tokens_of(outputs) == [reference.tokens(text) for text in texts]
        assert any(output.num_cached_tokens for output in outputs)
        assert drafts == any(output.metrics.draft_tokens for output in outputs)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_states_in_bfloat16_say_nearly_the_same(
    name: str, reference_of: Callable[[str], Reference]
) -> None:
    reference, texts = reference_of(name), prompts()
    settings = {**SMALL, "model": str(reference.folder), "state_dtype": "bfloat16"}
    with LLM(**settings) as llm:
        first, second = (tokens_of(generate(llm, texts)) for _ in range(2))
    assert [tokens[0] for tokens in first] == [tokens[0] for tokens in second]
    expected = [reference.tokens(text) for text in texts]
    same = sum(
        tokens[0] == wanted[0] for tokens, wanted in zip(first, expected, strict=True)
    )
    assert same >= len(texts) - 2
