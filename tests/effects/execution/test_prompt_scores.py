"""Log-probabilities of prompts: as transformers' logits say, however the work is cut."""

import asyncio
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve

from minfer import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from minfer.effects.execution.packing.prompt_scores import (
    ChunkScores,
    ScoredChunk,
    Scorer,
)
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.output_processor import OutputProcessor
from minfer.records.messages import Preempted
from minfer.records.plan import NewRow
from minfer.records.token_logprobs import TokenLogprobs, unpack_parts
from minfer.sampling.reference_sampler import RowSampling
from tests.effects.execution.test_gpu import runner_of
from tests.effects.execution.test_pooling import PLAIN, TwoEngines, made, prompts
from tests.effects.tiny_families import OTHERS, VARIANTS

SCORED: Final = SamplingParams(
    temperature=0, max_tokens=6, prompt_logprobs=3, ignore_eos=True
)
ONLY: Final = SamplingParams(max_tokens=0, prompt_logprobs=3)
CLOSE: Final = 2e-4  # what float32 leaves of sums in another order


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TwoEngines:
    folder = tmp_path_factory.mktemp("llama")
    return made(folder, "Llama", VARIANTS["Llama", "plain"])


def check(reference_model: Any, outputs: list[RequestOutput], likeliest: int = 3) -> None:
    """Each token but the first has its log-probability, rank and likeliest rivals."""
    for output in outputs:
        ids = list(output.prompt_token_ids)
        with torch.inference_mode():
            right = reference_model(torch.tensor([ids])).logits[0].log_softmax(-1)
        reported = output.prompt_logprobs
        assert reported is not None
        assert len(reported) == len(ids)
        assert reported[0] is None
        for token, by_id, values in zip(ids[1:], reported[1:], right, strict=False):
            assert by_id is not None
            assert next(iter(by_id)) == token
            top = {entry.rank: entry.logprob for entry in by_id.values()}
            best = values.topk(likeliest).values
            for rank, value in enumerate(best.tolist(), 1):
                assert top[rank] == pytest.approx(value, abs=CLOSE)
            own_entry = by_id[token]
            assert own_entry.logprob == pytest.approx(values[token].item(), abs=CLOSE)
            above = int((values > values[token] + CLOSE).sum())
            not_below = int((values > values[token] - CLOSE).sum())
            assert above < own_entry.rank <= not_below


def scored(llm: LLM, ids: list[list[int]]) -> list[RequestOutput]:
    outputs = llm.generate(ids, SCORED)
    outputs += llm.generate(ids, ONLY)
    for output in outputs[len(ids) :]:
        (sample,) = output.outputs
        assert (sample.token_ids, sample.finish_reason) == ([], "length")
    return outputs


@pytest.mark.long
@pytest.mark.parametrize("tokens", [8, 11, 512])
def test_chunks_change_nothing(llama: TwoEngines, tokens: int) -> None:
    with LLM(llama.folder, **PLAIN | {"max_num_batched_tokens": tokens}) as llm:
        check(llama.theirs, scored(llm, prompts()))


@pytest.mark.long
def test_padding_is_not_scored(
    llama: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with LLM(llama.folder, **PLAIN | {"max_num_batched_tokens": 20}) as llm:
        expected = [
            output.outputs[0].token_ids for output in llm.generate(prompts(), plain)
        ]
        runner = runner_of(llm)
        monkeypatch.setattr(runner.shortcuts, "graphs", True)  # as on a GPU
        monkeypatch.setattr(runner, "_replay", runner.step)
        all_params = [plain] * 3 + [SCORED] * 3 + [plain] * 3
        beside = prompts()[:3]
        outputs = llm.generate([*beside, *beside, *prompts()[3:]], all_params)
    check(llama.theirs, outputs[3:6])
    actual = [output.outputs[0].token_ids for output in (*outputs[:3], *outputs[6:])]
    assert actual == expected


@pytest.mark.long
def test_the_bundled_model_is_as_transformers_has_it() -> None:
    from transformers import AutoModelForCausalLM

    reference_model = AutoModelForCausalLM.from_pretrained(
        bundled_folder(), dtype=torch.float32
    )
    settings: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 32}
    text = "class Stack:\n    def push(self, item):\n" * 4
    for limits in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 2}):
        with LLM(**settings | limits) as llm:
            check(reference_model, llm.generate([text, "import os"], SCORED))


@pytest.mark.long
@pytest.mark.parametrize(
    "key",
    [("Qwen2", "windows alternate"), ("Qwen3", "biases, windows"), ("Gemma3n", "all")],
    ids=lambda key: " ".join(key),
)
def test_families_with_windows(tmp_path: Path, key: tuple[str, str]) -> None:
    beside = made(tmp_path, key[0], VARIANTS[key])
    with LLM(beside.folder, **PLAIN | {"max_num_batched_tokens": 9}) as llm:
        check(beside.theirs, scored(llm, prompts(3)))


@pytest.mark.long
@pytest.mark.parametrize("key", [("Olmo2", "dynamic rope"), ("Nemotron", "plain")])
def test_models_of_transformers_are_scored_too(
    tmp_path: Path, key: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = made(tmp_path, key[0], OTHERS[key])
    with LLM(beside.folder, **PLAIN) as llm:
        monkeypatch.setattr(runner_of(llm).scorer, "max_positions", 7)
        check(beside.theirs, scored(llm, prompts(3)))


def test_few_logits_are_there_at_once(
    llama: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list[int]()
    take = Scorer.scored

    def noted(self: Scorer, targets: Any) -> Any:
        requested, logprobs = take(self, targets)

        def seen(first: int, logits: torch.Tensor) -> None:
            rows.append(len(logits))
            requested.take(first, logits)

        return evolve(requested, chunk_size=5, take=seen), logprobs

    monkeypatch.setattr(Scorer, "scored", noted)
    with LLM(llama.folder, **PLAIN) as llm:
        check(llama.theirs, llm.generate(prompts(), ONLY))
    assert max(rows) == 5
    assert sum(rows) == sum(len(ids) - 1 for ids in prompts())


def test_a_prefix_is_computed_again_and_serves_neighbours(llama: TwoEngines) -> None:
    ids = prompts()[1]
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(llama.folder, **PLAIN) as llm:
        outputs = []
        for params, cached in ((ONLY, 0), (plain, 48), (SCORED, 0), (plain, 48)):
            (output,) = llm.generate(ids, params)
            assert output.num_cached_tokens == cached
            outputs.append(output)
        check(llama.theirs, [outputs[0], outputs[2]])
        assert outputs[1].prompt_logprobs is None
        assert len({tuple(output.outputs[0].token_ids) for output in outputs[1:]}) == 1


@pytest.mark.long
def test_a_preempted_row_reports_each_token_once(llama: TwoEngines) -> None:
    tight = {
        "num_gpu_blocks_override": 20,
        "max_model_len": 80,
        "max_num_batched_tokens": 8,
    }
    reasons: list[Any] = []
    inbox: SimpleQueue[OutputProcessor] = SimpleQueue()
    with LLM(llama.folder, **PLAIN | tight) as llm:
        llm.client.listen(lambda news: reasons.extend(getattr(news, "reasons", ())))
        long = evolve(SCORED, max_tokens=20)
        ids = [ids[:25] for ids in prompts(5)[1:]]
        jobs = llm._make_checked_batch(ids, long, None)
        llm.frontend.submit(jobs.processors)
        check(llama.theirs, [jobs.inbox.get().take() for _ in jobs.processors])
    assert any(isinstance(reason, Preempted) for reason in reasons)
    assert inbox.empty()


@pytest.mark.long
def test_one_of_several_samples_has_the_prompt_scored(llama: TwoEngines) -> None:
    ids = prompts()[1]
    params = evolve(SCORED, n=3, temperature=1.0, logprobs=1, seed=4)
    with LLM(llama.folder, **PLAIN | {"max_num_batched_tokens": 9}) as llm:
        (output,) = llm.generate(ids, params)
        check(llama.theirs, [output])
        (plain,) = llm.generate(ids, evolve(params, prompt_logprobs=None))
        reported = [sample.token_ids for sample in output.outputs]
        assert reported == [sample.token_ids for sample in plain.outputs]
        for news in llm.stream(ids, params):
            check(llama.theirs, [news])


def test_many_at_once_in_a_loop(llama: TwoEngines) -> None:
    async def one(llm: AsyncLLM, ids: list[int]) -> RequestOutput:
        async for output in llm.generate_deltas(ids, SCORED, streaming=False):
            return output
        raise AssertionError("no output")

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(llama.folder, **PLAIN) as llm:
            return await asyncio.gather(*(one(llm, ids) for ids in prompts()))

    check(llama.theirs, asyncio.run(main()))


@pytest.mark.long
def test_a_prompt_may_fill_the_context_if_nothing_is_to_follow(
    llama: TwoEngines,
) -> None:
    prompt = Random(1).choices(range(160), k=256)
    with LLM(llama.folder, **PLAIN) as llm:
        check(llama.theirs, llm.generate([prompt], ONLY))
        for ids, params, reason in (
            ([5] * 257, ONLY, "257 tokens; this model's maximum context length is 256"),
            (prompt, SCORED, "at least one must be left"),
        ):
            with pytest.raises(RequestError, match=reason):
                llm.generate([ids], params)


def test_without_a_model_there_is_nothing_to_be_scored_by() -> None:
    with LLM(executor="dry") as llm:
        for params, param in (
            (SamplingParams(prompt_logprobs=0), "prompt_logprobs"),
            (SamplingParams(best_of=2), "best_of"),
        ):
            with pytest.raises(RequestError, match="dry executor has no model") as caught:
                llm.generate("x", params)
            assert caught.value.param == param
        (output,) = llm.generate("x", SamplingParams(max_tokens=0))
        assert output.outputs[0].token_ids == []


OPENED: Final = NewRow(
    index=0,
    name=("r7", 0),
    known=(1, 2, 3),
    prompt=3,
    last_index=5,
    sampling=RowSampling(seed=0, sample=0, prompt_logprobs=1),
    tables=((0,),),
)


def test_what_comes_back_is_read_by_rows_and_must_be_finite() -> None:
    words = torch.zeros(3, 2, 5, dtype=torch.int32)
    words[1:, 0, :2] = torch.tensor([[4, 9], [1, 8]], dtype=torch.int32)
    values = torch.tensor([[-2.0, -0.5], [-0.25, -0.25]])
    words[1:, 1, :2] = values.view(torch.int32)
    stretch = ScoredChunk(entry=1, owner=OPENED, first=1, offset=1, count=2, width=2)
    nothing, emitted, padding = ChunkScores((stretch,), words).read(3)
    assert nothing == padding == b""
    assert [*unpack_parts(emitted, OPENED.known)] == [
        (1, TokenLogprobs(2, -2.0, 4, (9,), (-0.5,))),
        (2, TokenLogprobs(3, -0.25, 1, (8,), (-0.25,))),
    ]
    words[2, 1, 0] = torch.tensor(np.nan).view(torch.int32)
    with pytest.raises(RuntimeError, match=r"not finite for request 'r7' \(sample 0\)"):
        ChunkScores((stretch,), words).read(3)
