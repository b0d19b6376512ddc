"""Which kernel serves what, and why another does not."""

import pytest

from minfer.effects.execution.device import routes
from minfer.effects.execution.device.routes import FLASH_FROM, Routes
from minfer.effects.models.spec import ModelSpec
from tests.effects.setup.test_memory import QWEN_05B
from tests.effects.tiny_model import with_attention, with_feed_forward, with_windows


def test_quack_serves_products_without_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*, bias: bool = False) -> Routes:
        spec = with_feed_forward(QWEN_05B, bias=bias)
        return Routes.for_device(spec, 64, 2048, "cpu")

    assert "Hopper" in made().no_quack
    assert "Hopper" in dict(made().described())["gate, up and SiLU"]
    monkeypatch.setattr(routes, "missing", lambda *_: "")
    assert made().no_quack == ""
    assert "quack where" in dict(made().described())["gate, up and SiLU"]
    assert "biases" in dict(made(bias=True).described())["gate, up and SiLU"]


def test_flash_attn_serves_long_chunks_without_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "")
    monkeypatch.setattr(routes, "missing", lambda *_: "")
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 64)

    def flash_from(spec: ModelSpec = QWEN_05B, budget: int = 2048) -> int:
        return Routes.for_device(spec, 64, budget, "cuda").flash_from

    assert flash_from() == FLASH_FROM[0]
    assert flash_from(with_attention(QWEN_05B, head_dim=128)) == FLASH_FROM[1]
    assert flash_from(with_windows(QWEN_05B, 4, *(None,) * 23)) == 0
    assert flash_from(with_windows(QWEN_05B, *(4,) * 24)) == 0
    assert flash_from(budget=64) == 0
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "not here")
    assert flash_from() == 0
