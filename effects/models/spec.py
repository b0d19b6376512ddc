"""What a model is, as a value: sizes read from a checkpoint's config, and the family
table.

Nothing here touches files or imports torch: memory plans and `--help` need these numbers
at once. A family is a row of `FAMILIES`, not a class.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from attrs import Factory, frozen

from minfer.effects.models.config_reader import CheckpointError as CheckpointError
from minfer.effects.models.config_reader import Reader
from minfer.effects.models.config_reader import (
    UnsupportedModelError as UnsupportedModelError,
)
from minfer.effects.models.rope import Rope, parse_rope

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names in a checkpoint


@frozen
class Family:
    """One row of the family table: how models of one architecture differ from the others.

    All are decoders with RMSNorm, rotary embedding of halves, and a gated feed-forward.
    """

    architecture: str
    defaults: Mapping[str, Any]  # config values that transformers assumes when absent
    # Where sliding windows are: in no layer, in every layer if there is a
    # `sliding_window`, or, with `use_sliding_window`, in the layers from
    # `max_window_layers` on (or by `layer_types`).
    windows: Literal["none", "every", "upper"] = "none"
    bias_flags: tuple[str, ...] = ()  # flags of the config that add biases
    qkv_bias: bool = False  # queries, keys and values always have biases
    qk_norm: bool = False  # each query and key head is normalised before it is rotated


_QWEN: Final = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN2: Final = _QWEN | {"sliding_window": 4096, "max_window_layers": 28}
_QWEN3: Final = _QWEN2 | {"head_dim": 128}
_LLAMA: Final = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_LONG: Final = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_MISTRAL: Final = _LLAMA | _LONG | {"sliding_window": 4096}
_ROWS: Final = (
    Family("Qwen2ForCausalLM", _QWEN2, "upper", qkv_bias=True),
    Family("Qwen3ForCausalLM", _QWEN3, "upper", ("attention_bias",), qk_norm=True),
    Family("LlamaForCausalLM", _LLAMA, "none", ("attention_bias", "mlp_bias")),
    Family("MistralForCausalLM", _MISTRAL, "every"),
)
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}


@frozen
class ModelSpec:
    """Sizes of one model, as its config.json gives them. Lengths in tokens, sizes in
    elements.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int  # after scaling
    dtype: str
    eos_ids: tuple[int, ...]
    rms_norm_eps: float = 0.0
    rope: Rope | None = None  # None: positions are not this engine's business
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    # A layer: how many keys up to its own a query attends to; None: all of them.
    windows: tuple[int | None, ...] = Factory(
        lambda s: (None,) * s.layers, takes_self=True
    )
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    parameters: int = (
        0  # counted on transformers' own model, which runs it; 0: the family's
    )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.kv_heads * self.head_dim


def layer_tensors(spec: ModelSpec) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield each tensor of a layer: name in the checkpoint, field of `LayerWeights`,
    shape.
    """
    hidden, wide, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv, qk_norm = spec.q_size, spec.kv_size, spec.family.qk_norm
    for present, name, field, shape in (
        (True, "input_layernorm.weight", "input_norm", (hidden,)),
        (True, "self_attn.q_proj.weight", "qkv", (q, hidden)),
        (True, "self_attn.k_proj.weight", "qkv", (kv, hidden)),
        (True, "self_attn.v_proj.weight", "qkv", (kv, hidden)),
        (spec.qkv_bias, "self_attn.q_proj.bias", "qkv_bias", (q,)),
        (spec.qkv_bias, "self_attn.k_proj.bias", "qkv_bias", (kv,)),
        (spec.qkv_bias, "self_attn.v_proj.bias", "qkv_bias", (kv,)),
        (qk_norm, "self_attn.q_norm.weight", "q_norm", (head,)),
        (qk_norm, "self_attn.k_norm.weight", "k_norm", (head,)),
        (True, "self_attn.o_proj.weight", "out", (hidden, q)),
        (True, "post_attention_layernorm.weight", "post_norm", (hidden,)),
        (spec.out_bias, "self_attn.o_proj.bias", "out_bias", (hidden,)),
        (True, "mlp.gate_proj.weight", "gate_up", (wide, hidden)),
        (True, "mlp.up_proj.weight", "gate_up", (wide, hidden)),
        (True, "mlp.down_proj.weight", "down", (hidden, wide)),
        (spec.mlp_bias, "mlp.gate_proj.bias", "gate_up_bias", (wide,)),
        (spec.mlp_bias, "mlp.up_proj.bias", "gate_up_bias", (wide,)),
        (spec.mlp_bias, "mlp.down_proj.bias", "down_bias", (hidden,)),
    ):
        if present:
            yield name, field, shape


def parameter_count(spec: ModelSpec) -> int:
    """Parameters held in memory (a tied embedding counts once)."""
    if spec.parameters:
        return spec.parameters
    layer = sum(math.prod(shape) for *_, shape in layer_tensors(spec))
    heads = 1 if spec.tie_word_embeddings else 2
    return (
        spec.layers * layer
        + heads * spec.vocab_size * spec.hidden_size
        + spec.hidden_size
    )


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of all weights in `dtype` (the config's own when None)."""
    return parameter_count(spec) * dtype_bytes(dtype or spec.dtype)


def kv_bytes_per_token(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of keys and values that one token leaves in the cache, over all layers."""
    return 2 * spec.layers * spec.kv_size * dtype_bytes(dtype or spec.dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises `UnsupportedModelError` for a dtype that minfer does
    not run.
    """
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise UnsupportedModelError(
            f"dtype {dtype!r} is not supported; choose one of {known}"
        )
    return DTYPE_BYTES[dtype]


def parse_spec(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `where` names it in errors.

    Raises `UnsupportedModelError` for what the family table lacks, `ConfigError` for bad
    values.
    """
    family = _family(Reader(config, where))
    read = Reader({"rms_norm_eps": 1e-6, **family.defaults, **config}, where)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
    if read.absent("head_dim") and hidden % heads:
        raise read.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    head_dim = read.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise read.error(
            "head_dim", f"even, which {head_dim} is not, as its halves are paired"
        )
    layers, (rope, context) = read.size("num_hidden_layers"), parse_rope(read)
    attention_bias = "attention_bias" in family.bias_flags and read.flag("attention_bias")
    mlp_bias = "mlp_bias" in family.bias_flags and read.flag("mlp_bias")
    return ModelSpec(
        family=family,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=context,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        dtype=read_dtype(read),
        eos_ids=read.ids("eos_token_id"),
        windows=_windows(read, family, layers),
        rms_norm_eps=read.positive("rms_norm_eps"),
        initializer_range=read.positive("initializer_range", 0.02),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
    )


def _family(read: Reader) -> Family:
    """The row of the table for a config; refuses what no row says."""
    names = read.config.get("architectures")
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(n, str) for n in names)
    ):
        raise read.error("architectures", "a list of class names")
    known = [FAMILIES[name] for name in names if name in FAMILIES]
    if not known:
        what = f"architecture {', '.join(names)} is not supported"
        raise read.refusal(f"{what}; supported: {', '.join(FAMILIES)}")
    if (act := read.config.get("hidden_act", "silu")) != "silu":
        raise read.refusal(f"hidden_act {act!r} is not supported; only 'silu' is")
    if not read.absent("quantization_config"):
        what = "quantized checkpoints (quantization_config) are not supported yet"
        raise read.refusal(f"{what}; use the unquantized checkpoint")
    return known[0]


def _windows(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, as transformers' configuration classes derive it."""
    window, used = None, read.flag("use_sliding_window")
    if not read.absent("sliding_window"):
        if family.windows == "none" and (used or read.absent("use_sliding_window")):
            raise read.refusal(f"sliding_window is not known to {family.architecture}")
        if used or family.windows == "every":
            window = read.size("sliding_window", low=2)
    first = read.size("max_window_layers", low=0) if family.windows == "upper" else 0
    kinds = read.config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise read.error("layer_types", f"null or a list of num_hidden_layers = {layers}")
    other = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if other or (family.windows == "every" and window and "full_attention" in kinds):
        raise read.refusal(
            f"layer_types {other or kinds} are not known to {family.architecture}"
        )
    if "sliding_attention" in kinds and window is None:
        raise read.error(
            "layer_types", "all full_attention, as no sliding window is in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_dtype(read: Reader) -> str:
    """The dtype that a config names. Raises `ConfigError` for one that does not run."""
    key = "torch_dtype" if read.absent("dtype") else "dtype"  # transformers 5 renamed it
    name = str(read.config.get(key) or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise read.error(key, "one of " + ", ".join(DTYPE_BYTES))
    return name
