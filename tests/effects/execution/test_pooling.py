"""Prompts as vectors: as transformers' hidden states say, however the work is cut."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from minfer import LLM, AsyncLLM, EmbeddingRequestOutput, RequestError, SamplingParams
from minfer.effects.execution.packing.pooling import PooledChunk, Vectors
from minfer.effects.execution.running.plan_launcher import unsupported_request
from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.text.output_processor import OutputProcessor
from minfer.records.config import EngineConfig
from minfer.records.messages import Preempted
from minfer.records.plan import NewRow, Plan
from minfer.records.request import MEAN, POOLINGS
from minfer.sampling.reference_sampler import RowSampling
from tests.effects.tiny_families import OTHERS, VARIANTS, save

PLAIN: Final[dict[str, Any]] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
GREEDY: Final = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@frozen(eq=False)
class TwoEngines:
    """A checkpoint, and transformers' model of it."""

    folder: str
    theirs: Any

    def right(self, ids: list[int], pooling: str) -> list[float]:
        """What transformers' hidden states are pooled to."""
        with torch.inference_mode():
            states = self.theirs.base_model(torch.tensor([ids])).last_hidden_state[0]
        pooled = states[-1] if pooling == "last" else states.mean(0)
        vector: list[float] = pooled.tolist()
        return vector


def made(folder: Path, family: str, config: dict[str, Any]) -> TwoEngines:
    return TwoEngines(str(folder), save(str(folder), family, config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TwoEngines:
    folder = tmp_path_factory.mktemp("llama")
    return made(folder, "Llama", VARIANTS["Llama", "plain"])


@pytest.fixture
def llm(llama: TwoEngines) -> Iterator[LLM]:
    with LLM(llama.folder, **PLAIN) as engine:
        yield engine


def prompts(count: int = 6, longest: int = 50) -> list[list[int]]:
    rng = Random(count)
    lengths = [1, longest, *(rng.randint(2, longest) for _ in range(count - 2))]
    return [rng.choices(range(160), k=length) for length in lengths]


def check(
    beside: TwoEngines, outputs: list[EmbeddingRequestOutput], pooling: str
) -> None:
    for output in outputs:
        assert (output.finish_reason, output.error) == ("stop", "")
        right = beside.right(list(output.prompt_token_ids), pooling)
        np.testing.assert_allclose(output.embedding, right, rtol=2e-4, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "key",
    [
        ("Llama", "plain"),
        ("Qwen2", "windows alternate"),
        ("Qwen3", "biases, windows"),
        ("Mistral", "window, tied"),
        ("Gemma3n", "all"),
    ],
    ids=lambda key: " ".join(key),
)
def test_every_family_gives_transformers_states(
    tmp_path: Path, key: tuple[str, str]
) -> None:
    beside = made(tmp_path, key[0], VARIANTS[key])
    with LLM(beside.folder, **PLAIN | {"max_num_batched_tokens": 9}) as engine:
        for pooling in POOLINGS:
            outputs = engine.embed(prompts(), pooling=pooling, normalize=False)
            check(beside, outputs, pooling)


@pytest.mark.long
@pytest.mark.parametrize("key", [("Olmo2", "dynamic rope"), ("Nemotron", "plain")])
def test_models_of_transformers_are_pooled_too(
    tmp_path: Path, key: tuple[str, str]
) -> None:
    beside = made(tmp_path, key[0], OTHERS[key])
    with LLM(beside.folder, **PLAIN) as engine:
        for pooling in POOLINGS:
            check(
                beside,
                engine.embed(prompts(3), pooling=pooling, normalize=False),
                pooling,
            )


def test_a_prefix_is_hit_by_the_last_token_and_not_by_a_mean(
    llm: LLM, llama: TwoEngines
) -> None:
    ids = prompts()[1]
    for pooling, cached in (("mean", 0), ("last", 48), ("mean", 0)):
        (output,) = llm.embed(ids, pooling=pooling, normalize=False)
        assert output.num_cached_tokens == cached
        check(llama, [output], pooling)


def test_vectors_have_length_one_by_default(llm: LLM) -> None:
    ids = prompts()
    for plain, scaled in zip(
        llm.embed(ids, normalize=False), llm.embed(ids), strict=True
    ):
        vector = np.array(plain.embedding)
        right = vector / np.linalg.norm(vector)
        np.testing.assert_allclose(scaled.embedding, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_row_begins_again(llama: TwoEngines, pooling: str) -> None:
    tight = {
        "num_gpu_blocks_override": 20,
        "max_model_len": 80,
        "max_num_batched_tokens": 8,
    }
    reasons: list[Any] = []
    inbox: SimpleQueue[OutputProcessor] = SimpleQueue()
    with LLM(llama.folder, **PLAIN | tight) as engine:
        engine.client.listen(lambda news: reasons.extend(getattr(news, "reasons", ())))
        first = engine._make_checked_batch(
            [ids[:9] for ids in prompts(5)[2:]], GREEDY, None
        ).processors
        pooled = [
            engine._make_processor(
                ids, inbox.put, pooling, count=10 + i, urgency=SchedulingHints()
            )
            for i, ids in enumerate([prompts()[1][:30], prompts()[1][5:35]])
        ]
        engine.frontend.submit([*first, *pooled])  # in one turn
        for _ in pooled:
            check(llama, [inbox.get().embedding(normalize=False)], pooling)
    back = {reason.id for reason in reasons if isinstance(reason, Preempted)}
    assert back & {"10", "11"}


@pytest.mark.long
def test_neighbours_that_generate_go_on_as_ever(llama: TwoEngines) -> None:
    ids = prompts()
    settings = PLAIN | {"max_num_batched_tokens": 16}
    with LLM(llama.folder, **settings) as engine:
        solo = [output.outputs[0].token_ids for output in engine.generate(ids, GREEDY)]
        stream = engine.stream(ids, GREEDY)
        generated = {str(len(ids) + place): list[int]() for place in range(len(ids))}
        for turn, output in enumerate(stream):
            generated[output.request_id] += output.outputs[0].token_ids
            if turn == 3:
                for pooling in POOLINGS:
                    check(
                        llama,
                        engine.embed(ids, pooling=pooling, normalize=False),
                        pooling,
                    )
    assert list(map(list, generated.values())) == solo


def test_a_prompt_may_fill_the_context(llm: LLM, llama: TwoEngines) -> None:
    ids = Random(1).choices(range(160), k=256)
    check(llama, llm.embed([ids], normalize=False), "last")


def test_many_at_once_in_a_loop_and_one_that_goes_away(llama: TwoEngines) -> None:
    async def main() -> list[EmbeddingRequestOutput]:
        async with AsyncLLM(llama.folder, **PLAIN) as engine:
            cancelled = asyncio.create_task(engine.embed(prompts()[1], request_id="gone"))
            await asyncio.sleep(0)
            cancelled.cancel()
            vectors = await asyncio.gather(
                *(engine.embed(ids, pooling="mean", normalize=False) for ids in prompts())
            )
            with contextlib.suppress(asyncio.CancelledError):
                await cancelled
            with pytest.raises(RequestError, match="pooling must be 'last' or 'mean'"):
                await engine.embed([1], pooling="cls")
            return vectors

    check(llama, asyncio.run(main()), "mean")


def test_a_prompt_that_cannot_be_pooled_is_named(llm: LLM) -> None:
    for wrong, reason in (
        ([5] * 257, "257 tokens; this model's maximum context length is 256"),
        ([], "prompt is empty"),
        ([160], "outside the vocabulary"),
    ):
        with pytest.raises(RequestError, match=reason) as caught:
            llm.embed([[1], wrong])
        assert caught.value.index == 1
        assert str(caught.value).startswith("prompts[1]: ")


def test_a_step_that_fails_says_why_and_the_others_go_on(
    llm: LLM, llama: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Vectors.read

    def broken(self: Vectors, rows: int) -> tuple[bytes, ...]:
        for chunk, line in zip(self.chunks, self.values.numpy(), strict=True):
            if len(chunk.owner.known) == 7:
                line[0] = np.nan
        return read(self, rows)

    monkeypatch.setattr(Vectors, "read", broken)
    good, bad = llm.embed([[3] * 6, [3] * 7], normalize=False)
    check(llama, [good], "last")
    assert (bad.finish_reason, bad.embedding) == ("error", [])
    assert "states are not finite" in bad.error


def test_without_weights_there_are_vectors_to_try_with() -> None:
    with LLM(executor="dry") as engine:
        first, second = engine.embed(["import os", "import os"])
        assert first.embedding == second.embedding
        assert sum(number**2 for number in first.embedding) == pytest.approx(1)


OPENED: Final = NewRow(
    index=0,
    name=("r7", 0),
    known=(1, 2),
    prompt=2,
    last_index=2,
    sampling=RowSampling(seed=0, sample=0),
    tables=((0,),),
    pooling=MEAN,
)
PLAN: Final = Plan(
    step=0,
    run_ids=(0,),
    rows=(0,),
    starts=(0,),
    num_scheduled_tokens=(2,),
    max_sampled_tokens=(0,),
    opens=(OPENED,),
)


def test_what_cannot_be_pooled_is_refused_by_name() -> None:
    config = EngineConfig(num_blocks=8)
    assert unsupported_request(PLAN, config) == ""
    in_the_middle = unsupported_request(evolve(PLAN, starts=(4,)), config)
    assert "begins in the middle" in in_the_middle
    other_plan = evolve(PLAN, opens=(evolve(OPENED, pooling="cls"),))
    assert "by last or mean, not 'cls'" in unsupported_request(other_plan, config)


def test_states_that_are_not_finite_name_their_request() -> None:
    chunk = PooledChunk(1, 0, OPENED, first=0, count=1, begins=True, ends=True)
    good = Vectors((chunk,), torch.ones(1, 2)).read(3)
    assert good == (b"", np.ones(2, "<f4").tobytes(), b"")
    with pytest.raises(RuntimeError, match=r"not finite for request 'r7' \(sample 0\)"):
        Vectors((chunk,), torch.tensor([[1.0, torch.nan]])).read(3)
