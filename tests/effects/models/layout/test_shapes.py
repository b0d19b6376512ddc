"""The arithmetic of shapes, against transformers' models and by hand."""

import pytest
import transformers
from attrs import evolve

from minfer.effects.cli.compare.measure_level import held_bytes
from minfer.effects.models.architecture.quantization import LEVELS, Quantization
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import empty_weights
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layout.shapes import (
    MAX_PADDED_NUMBERS,
    REJECTION_BYTES_PER_ID,
    activation_bytes,
    cuda_activation_bytes,
    kv_bytes_per_token,
    layer_kv_bytes_per_token,
    mask_bytes,
    max_step_drafts,
    parameter_count,
    weight_bytes,
)
from minfer.kernels import cpu_int8
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, HOST, REJECTION, SAME_NOISE, Speculation
from tests.effects.schemes import CASES, SCHEMES
from tests.effects.tiny_families import VARIANTS, config_of, written
from tests.effects.tiny_model import CONFIG, expected_tensors, with_windows

SPEC = parse_spec(CONFIG)
SIZES = EngineConfig(
    num_blocks=1,
    max_model_len=5000,
    block_size=16,
    max_num_seqs=1,
    max_num_batched_tokens=100,
)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_bytes(tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    hf_config = transformers.Qwen2Config(
        **{k: v for k, v in config.items() if k != "torch_dtype"}
    )
    model = transformers.Qwen2ForCausalLM(hf_config)
    spec = parse_spec(config)
    assert parameter_count(spec) == sum(p.numel() for p in model.parameters())
    assert weight_bytes(spec, cuda=False) == 4 * parameter_count(spec)
    half = evolve(spec, dtype="bfloat16")
    assert weight_bytes(half, cuda=False) == 2 * parameter_count(spec)
    assert kv_bytes_per_token(spec) == 2 * 2 * 2 * 8 * 4
    shapes = {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert expected_tensors(spec) == shapes
    with pytest.raises(UnsupportedModelError, match=r"int3.*float32"):
        weight_bytes(evolve(spec, dtype="int3"), cuda=False)


@pytest.mark.long
@pytest.mark.parametrize("level", [None, *SCHEMES])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_planned_weights_are_those_held(
    dtype: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every family, on the CPU; and as stored for a GPU, before they are packed. INT8
    is planned for the library that holds most: FBGEMM, with a table beside each matrix.
    """
    fbgemm = next(route for route in cpu_int8.ROUTES if route.name == "FBGEMM")
    monkeypatch.setattr(cpu_int8, "chosen_route", lambda: fbgemm)
    quantization = None if level is None else Quantization(OnLoad(LEVELS[level]))
    planned, num_bytes = {}, {}
    for key, sizes in CASES.items():
        spec = parse_spec(written(key[0], VARIANTS[key] | sizes))
        spec = evolve(spec, dtype=dtype, quantization=quantization)
        weights, unpacked = random_weights(spec, dtype), empty_weights(spec, dtype)
        num_bytes[key] = held_bytes(weights), held_bytes(unpacked)
        planned[key] = tuple(weight_bytes(spec, cuda=cuda) for cuda in (False, True))
    assert planned == num_bytes


def test_activations_and_kv_each_have_a_type() -> None:
    assert (SPEC.dtype, SPEC.kv_dtype) == ("float32",) * 2
    half = evolve(SPEC, dtype="float16")
    assert (half.dtype, half.kv_dtype) == ("float16",) * 2
    small = evolve(SPEC, kv_dtype="bfloat16")
    assert 2 * kv_bytes_per_token(small) == kv_bytes_per_token(SPEC)
    assert weight_bytes(small, cuda=True) == weight_bytes(SPEC, cuda=True)
    # Queries, keys and values, and what is found, in the cache's type beside their own.
    copied = 2 * (32 + 2 * 16 + 32) * SIZES.max_num_batched_tokens
    assert activation_bytes(small, SIZES) - activation_bytes(SPEC, SIZES) == copied


def test_the_cache_of_a_layer_is_its_share() -> None:
    assert layer_kv_bytes_per_token(SPEC) * len(SPEC.layers) == kv_bytes_per_token(SPEC)
    mixed = with_windows(SPEC, None, 5, 5)
    assert layer_kv_bytes_per_token(mixed) * 3 == kv_bytes_per_token(mixed)


def test_masks_of_windows_are_in_the_memory_plan() -> None:
    padded = SIZES.max_num_seqs * MAX_PADDED_NUMBERS

    def masks(*windows: int | None) -> int:
        spec = with_windows(parse_spec(config_of()), *windows)
        tokens = SIZES.max_num_batched_tokens
        num_bytes = mask_bytes(spec, SIZES, tokens)
        without.add(activation_bytes(spec, SIZES) - num_bytes)
        return num_bytes

    without: set[int] = set()
    assert masks(None, None) == 9 * (100 * 5000 + padded)
    assert masks(30, 30) == 9 * (100 * (30 + 116) + padded)
    assert masks(None, 30) == masks(None) + masks(30)
    assert masks(4990) == masks(None)
    assert len(without) == 1


def test_masks_do_not_grow_with_the_context() -> None:
    spec = parse_spec(config_of(max_position_embeddings=1 << 20))
    configs = [
        evolve(SIZES, max_model_len=length, max_num_batched_tokens=2048)
        for length in (1 << 13, 1 << 20)
    ]
    short, long = (mask_bytes(spec, config, 2048) for config in configs)
    assert short == long <= 9 * ((1 << 22) + SIZES.max_num_seqs * MAX_PADDED_NUMBERS)


@pytest.mark.parametrize("drafter", [HOST, DEVICE])
def test_what_drafts_were_drawn_from_is_kept_where_coins_decide(drafter: str) -> None:
    def taken(rule: str) -> tuple[int, int]:
        spec_config = Speculation(drafter=drafter, drafts=3, rule=rule, adaptive=False)
        sizes = evolve(SIZES, max_num_seqs=8, speculation=spec_config)
        assert max_step_drafts(sizes) == 24
        return activation_bytes(SPEC, sizes), cuda_activation_bytes(SPEC, sizes, 100)

    plain, coins = taken(SAME_NOISE), taken(REJECTION)
    logits = 24 * 4 if drafter == DEVICE else 0
    expected = SPEC.vocab_size * (logits + REJECTION_BYTES_PER_ID)
    assert [
        with_coins - without_coins
        for with_coins, without_coins in zip(coins, plain, strict=True)
    ] == [expected, expected]
