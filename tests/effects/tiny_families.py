"""Tiny random checkpoints of every row of the family table, and of architectures outside
it.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import transformers

WINDOW: Final = 20
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "eos_token_id": None,
    "initializer_range": 0.3,
    "sliding_window": None,
}
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: Final[Mapping[str, dict[str, Any]]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": _YARN,
    "yarn-mscale": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
    "yarn-betas": _YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
}
_TIED: Final = {"tie_word_embeddings": True}
_BIAS: Final = {"attention_bias": True}
_UPPER: Final = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
_MIXED: Final = ["sliding_attention", "full_attention", "sliding_attention"]
_DYNAMIC: Final = {"rope_type": "dynamic", "factor": 4.0}
_NEOX: Final = {"head_dim": None, "initializer_range": 2.0}
_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EVERY: Final[dict[str, Any]] = {
    "plain": {},
    "tied": _TIED,
    "head_dim 32": {"head_dim": 32},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}
_QWEN: Final = _EVERY | {
    "windows above": _UPPER,
    "windows everywhere": _UPPER | {"max_window_layers": 0},
    "windows alternate": _UPPER | {"layer_types": _MIXED},
}
FAMILIES: Final[Mapping[str, dict[str, dict[str, Any]]]] = {
    "Qwen2": _QWEN,
    "Qwen3": _QWEN | {"attention_bias": _BIAS, "biases, windows": _BIAS | _UPPER | _TIED},
    "Llama": _EVERY
    | {
        "attention_bias": _BIAS,
        "mlp_bias": {"mlp_bias": True},
        "biases, tied": _BIAS | _TIED | {"mlp_bias": True},
    },
    "Mistral": _EVERY
    | {
        "window": {"sliding_window": WINDOW},
        "window, tied": _TIED | {"sliding_window": WINDOW, "head_dim": 32},
    },
}
# transformers' own classes over minfer's paged attention
OUTSIDE: Final[Mapping[str, dict[str, dict[str, Any]]]] = {
    "GPTNeoX": {
        "parallel residual": _NEOX,
        "sequential": _NEOX | {"use_parallel_residual": False},
    },
    "Olmo2": {"norms behind": {}, "dynamic rope": {"rope_parameters": _DYNAMIC}},
    "Olmo3": {"windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED}},
    "Mixtral": {
        "experts": _EXPERTS,
        "experts, windows": _EXPERTS | {"sliding_window": WINDOW},
    },
    "Granite": {
        "multipliers": {
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
        }
    },
    "Cohere2": {"windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED}},
    "Phi3": {"fused": {"pad_token_id": None}},
}
VARIANTS, OTHERS = (
    {
        (family, name): SIZES | row
        for family, rows in table.items()
        for name, row in rows.items()
    }
    for table in (FAMILIES, OUTSIDE)
)


def save(folder: str, family: str, config: Mapping[str, Any]) -> Any:
    """Write a random checkpoint; returns transformers' model of it."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**config)
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    for name, parameter in model.named_parameters():
        if (
            "bias" in name or "norm" in name
        ):  # made as zeros and ones, which would hide mistakes
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    model.save_pretrained(folder)
    return model


def config_of(family: str = "Llama", **changes: Any) -> dict[str, Any]:
    """A config as transformers writes it, with `changes`; ... removes a key."""
    made = getattr(transformers, f"{family}Config")(**SIZES).to_dict()
    made |= {"architectures": [f"{family}ForCausalLM"]} | changes
    return {key: value for key, value in made.items() if value is not ...}
