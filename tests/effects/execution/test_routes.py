"""Which kernel serves what, and why another does not."""

from typing import Any

import pytest
from attrs import evolve

from minfer.effects.execution import routes
from minfer.effects.execution.routes import FLASH_FROM, Routes
from tests.effects.setup.test_memory import QWEN_05B


def test_quack_serves_products_without_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**changes: Any) -> Routes:
        return Routes.for_device(evolve(QWEN_05B, **changes), 64, 2048, "cpu")

    assert "Hopper" in made().no_quack
    assert "Hopper" in dict(made().described())["gate, up and SiLU"]
    monkeypatch.setattr(routes, "missing", lambda *_: "")
    assert made().no_quack == ""
    assert "quack where" in dict(made().described())["gate, up and SiLU"]
    assert "biases" in dict(made(mlp_bias=True).described())["gate, up and SiLU"]


def test_flash_attn_serves_long_chunks_without_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "")
    monkeypatch.setattr(routes, "missing", lambda *_: "")
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 64)

    def flash_from(budget: int = 2048, **changes: Any) -> int:
        spec = evolve(QWEN_05B, **changes)
        return Routes.for_device(spec, 64, budget, "cuda").flash_from

    assert flash_from() == FLASH_FROM[0]
    assert flash_from(head_dim=128) == FLASH_FROM[1]
    assert flash_from(windows=(4, *(None,) * 23)) == 0
    assert flash_from(windows=(4,) * 24) == 0
    assert flash_from(budget=64) == 0
    monkeypatch.setattr(routes, "flash_missing", lambda *_: "not here")
    assert flash_from() == 0
