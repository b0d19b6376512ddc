"""Adapters as programs name them, computed by the engine itself."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minfer import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestError
from minfer import SamplingParams as Params
from minfer.values.checks import ConfigError
from tests.effects.small_adapters import WEIGHTS, write_adapter
from tests.effects.tiny_model import write_checkpoint

PROMPT = list(range(40))
GREEDY = Params(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "num_gpu_blocks_override": 64,
    "block_size": 8,
}


def merge(model: Path, adapter: Path, merged: Path) -> Path:
    """Write the model with an adapter's product added to its matrices."""
    shutil.copytree(model, merged)
    tensors, factors = (
        load_file(model / "model.safetensors"),
        load_file(adapter / WEIGHTS),
    )
    config = json.loads((adapter / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    prefix, suffix = "base_model.model.", ".lora_A.weight"
    for name in factors:
        if name.endswith(suffix):
            module = name.removeprefix(prefix).removesuffix(suffix)
            lora_b = factors[f"{prefix}{module}.lora_B.weight"]
            tensors[f"{module}.weight"] += scaling * lora_b @ factors[name]
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    return merged


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    names = ["a", "b", "c"]
    return [
        write_adapter(model.parent / name, model, seed=seed, rank=4 * (seed + 1))
        for seed, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(str(model), **SETTINGS) as made:
        yield made


def request(folder: Path, **fields: Any) -> LoRARequest:
    return LoRARequest(folder.name, 1, folder, **fields)


def outputs(llm: LLM, lora: Any, count: int = 1) -> list[tuple[list[int], list[float]]]:
    """The tokens of each prompt, and their log-probabilities."""
    found = []
    for output in llm.generate(
        [PROMPT] * count, GREEDY, lora_request=lora, use_tqdm=False
    ):
        ids = list(output.outputs[0].token_ids)
        logprobs = output.outputs[0].logprobs or []
        scores = [at[token].logprob for token, at in zip(ids, logprobs, strict=True)]
        found.append((ids, scores))
    return found


def tokens(llm: LLM, folder: Path, **fields: Any) -> list[int]:
    return outputs(llm, request(folder, **fields))[0][0]


def test_outputs_are_those_of_merged_models(
    llm: LLM, model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """Three adapters and none in one call, over two slots; and again, from the cache."""
    expected = []
    for folder in adapters:
        merged = merge(model, folder, tmp_path / folder.name)
        with LLM(str(merged), num_gpu_blocks_override=64, block_size=8) as other:
            expected += outputs(other, None)
    expected += outputs(llm, None)
    assert len({tuple(ids) for ids, _ in expected}) == 4
    for _ in range(2):
        for actual, wanted in zip(
            outputs(llm, [*map(request, adapters), None], 4), expected, strict=True
        ):
            assert actual[0] == wanted[0]
            torch.testing.assert_close(actual[1], wanted[1], rtol=0, atol=1e-4)


def cached(llm: LLM, lora: LoRARequest | None) -> int | None:
    (output,) = llm.generate(PROMPT, GREEDY, lora_request=lora, use_tqdm=False)
    return output.num_cached_tokens


def test_other_weights_under_one_name_hit_nothing(
    llm: LLM, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "own", model, seed=7)
    assert cached(llm, request(folder)) == 0
    assert cached(llm, request(folder)) == 32
    write_adapter(folder, model, seed=8)  # its files change
    assert cached(llm, request(folder)) == 32  # those that were read are used
    assert cached(llm, request(folder, load_inplace=True)) == 0
    assert cached(llm, None) in (0, 32)
    elsewhere = write_adapter(tmp_path / "else" / "own", model, seed=9)
    with pytest.raises(RequestError, match="there is an adapter 'own' already, with oth"):
        cached(llm, request(elsewhere))


def test_files_that_changed_do_not_compute_under_an_old_digest(
    model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "own", model, seed=1)
    others = [write_adapter(tmp_path / str(i), model, seed=2 + i) for i in range(2)]
    with LLM(str(model), **{**SETTINGS, "max_loras": 1, "max_cpu_loras": 1}) as llm:
        first = tokens(llm, folder)
        outputs(llm, [*map(request, others)], 2)  # it leaves device and host memory
        assert tokens(llm, folder) == first
        outputs(llm, [*map(request, others)], 2)
        write_adapter(folder, model, seed=9)
        (output,) = llm.generate(PROMPT, GREEDY, lora_request=request(folder))
        assert output.outputs[0].finish_reason == "error"
        assert "its adapter could not be loaded" in output.outputs[0].error
        outputs(llm, request(others[0]))  # others go on
        assert tokens(llm, folder, load_inplace=True) != first


def test_every_way_in_takes_an_adapter(llm: LLM, adapters: list[Path]) -> None:
    lora = request(adapters[0])
    ((plain, _),), ((changed, _),) = outputs(llm, None), outputs(llm, lora)
    assert plain != changed
    streamed = [
        token
        for delta in llm.stream([PROMPT], GREEDY, lora_request=lora)
        for token in delta.outputs[0].token_ids
    ]
    assert streamed == changed
    search = BeamSearchParams(beam_width=2, max_tokens=4)
    (best,) = llm.beam_search([PROMPT], search, lora_request=lora, use_tqdm=False)
    (base,) = llm.beam_search([PROMPT], search, use_tqdm=False)
    assert best.sequences[0].tokens != base.sequences[0].tokens
    vectors = [
        llm.embed([PROMPT], lora_request=each, use_tqdm=False)[0].outputs.embedding
        for each in (lora, None)
    ]
    assert vectors[0] != vectors[1]
    sampled = Params(n=3, seed=1, max_tokens=4, ignore_eos=True)
    (many,) = llm.generate([PROMPT], sampled, lora_request=lora, use_tqdm=False)
    assert len(many.outputs) == 3


def test_async_outputs_are_the_same(llm: LLM, model: Path, adapters: list[Path]) -> None:
    async def ask() -> list[int]:
        async with AsyncLLM(str(model), **SETTINGS) as served:
            lora = request(adapters[1])
            async for output in served.generate(PROMPT, GREEDY, lora_request=lora):
                last = output
            return list(last.outputs[0].token_ids)

    assert asyncio.run(ask()) == outputs(llm, request(adapters[1]))[0][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_name": ""}, "lora_name must be a text"),
        ({"lora_int_id": 0}, "lora_int_id must be a whole number from 1, not 0"),
        ({"lora_path": ""}, "lora_path must be the folder"),
        ({"tensorizer_config_dict": {}}, "tensorizer_config_dict is not supported"),
    ],
)
def test_a_wrong_lora_request_is_named(change: dict[str, Any], words: str) -> None:
    fields = {"lora_name": "a", "lora_int_id": 1, "lora_path": "/x", **change}
    with pytest.raises(RequestError, match=words):
        LoRARequest(**fields)


def test_what_does_not_fit_is_named(llm: LLM, model: Path, tmp_path: Path) -> None:
    large = write_adapter(tmp_path / "large", model, rank=17)
    with pytest.raises(RequestError, match=r"17, and at most 16 .*--max-lora-rank"):
        outputs(llm, request(large))
    broken = write_adapter(tmp_path / "nan", model)
    tensors = load_file(broken / WEIGHTS)
    tensors[next(iter(tensors))].fill_(float("nan"))
    save_file(tensors, broken / WEIGHTS)
    with pytest.raises(RequestError, match=r"nan/adapter_model\.safetensors"):
        outputs(llm, request(broken))
    with pytest.raises(RequestError, match="there is no such folder"):
        outputs(llm, request(tmp_path / "none"))
    (tmp_path / "circle").symlink_to("circle")
    for path in ("a\0b", "x" * 5000, tmp_path / "circle"):
        with pytest.raises(RequestError, match="lora_request: adapter '"):
            outputs(llm, LoRARequest("wrong", 1, path))
    for requests in ([None, None], []):
        with pytest.raises(
            RequestError, match=f"{len(requests)} lora_request for 1 prompts"
        ):
            outputs(llm, requests)
    with pytest.raises(RequestError, match="must be a LoRARequest, not str"):
        outputs(llm, "sql")


def test_an_llm_starts_with_adapters(model: Path, adapters: list[Path]) -> None:
    settings = {**SETTINGS, "lora_modules": [f"first={adapters[0]}"]}
    with LLM(str(model), **settings) as llm:
        assert llm.adapters is not None
        entry = llm.adapters.find("first")
        assert entry is not None
        assert entry.rank == 4
    wrong: list[tuple[Any, str]] = [
        (["first=/nowhere"], r"--lora-modules first=/nowhere: .*no such folder"),
        (["first=a\0b"], r"--lora-modules first=a.b: .*cannot be the path of a folder"),
        (5, "lora_modules must be a list of NAME=PATH, not 5"),
    ]
    for value, words in wrong:
        with pytest.raises(ConfigError, match=words):
            LLM(str(model), **{**settings, "lora_modules": value})
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        LLM(str(model), lora_modules=["first=/nowhere"])
