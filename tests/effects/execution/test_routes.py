"""Which kernel serves what, and why another does not."""

from typing import Any

import pytest
from attrs import evolve

from minfer.effects.execution.device import routes
from minfer.effects.execution.device.routes import (
    MIN_EXPAND_TOKENS,
    MIN_FLASH_TOKENS,
    Routes,
)
from minfer.effects.models.architecture.attention_window import with_attention_window
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.kernels.attention_tunes import num_splits
from minfer.kernels.mla_tunes import latent_splits
from minfer.records.config import EngineConfig
from tests.effects.published_configs import PUBLISHED
from tests.effects.setup.test_memory import QWEN_05B
from tests.effects.stateful import with_parts
from tests.effects.tiny_model import (
    gqa_of,
    with_attention,
    with_feed_forward,
    with_windows,
)

CONFIG = EngineConfig(
    num_blocks=999,
    block_size=64,
    max_model_len=4096,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    vocab_size=100,
)


def made(spec: ModelSpec = QWEN_05B, budget: int = 2048) -> Routes:
    config = evolve(CONFIG, max_num_batched_tokens=budget)
    return Routes.for_device(spec, config, "cpu")


def published(name: str) -> Routes:
    return made(parse_spec(PUBLISHED[name], dtype="bfloat16"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages, on a GPU which they support."""
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "")
    monkeypatch.setattr(routes, "flash_piece_missing", lambda *_: "")
    monkeypatch.setattr(routes, "missing", lambda *_: "")
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 64)


def test_quack_serves_products_without_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(**changes: Any) -> str:
        model_routes = made(with_feed_forward(QWEN_05B, **changes))
        monkeypatch.setattr(routes, "is_gated_faster", lambda *_: True)
        assert model_routes.fuses(100) == (not model_routes.no_quack)
        return dict(model_routes.described())["gate, up and activation"]

    assert "Hopper" in reported()
    monkeypatch.setattr(routes, "missing", lambda *_: "")
    assert "quack where" in reported()
    assert "quack where" in reported(activation="gelu_tanh")
    assert "no ungated_gelu" in reported(activation="ungated_gelu")
    assert "biases" in reported(bias=True)
    assert not published("gemma-2-9b").no_quack
    monkeypatch.setattr(routes, "is_gated_faster", lambda *_: False)
    assert not made().fuses(100)


@pytest.mark.usefixtures("installed")
def test_flash_attn_serves_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_from(spec: ModelSpec = QWEN_05B, budget: int = 2048) -> int:
        model_routes = made(spec, budget)
        min_tokens = model_routes.groups[0].flash_from if model_routes.uses_flash else 0
        for tokens, longest in (
            (65, min_tokens),
            (64, min_tokens),
            (9999, min_tokens - 1),
        ):
            served = model_routes.by_flash(tokens, longest)
            assert served == (
                model_routes.uses_flash and tokens > 64 and longest == min_tokens,
            )
        return min_tokens

    assert flash_from() == MIN_FLASH_TOKENS[64]
    for head_dim in (128, 256):
        wide = with_attention(QWEN_05B, head_dim=head_dim)
        assert flash_from(wide, 4096) == MIN_FLASH_TOKENS[head_dim]
    assert flash_from(with_windows(QWEN_05B, *(4,) * 24)) == 0
    assert "small enough" in dict(made(budget=64).described())["prefill attention"]
    assert not made(budget=64).uses_flash
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "not here")
    assert flash_from() == 0
    assert "not here" in dict(made().described())["prefill attention"]


@pytest.mark.usefixtures("installed")
def test_flash_attn_serves_the_groups_that_allow_it() -> None:
    """Windows of one group are no reason against it in another."""
    model_routes = made(with_windows(QWEN_05B, 4, *(None,) * 23))
    assert model_routes.by_flash(9999, 9999) == (False, True)
    assert model_routes.by_flash(9999, MIN_FLASH_TOKENS[64] - 1) == (False, False)
    lines = dict(model_routes.described())
    assert "before sliding windows" in lines["prefill attention, window 4"]
    assert lines["prefill attention, no window"].startswith("flash-attn from 2048")
    beside = with_attention_window(with_windows(QWEN_05B, 4, *(None,) * 23), 64, 4)
    lines = dict(made(beside).described())
    assert "sink tokens" in lines["prefill attention, window 64, 4 sink tokens"]
    two_groups = published("gpt-oss-20b")
    assert not two_groups.uses_flash
    assert two_groups.no_quack
    assert (
        "no attention sinks"
        in dict(two_groups.described())["prefill attention, no window"]
    )


@pytest.mark.usefixtures("installed")
def test_latents_are_expanded_for_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model_routes, min_tokens = published("DeepSeek-V2-Lite"), MIN_EXPAND_TOKENS
    num_products = min_tokens * (min_tokens + 1) // 2
    assert model_routes.expands(65, min_tokens, 0, num_products)
    # A graph contains the step.
    assert not model_routes.expands(64, min_tokens, 0, num_products)
    assert not model_routes.expands(65, min_tokens - 1, 0, num_products)
    # Of a token of the history, so many inputs on average.
    assert model_routes.expands(999, 999, 500, 500 * min_tokens)
    assert not model_routes.expands(999, 999, 500, 500 * min_tokens - 1)
    assert model_routes.uses_flash
    assert model_routes.expands_by_flash(999, 999)
    assert not model_routes.expands_by_flash(999, 998)  # another chunk beside
    assert model_routes.by_flash(999, 999) == (False,)  # it does not read the latents
    assert not made().expands(9999, 9999, 0, 1 << 30)
    assert not made().expands_by_flash(999, 999)
    line = dict(model_routes.described())["prefill attention"]
    assert line.startswith(f"expanded latents from {min_tokens} tokens")
    assert "flash-attn for one prompt" in line
    monkeypatch.setattr(routes, "flash_piece_missing", lambda *_: "not here")
    model_routes = published("DeepSeek-V2-Lite")
    assert "not here" in dict(model_routes.described())["prefill attention"]
    assert not model_routes.uses_flash
    assert not model_routes.expands_by_flash(999, 999)
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 9999)
    assert "Triton; no" in dict(published("DeepSeek-V3").described())["prefill attention"]
    assert not published("DeepSeek-V3").may_expand


def test_each_group_has_splits_of_its_own() -> None:
    """As many as its own heads and its own window need."""
    spec = with_windows(with_attention(QWEN_05B, head_dim=64), 512, *(None,) * 23)
    heads = gqa_of(spec)
    model_routes = made(spec)
    for rows, context in ((1, 4096), (1, 300), (8, 4096), (64, 32768)):
        expected_splits = num_splits(rows, heads.kv_heads, 64, context)
        windowed = num_splits(rows, heads.kv_heads, 64, min(context, 512))
        assert model_routes.splits(rows, context) == (windowed, expected_splits)
    assert len({*model_routes.splits(1, 4096)}) == 2
    for name, key_heads in (("DeepSeek-V2-Lite", 16), ("DeepSeek-V3", 128)):
        [splits] = published(name).splits(8, 4096)
        assert splits == latent_splits(8, key_heads, 1, 4096)
    assert Routes().splits(1, 4096) == ()


def test_a_line_for_each_group_and_use() -> None:
    described = dict(made(with_windows(QWEN_05B, 512, *(None,) * 23)).described())
    windowed = described["decode attention, window 512"]
    expected = (
        "Triton; contexts of 4,096 tokens are cut into 8 for 32 rows, into {} for one"
    )
    assert windowed == expected.format(8)
    assert described["decode attention, no window"] == expected.format(64)
    experts = dict(published("DeepSeek-V2-Lite").described())["experts"]
    assert experts == "Triton; grouped by expert from 5 tokens of a step"
    experts = dict(published("Qwen3-Next-80B-A3B").described())["experts"]
    assert experts.startswith("Triton; grouped by expert from 19 tokens of a step; up to")
    assert "experts" not in described


def test_kernels_that_are_compiled_apart_have_keys_of_their_own() -> None:
    plain, latents = made(), published("DeepSeek-V2-Lite")
    assert plain.variants(8, (4,)) == plain.variants(9, (7,)) != plain.variants(8, (1,))
    # Merging is compiled for each power of two.
    assert latents.variants(8, (5,)) == latents.variants(1, (8,))
    assert latents.variants(8, (5,)) != latents.variants(8, (4,))


def test_what_serves_recurrent_layers_is_described() -> None:
    assert "recurrent layers" not in dict(made().described())
    part = StatePart("heads", 2, (4, 4), "state")
    recurrent = with_parts(QWEN_05B, (part,), ())
    assert dict(made(recurrent).described())["recurrent layers"].startswith("Triton; ")
