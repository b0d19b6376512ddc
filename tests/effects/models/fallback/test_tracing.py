"""Specs are found by running a model without weights."""

from pathlib import Path

import pytest
import torch

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.fallback import fallback_spec
from minfer.effects.models.fallback.tracing import traced_attention
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.records.config import CacheGroup
from tests.effects.tiny_fallback import save, tiny_config

ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}


@pytest.mark.long
def test_windows_are_read_off_the_masks(tmp_path: Path) -> None:
    windows = {}
    for kind in ("gemma3_text", "mixtral", "cohere2", "olmo2"):
        config = {**tiny_config(kind).to_dict()}
        config["architectures"] = [ARCHITECTURES[kind]]
        windows[kind] = fallback_spec(config).windows
    assert windows == {
        "gemma3_text": (6, 6, None),
        "mixtral": (8, 8),
        "cohere2": (8, 8, 8, None),
        "olmo2": (None, None),
    }
    save(tmp_path, "mixtral")
    engine_config = prepare(EngineArgs(model=str(tmp_path), executor="dry")).config
    assert engine_config.groups == (CacheGroup(window=8),)
    # A window that no sequence can outgrow is none.
    config = {**tiny_config("mixtral", sliding_window=128).to_dict()}
    assert fallback_spec({**config, "architectures": ["MixtralForCausalLM"]}).windows == (
        None,
        None,
    )


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 2, 2)])
def test_masks_of_a_models_own_are_refused(mask: torch.Tensor | None) -> None:
    heads = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModelError, match="masks attention"):
        traced_attention(object(), heads, heads, heads, mask)
    with pytest.raises(UnsupportedModelError, match="softcap"):
        traced_attention(object(), heads, heads, heads, mask, softcap=30.0)
