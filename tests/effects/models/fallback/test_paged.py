"""Paged attention refuses what it does not do."""

from typing import Any

import pytest
import torch

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.fallback.paged import paged_attention


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "later tokens"),
        ({"anything_new": 1}, "anything_new"),
    ],
)
def test_attention_refuses_what_it_does_not_know(
    extras: dict[str, Any], message: str
) -> None:
    heads = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModelError, match=message):
        paged_attention(object(), heads, heads, heads, None, **extras)
    with pytest.raises(UnsupportedModelError, match="masks attention"):
        paged_attention(object(), heads, heads, heads, torch.zeros(1, 1, 1, 1))
