"""KV caches in 8 bits in an engine, beside transformers' models with caches that round in
the same way.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from torch import Tensor

from minfer import LLM, SamplingParams
from minfer.effects.models.architecture.kv_format import KV_CACHE_DTYPES
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.setup import prepare as preparing
from minfer.effects.setup.device import DeviceError, DeviceInfo
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError
from tests.effects.families import SMALL
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.tiny_families import VARIANTS, WINDOW, save

FP8, INT8 = "fp8", "int8_per_token_head"
CASES = [
    ("Llama", next(name for family, name in VARIANTS if family == "Llama")),
    ("Qwen3", "attention_bias"),
    ("Qwen3Moe", "experts"),
    ("Gemma3", "pattern"),
    ("Gemma3n", "all"),
    ("Cohere", "norms of heads"),
    ("Falcon", "one norm"),
    *[(family, name) for family, name in VARIANTS if family == "GptOss"][:1],
]
MIXED = ("Gemma4", "small full heads")
LATENTS = next(key for key in VARIANTS if key[0] == "DeepseekV3")


def eighths(x: Tensor) -> Tensor:
    """The nearest numbers of FP8, by the exponent and the fraction of a number."""
    exponent = torch.frexp(x.double()).exponent.clamp(min=-5)
    step = torch.exp2(exponent.double() - 4)  # 4 significant bits
    return ((x.double() / step).round() * step).clamp(-448, 448).float()


def steps(x: Tensor) -> Tensor:
    """The nearest of 127 steps to the largest magnitude of a token's head."""
    step = x.abs().amax(-1, keepdim=True) / torch.tensor(127.0)
    return torch.where(step > 0, (x / step).round() * step, x)


ROUND: dict[str, Callable[[Tensor], Tensor]] = {FP8: eighths, INT8: steps}


def rounds(rounding: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' caches round what they keep: keys and values, or latents and rotated
    keys.
    """
    plain = transformers.DynamicCache.update

    def update(cache: Any, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
        return plain(cache, rounding(key), rounding(value), *others, **named)

    monkeypatch.setattr(transformers.DynamicCache, "update", update)


def gap(model: Any, prompt: list[int], output: list[int], expected: list[int]) -> float:
    """How far apart the reference's logits of the first tokens that differ are."""
    index = next(
        i for i, pair in enumerate(zip(output, expected, strict=True)) if len({*pair}) > 1
    )
    ids = torch.tensor([prompt + expected[:index]])
    options = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    result = model.generate(ids, max_new_tokens=1, pad_token_id=0, **options)
    [logits] = result.logits
    return float(logits[0, expected[index]] - logits[0, output[index]])


def differ(
    key: tuple[str, str], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, float]:
    """How many of twice 3 continuations differ from the reference, and how far apart its
    logits are there.
    """
    rng = random.Random(0)
    prompts = [rng.choices(range(160), k=n) for n in (3, WINDOW - 1, 3 * WINDOW)]
    model = save(str(folder), key[0], VARIANTS[key])
    passes, _ = serve_twice(str(folder), prompts, 24, kv_cache_dtype=name, **SMALL)
    rounds(ROUND[name], monkeypatch)
    count, largest = 0, 0.0
    for index, prompt in enumerate(prompts):
        [expected] = their_tokens(model, [prompt], 24)
        for outputs in passes:
            if outputs[index] != expected:
                count += 1
                largest = max(largest, gap(model, prompt, outputs[index], expected))
    return count, largest


@pytest.mark.parametrize("name", ROUND)
def test_tokens_are_those_of_a_cache_that_rounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differ(CASES[1], name, tmp_path, monkeypatch) == (0, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("name", ROUND)
@pytest.mark.parametrize("key", [*CASES, LATENTS, MIXED], ids=lambda key: key[0])
def test_every_kind_of_layer_keeps_8_bits(
    key: tuple[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number near the middle of two can be rounded the other way; then tokens differ
    where logits hardly do.
    """
    if key in (LATENTS, MIXED) and name == INT8:
        pytest.skip("latents have no heads, and layers of several sizes no scales")
    _, largest = differ(key, name, tmp_path, monkeypatch)
    assert largest <= 0.02


def tokens(**settings: Any) -> list[tuple[int, ...]]:
    texts = ["def add(a, b):\n    return a", "import os\nimport sys\n", "class A:\n    x"]
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(dtype="float32", device="cpu", max_model_len=256, **settings) as llm:
        passes = [llm.generate(texts, params, use_tqdm=False) for _ in range(2)]
    return [
        tuple(output.outputs[0].token_ids) for outputs in passes for output in outputs
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ROUND)
def test_answers_do_not_depend_on_the_engine(name: str) -> None:
    expected = tokens(kv_cache_dtype=name, enable_prefix_caching=False)
    small = {"block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    for settings in (
        small,
        {"steps_in_flight": 1},
        {"speculative_config": ngram},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        small | {"num_gpu_blocks_override": 33},
    ):
        assert tokens(kv_cache_dtype=name, **settings) == expected


def test_types_share_no_keys_and_take_fewer_bytes() -> None:
    setups = {
        name: prepare(EngineArgs(device="cpu", kv_cache_dtype=name, dtype="bfloat16"))
        for name in ("auto", *KV_CACHE_DTYPES)
    }
    keys = {name: setup.fingerprint for name, setup in setups.items()}
    assert keys["fp8"] == keys["fp8_e4m3"]
    assert len(set(keys.values())) == 3
    [heads] = {group.attention for group in setups["auto"].spec.groups}
    size = {name: setup.memory.block_bytes for name, setup in setups.items()}
    assert size["fp8"] * 2 == size["auto"]
    dim = heads.query_dim
    assert size[INT8] * 2 * dim == size["auto"] * (dim + 4)


def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be .*int8_per"):
        EngineArgs(kv_cache_dtype="fp4")
    save(str(tmp_path), LATENTS[0], VARIANTS[LATENTS])
    spec = parse_spec(read_config(tmp_path))
    with pytest.raises(ConfigError, match=r"'int8_per_token_head'.*latents"):
        prepare(EngineArgs(model=str(tmp_path), device="cpu", kv_cache_dtype=INT8))
    save(str(tmp_path), MIXED[0], VARIANTS[MIXED])
    with pytest.raises(ConfigError, match=r"'int8_per_token_head'.*different numbers"):
        prepare(EngineArgs(model=str(tmp_path), device="cpu", kv_cache_dtype=INT8))
    old = DeviceInfo("cuda", "A100", 1 << 40, 1 << 40, (8, 0))
    monkeypatch.setattr(preparing, "find_device", lambda *_: old)
    with pytest.raises(DeviceError, match=r"'fp8' needs.*8\.9.*A100 has 8\.0"):
        prepare(EngineArgs(device="cuda", kv_cache_dtype=FP8))
    new = evolve(old, capability=(9, 0))
    monkeypatch.setattr(preparing, "find_device", lambda *_: new)
    setup = prepare(EngineArgs(model=str(tmp_path), device="cuda", kv_cache_dtype=FP8))
    assert setup.spec.kv_dtype == "float8_e4m3fn" != spec.kv_dtype
