"""The memory plan holds what it promises, and its arithmetic is the engine's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from minfer.blocks.ownership import blocks_for
from minfer.effects.execution.cpu.cpu_backend import CpuBackend
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.layout.shapes import (
    activation_bytes,
    captured_tokens,
    cuda_activation_bytes,
    kept_logits_bytes,
    kv_bytes_per_token,
    padded_tokens,
    shaping_bytes,
    weight_bytes,
)
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import (
    MemoryPlan,
    NotEnoughMemoryError,
    available_memory,
    describe,
    plan_memory,
    size_text,
)
from minfer.effects.setup.prepare import prepare
from minfer.kernels.shape import ShapingState
from minfer.lifecycle.arrive import rejection_reason
from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.records.state import initial
from minfer.values.checks import ConfigError
from tests.effects.tiny_model import CONFIG, width_of, with_feed_forward, with_windows

SPEC = parse_spec(CONFIG)
SIZES = EngineConfig(
    num_blocks=1,
    max_model_len=256,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
QWEN_05B = parse_spec(
    CONFIG
    | {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "head_dim": 64,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
)


def plan(
    spec: ModelSpec = SPEC, sizes: EngineConfig = SIZES, **changes: Any
) -> MemoryPlan:
    arguments: dict[str, Any] = {"sizes": sizes, "limit": 2**24}
    return plan_memory(spec, **(arguments | changes))


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 9), st.integers(1, 12))
def test_blocks_of_a_sequence_are_those_the_engine_asks_for(
    prompt: int, output: int, size: int, blocks: int
) -> None:
    config = EngineConfig(num_blocks=blocks, block_size=size, max_model_len=200)
    request = Request(id="r", prompt=(0,) * prompt, max_tokens=output)
    fits = rejection_reason(config, initial(config), request) == ""
    assert fits == (blocks_for(prompt + output, size) <= blocks)


@given(st.integers(2**20, 2**26), st.integers(1, 64), st.integers(1, 300))
def test_the_plan_stays_within_the_limit_and_uses_it(
    limit: int, size: int, seqs: int
) -> None:
    tokens = max(64, seqs)
    sizes = evolve(
        SIZES, block_size=size, max_num_seqs=seqs, max_num_batched_tokens=tokens
    )
    try:
        memory = plan(sizes=sizes, limit=limit)
    except NotEnoughMemoryError:
        return
    assert memory.total <= limit
    full = memory.num_blocks == seqs * blocks_for(256, size)
    assert full or memory.total + memory.block_bytes + memory.workspace_per_block > limit


def test_the_parts_are_the_models_own() -> None:
    memory = plan()
    assert memory.weights == weight_bytes(SPEC, cuda=False)
    assert kv_bytes_per_token(SPEC) == 2 * 2 * 2 * 8 * 4
    assert memory.block_bytes == 16 * kv_bytes_per_token(SPEC)
    assert (
        memory.total
        == memory.weights + memory.activations + memory.kv_cache + memory.workspace
    )


def test_largest_context_and_batch_are_admitted_and_one_more_is_not() -> None:
    sizes = evolve(SIZES, max_model_len=50)
    memory = plan(sizes=sizes, num_blocks=9)
    assert memory.largest_context == 9 * 16 + 1
    config = EngineConfig(num_blocks=9, block_size=16, max_model_len=256)
    for context, fits in (
        (memory.largest_context, True),
        (memory.largest_context + 1, False),
    ):
        request = Request(id="r", prompt=(0,) * (context - 1), max_tokens=1)
        assert (rejection_reason(config, initial(config), request) == "") == fits
    assert memory.largest_batch(17) == 8  # one block each; max_num_seqs is 8
    assert memory.largest_batch(18) == 4
    assert memory.largest_batch(146) == 0
    assert memory.largest_batch(1000) == 0  # beyond the model


def test_the_largest_context_is_never_beyond_the_model() -> None:
    assert plan(num_blocks=1000).largest_context == 256


def test_without_a_limit_the_pool_is_what_sequences_can_fill() -> None:
    assert plan(limit=None).num_blocks == 8 * 16


def test_a_cache_of_a_given_size() -> None:
    memory = plan(kv_cache_memory=20 * 16 * 256 + 5, limit=1)
    assert memory.num_blocks == 20
    assert plan(kv_cache_memory=1, num_blocks=16).num_blocks == 16


def test_no_room_for_a_cache_names_numbers_and_remedy() -> None:
    with pytest.raises(NotEnoughMemoryError, match="KiB for weights") as caught:
        plan(limit=1000)
    assert "1000 bytes that may be used" in str(caught.value)
    assert "--max-num-batched-tokens" in str(caught.value)
    assert isinstance(caught.value, ConfigError)


def test_a_context_that_does_not_fit_names_the_one_that_does() -> None:
    with pytest.raises(NotEnoughMemoryError, match="--max-model-len 81,") as caught:
        plan(num_blocks=5)
    assert "256 tokens (--max-model-len) needs 16 KV blocks" in str(caught.value)
    plan(num_blocks=5, sizes=evolve(SIZES, max_model_len=81))
    with pytest.raises(NotEnoughMemoryError):
        plan(num_blocks=5, sizes=evolve(SIZES, max_model_len=82))


def test_not_even_a_block_asks_for_smaller_ones() -> None:
    with pytest.raises(NotEnoughMemoryError, match="smaller --block-size"):
        plan(kv_cache_memory=10)


def test_known_sizes_of_a_half_billion_model() -> None:
    sizes = evolve(
        SIZES,
        max_model_len=32_768,
        block_size=64,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    memory = plan(QWEN_05B, sizes, limit=8 * 2**30)
    assert memory.weights == pytest.approx(
        988e6, rel=0.01
    )  # bytes, as published in bfloat16
    assert memory.block_bytes == 64 * 2 * 24 * 2 * 64 * 2
    assert 2**28 < memory.activations < 2**31
    assert memory.largest_batch(32_768) >= 1


def test_dtype_scales_weights_and_cache() -> None:
    wide, narrow = (plan(evolve(SPEC, dtype=name)) for name in ("float32", "bfloat16"))
    assert wide.weights == 2 * narrow.weights
    assert wide.block_bytes == 2 * narrow.block_bytes


def test_activations_by_hand() -> None:
    """Layers of one window share a mask: of what it shows, a step's tokens,
    and a block; and decode rows share one of the longest context.
    """
    token, masks = 1024, 9 * (64 * (5 + 64 + 16) + 8 * 256)
    logits, rope = 8 * 260 * 20, 256 * 2 * 8 * 4
    num_bytes = activation_bytes(with_windows(SPEC, 5, 5), SIZES)
    assert num_bytes == 64 * token + masks + logits + rope == 190_912


def test_a_gpu_keeps_what_penalties_count() -> None:
    device = torch.device("cpu")
    state = ShapingState.make(SIZES.max_num_seqs + 1, SPEC.vocab_size, device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert num_bytes == pytest.approx(shaping_bytes(SPEC, SIZES), rel=0.2)
    without = cuda_activation_bytes(SPEC, SIZES, SIZES.max_num_batched_tokens)
    planned = plan(num_blocks=40, cuda=True).activations
    assert planned == without + shaping_bytes(SPEC, SIZES)


@pytest.mark.parametrize("cuda", [False, True])
def test_logits_of_rows_under_a_grammar_are_kept(cuda: bool) -> None:
    sizes = evolve(SIZES, late_masks=True)
    rows = DeviceRows(SIZES.max_num_seqs, 2, SPEC.vocab_size, torch.device("cpu"))
    sampler = Sampler(CpuBackend(), rows, 0)
    logits = torch.zeros(1, SPEC.vocab_size, dtype=torch_dtype(SPEC.dtype))
    sampler.keep(logits, torch.zeros(1, dtype=torch.int32))
    assert sampler.kept_logits is not None
    num_bytes = sampler.kept_logits.numel() * sampler.kept_logits.element_size()
    assert num_bytes == kept_logits_bytes(SPEC, sizes)
    with_them = plan_memory(SPEC, sizes, None, num_blocks=40, cuda=cuda).activations
    assert with_them == num_bytes + plan(num_blocks=40, cuda=cuda).activations


def test_available_memory_is_plausible() -> None:
    assert 2**20 < available_memory() < 2**50


def test_available_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert available_memory() > 2**20


@pytest.mark.parametrize(
    ("limit", "used", "left"), [("4096", "1000", 3096), ("max", "1000", None)]
)
def test_available_memory_respects_a_control_group(
    monkeypatch: pytest.MonkeyPatch, limit: str, used: str, left: int | None
) -> None:
    files = {
        "memory.max": limit,
        "memory.current": used,
        "meminfo": "MemAvailable:   1024 kB\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda self, *_: files[self.name])
    assert available_memory() == (1024 * 1024 if left is None else left)


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (5, 2048, 3 * 2**20, 3 * 2**29)] == [
        "5 bytes",
        "2.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]


def test_the_description_has_the_numbers() -> None:
    text = describe(plan(num_blocks=40), "some model")
    assert "some model" in text
    assert "in 40 blocks" in text
    assert "256 tokens at batch 1" in text
    assert "largest batch at 256" in text
    assert "float32 keys and values (2 x 2 x 8) in 2 layers" in text
    assert "no limit" in describe(plan(limit=None), "m")


@pytest.mark.parametrize("budget", [64, 1000, 2048, 5000, 8192])
def test_the_largest_captured_step_is_one_that_there_is(budget: int) -> None:
    """Else there were sizes that neither a graph serves nor what does better without."""
    spec = prepare(EngineArgs(executor="dry")).spec
    for layers in (1, 2, 4, 9):
        for wide in (1, 7, 60, 500):
            big = with_windows(
                with_feed_forward(spec, intermediate_size=wide * width_of(spec)),
                *[None] * layers,
            )
            largest = captured_tokens(big, budget)
            assert largest == 0 or padded_tokens(largest) == largest
            assert largest <= padded_tokens(budget)


def test_padding_is_bounded() -> None:
    for count in range(1, 10_000):
        assert count <= padded_tokens(count) <= max(64, 1.5 * count, count + 63)
        assert padded_tokens(padded_tokens(count)) == padded_tokens(count)


def test_slots_of_adapters_take_memory_from_the_cache() -> None:
    def planned(**settings: Any) -> MemoryPlan:
        return prepare(EngineArgs(**settings), limit=2**30).memory

    without, few = planned(), planned(enable_lora=True, max_loras=4)
    many = planned(enable_lora=True, max_loras=8, max_lora_rank=32)
    assert without.adapters == 0
    assert 0 < 2 * few.adapters < many.adapters <= 4 * few.adapters
    lost = without.kv_cache + without.workspace - few.kv_cache - few.workspace
    assert abs(lost - few.adapters) < 2 * few.block_bytes
    assert "for 4 at once" in describe(few, "m")
    with pytest.raises(NotEnoughMemoryError, match=r"for 8 adapters and .*--max-loras"):
        prepare(EngineArgs(enable_lora=True, max_lora_rank=512), limit=2**24)
