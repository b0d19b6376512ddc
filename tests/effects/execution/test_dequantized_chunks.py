"""Chunks whose contexts are dequantized, in an engine: tokens, routes and memory."""

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cuda import cuda_attention
from minfer.effects.execution.device import routes
from minfer.effects.execution.device.routes import MIN_DEQUANTIZE_TOKENS
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.setup import memory
from minfer.effects.setup.memory import plan_memory
from minfer.kernels.dequantized_contexts import dequantize_contexts
from minfer.kernels.dequantized_work import DequantizedWork
from tests.effects.execution.test_attention import SPEC
from tests.effects.execution.test_routes import CONFIG, made
from tests.effects.execution.tiny_engine import VOCAB, Model, Run, requests
from tests.effects.setup.test_memory import QWEN_05B
from tests.effects.tiny_model import gqa_of, with_windows

IN_INT8 = evolve(QWEN_05B, kv_dtype="int8")


@pytest.mark.parametrize("device_kind", ["cuda"], indirect=True)
@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_tokens_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prefixes, several chunks of a step, and a window in one of the layers."""
    spec = evolve(SPEC, dtype="float32", kv_dtype=kind, vocab_size=VOCAB)
    spec = with_windows(spec, None, 5)
    model = Model(None, spec, random_weights(spec, "float32", 0))
    sizes = {"max_num_batched_tokens": 20, "depth": 2}
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 0)
    reference = Run.start(model, **sizes).serve(requests(0), arrival_gap=1)
    works = []

    def noted(
        work: DequantizedWork, *tensors: Tensor, **options: int
    ) -> tuple[Tensor, Tensor]:
        works.append((len(work.rows) > 1, bool(work.starts.any())))
        return dequantize_contexts(work, *tensors, **options)  # type: ignore[arg-type]  # as it

    monkeypatch.setattr(cuda_attention, "dequantize_contexts", noted)
    monkeypatch.setattr(routes, "MIN_DEQUANTIZE_TOKENS", 2)
    assert Run.start(model, **sizes).serve(requests(0), arrival_gap=1) == reference
    assert {*works} >= {(True, True), (False, False)}  # several chunks, a history


def test_contexts_are_dequantized_for_long_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 64)
    model_routes, min_tokens = made(IN_INT8), MIN_DEQUANTIZE_TOKENS
    max_blocks = (4096 + 2048) // 64 + 32
    assert model_routes.dequantizes(65, min_tokens, max_blocks)
    # A graph contains the step.
    assert not model_routes.dequantizes(64, min_tokens, max_blocks)
    assert not model_routes.dequantizes(65, min_tokens - 1, max_blocks)
    assert not model_routes.dequantizes(65, min_tokens, max_blocks + 1)  # no room
    assert not made().may_dequantize
    assert (
        f"dequantized from {min_tokens}"
        in dict(model_routes.described())["prefill attention"]
    )
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "")
    model_routes = made(IN_INT8)
    assert model_routes.by_flash(9999, 9999, dequantized=True) == (True,)
    assert model_routes.by_flash(9999, 9999) == (False,)


def test_the_workspace_is_part_of_the_memory_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = evolve(CONFIG, max_num_batched_tokens=16384)

    def planned() -> int:
        return plan_memory(IN_INT8, config, None, cuda=True, num_blocks=999).activations

    before = planned()
    monkeypatch.setattr(memory, "dequantized_context_bytes", lambda *_: 0)
    heads = gqa_of(IN_INT8)
    token = 2 * heads.kv_heads * heads.head_dim * torch.bfloat16.itemsize
    assert before - planned() == ((4096 + 16384) // 64 + 32) * 64 * token
