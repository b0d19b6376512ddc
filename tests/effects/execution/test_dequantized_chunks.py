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
    seen = []

    def noted(work: DequantizedWork, *given: Tensor, **how: int) -> tuple[Tensor, Tensor]:
        seen.append((len(work.rows) > 1, bool(work.starts.any())))
        return dequantize_contexts(work, *given, **how)  # type: ignore[arg-type]  # as it

    monkeypatch.setattr(cuda_attention, "dequantize_contexts", noted)
    monkeypatch.setattr(routes, "MIN_DEQUANTIZE_TOKENS", 2)
    assert Run.start(model, **sizes).serve(requests(0), arrival_gap=1) == reference
    assert {*seen} >= {(True, True), (False, False)}  # several chunks, a history


def test_contexts_are_dequantized_for_long_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 64)
    found, least = made(IN_INT8), MIN_DEQUANTIZE_TOKENS
    most = (4096 + 2048) // 64 + 32
    assert found.dequantizes(65, least, most)
    assert not found.dequantizes(64, least, most)  # a graph contains the step
    assert not found.dequantizes(65, least - 1, most)
    assert not found.dequantizes(65, least, most + 1)  # no room
    assert not made().may_dequantize
    assert f"dequantized from {least}" in dict(found.described())["prefill attention"]
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "")
    found = made(IN_INT8)
    assert found.by_flash(9999, 9999, dequantized=True) == (True,)
    assert found.by_flash(9999, 9999) == (False,)


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
