"""Tiny random checkpoints of architectures outside the family table, as transformers
saves them.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from minfer.effects.models.fallback import quiet

VOCAB = 260
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# model_type -> what it adds to the above
CONFIGS: dict[str, dict[str, Any]] = {
    # Layer norms, parallel residual, rotation of a quarter of each head; dropout must not
    # drop.
    "gpt_neox": {
        "attention_dropout": 0.5,
        "hidden_dropout": 0.5,
        "tie_word_embeddings": False,
    },
    # Learnt positions, fused and transposed projections, tied embeddings.
    "gpt2": {},
    # Of the family table: norms behind the sublayers, normalised queries and keys.
    "olmo2": {},
    # The same, and full layers without positions.
    "exaone4": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    # Of the family table, but for its activation: fused projections.
    "phi3": {"hidden_act": "relu"},
    # Layer norms with factors less 1, a feed-forward without a gate.
    "nemotron": {"hidden_act": "relu2"},
    # Of the family table, but for its activation: experts, and queries and keys
    # normalised over all heads.
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "hidden_act": "relu"},
    # Of the family table: experts, every layer with a window.
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    # Of the family table: two windows for a full layer, each kind with a rope of its
    # own, scaled embeddings and scores.
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
    },
    # Of the family table: multipliers of embeddings, residuals, scores and logits.
    "granite": {
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    # Of the family table: parallel residual, rotation by neighbours, full layers without
    # positions.
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.3},
}


def tiny_config(kind: str, **changes: Any) -> Any:
    """A config of transformers for a tiny model of that type."""
    return transformers.CONFIG_MAPPING[kind](
        **{**COMMON, **CONFIGS.get(kind, {}), **changes}
    )


def save(folder: Path, kind: str, **changes: Any) -> Any:
    """Save a tiny random checkpoint; returns the model of transformers."""
    config = tiny_config(kind, **changes)
    torch.manual_seed(0)
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model = classes[type(config)](config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    with quiet():
        model.save_pretrained(folder)
    return model
