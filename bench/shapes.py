"""Qwen2.5's shapes, of which the benchmarks make models with random weights."""

from typing import Any, Final

FIELDS: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "72B": (8192, 29_568, 80, 64, 8, 152_064, False),
}
TINY: Final[dict[str, tuple[int, ...]]] = {  # to try a benchmark where there is no GPU
    "tiny": (64, 128, 2, 4, 2, 2048, False),
    "tiny draft": (32, 64, 1, 2, 1, 1920, True),
}


def qwen(name: str) -> dict[str, Any]:
    """What config.json says of the model of this size."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
    }
    sizes = {**SHAPES, **TINY}[name]
    return config | dict(zip(FIELDS, sizes, strict=True))
