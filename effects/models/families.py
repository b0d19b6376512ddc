"""The family table: how models of one architecture differ from others.

All are decoders with RMSNorm and rotary embedding of halves. A family is a row, not a
class.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen


@frozen
class Family:
    """One row of the family table; see `layers.py` for the types of its layers."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]  # config values that transformers assumes when absent
    # Where sliding windows are: in no layer, in every layer if there is a
    # `sliding_window`, or, with `use_sliding_window`, in the layers from
    # `max_window_layers` on (or by `layer_types`).
    windows: Literal["none", "every", "upper"] = "none"
    bias_flags: tuple[str, ...] = ()  # flags of the config that add biases
    qkv_bias: bool = False  # queries, keys and values always have biases
    qk_norm: bool = False  # each query and key head is normalised before it is rotated
    attention: Literal["gqa"] = "gqa"
    feed_forward: Literal["dense"] = "dense"


_QWEN: Final = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN2: Final = _QWEN | {"sliding_window": 4096, "max_window_layers": 28}
_QWEN3: Final = _QWEN2 | {"head_dim": 128}
_LLAMA: Final = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_LONG: Final = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MISTRAL: Final = _LLAMA | _LONG | {"sliding_window": 4096}
_ROWS: Final = (
    Family("Qwen2ForCausalLM", "qwen2", _QWEN2, "upper", qkv_bias=True),
    Family(
        "Qwen3ForCausalLM", "qwen3", _QWEN3, "upper", ("attention_bias",), qk_norm=True
    ),
    Family("LlamaForCausalLM", "llama", _LLAMA, "none", ("attention_bias", "mlp_bias")),
    Family("MistralForCausalLM", "mistral", _MISTRAL, "every"),
)
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}
OF_TYPE: Final[Mapping[str, Family]] = {row.model_type: row for row in _ROWS}
