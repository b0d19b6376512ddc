"""What a model is, as a value: sizes read from a checkpoint's config, and the family table.

Nothing here touches files or imports torch: memory plans and `--help` need these numbers at once.
A family is a row of `FAMILIES`, not a class: adding one means adding a row (and, where the row
says something new, the few lines of `effects/model.py` that read it).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from attrs import Factory, field, frozen

from minfer.effects.config_reader import CheckpointError as CheckpointError
from minfer.effects.config_reader import ConfigError as ConfigError
from minfer.effects.config_reader import Reader
from minfer.effects.config_reader import UnsupportedModelError as UnsupportedModelError
from minfer.effects.rope import Rope, parse_rope

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}

_NAMES: Final[Mapping[str, str]] = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LINEAR: Final[Mapping[str, str]] = {
    **{role: f"model.layers.{{i}}.self_attn.{role}_proj" for role in "qkv"},
    "out": "model.layers.{i}.self_attn.o_proj",
    **{role: f"model.layers.{{i}}.mlp.{role}_proj" for role in ("gate", "up", "down")},
}
_LAYER_NAMES: Final[Mapping[str, str]] = {
    **{role: f"{module}.weight" for role, module in _LINEAR.items()},
    **{f"{role}_bias": f"{module}.bias" for role, module in _LINEAR.items()},
    "input_norm": "model.layers.{i}.input_layernorm.weight",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "post_norm": "model.layers.{i}.post_attention_layernorm.weight",
}


@frozen
class Family:
    """One row of the family table: how models of one architecture differ from the others.

    All are decoders with RMSNorm, rotary embedding of whole heads by halves, and a gated
    feed-forward. `names` and `layer_names` map a role (of `Weights`) to the tensor's name in the
    checkpoint; `{i}` stands for the layer. `defaults` are the config values transformers assumes
    when absent.
    """

    architecture: str
    defaults: Mapping[str, Any]
    activation: str = "silu"
    qkv_bias: bool = False  # queries, keys and values always have biases
    bias_flags: tuple[str, ...] = ()  # flags of the config that add biases
    qk_norm: bool = False  # each query and key head is normalised before it is rotated
    # Where sliding windows are: in no layer, in every layer if there is a `sliding_window`, or,
    # with `use_sliding_window`, in the layers from `max_window_layers` on (or by `layer_types`).
    windows: Literal["none", "every", "upper"] = "none"
    names: Mapping[str, str] = _NAMES
    layer_names: Mapping[str, str] = _LAYER_NAMES


_ALL: Final = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN: Final = _ALL | {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_UPPER: Final = {"sliding_window": 4096, "max_window_layers": 28}
_LLAMA: Final = _ALL | {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_MISTRAL: Final = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_ROWS: Final = (
    Family("Qwen2ForCausalLM", _QWEN | _UPPER, qkv_bias=True, windows="upper"),
    Family(
        "Qwen3ForCausalLM",
        _QWEN | _UPPER | {"head_dim": 128},
        bias_flags=("attention_bias",),
        qk_norm=True,
        windows="upper",
    ),
    Family("LlamaForCausalLM", _LLAMA, bias_flags=("attention_bias", "mlp_bias")),
    Family("MistralForCausalLM", _LLAMA | _MISTRAL | {"sliding_window": 4096}, windows="every"),
)
FAMILIES: Final[Mapping[str, Family]] = {row.architecture: row for row in _ROWS}


@frozen
class ModelSpec:
    """Sizes of one model, as its config.json gives them. Lengths in tokens, sizes in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope | None  # None: positions are not this engine's business
    max_position_embeddings: int  # after scaling
    tie_word_embeddings: bool
    dtype: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    initializer_range: float = field(default=0.02)
    # A layer: how many keys up to its own a query attends to; None: all of them.
    windows: tuple[int | None, ...] = Factory(lambda s: (None,) * s.layers, takes_self=True)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    parameters: int = 0  # counted on transformers' own model, which runs it; 0: the family's

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.kv_heads * self.head_dim


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape of one layer's tensors, as the checkpoint stores them (not yet fused)."""
    hidden, wide = spec.hidden_size, spec.intermediate_size
    q, kv, head = spec.q_size, spec.kv_size, spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_norm": (hidden,), "q": (q, hidden)}
    shapes |= {"k": (kv, hidden), "v": (kv, hidden)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if spec.family.qk_norm:
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    shapes |= {"out": (hidden, q), "post_norm": (hidden,)}
    if spec.out_bias:
        shapes |= {"out_bias": (hidden,)}
    shapes |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    if spec.mlp_bias:
        shapes |= {"gate_bias": (wide,), "up_bias": (wide,), "down_bias": (hidden,)}
    return shapes


def expected_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor that a checkpoint of this spec must hold."""
    family = spec.family
    yield family.names["embed"], (spec.vocab_size, spec.hidden_size)
    shapes = layer_shapes(spec)
    for i in range(spec.layers):
        for role, shape in shapes.items():
            yield family.layer_names[role].format(i=i), shape
    yield family.names["norm"], (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        yield family.names["lm_head"], (spec.vocab_size, spec.hidden_size)


def parameter_count(spec: ModelSpec) -> int:
    """Parameters held in memory (a tied embedding counts once)."""
    if spec.parameters:
        return spec.parameters
    layer = sum(math.prod(shape) for shape in layer_shapes(spec).values())
    heads = 1 if spec.tie_word_embeddings else 2
    return spec.layers * layer + heads * spec.vocab_size * spec.hidden_size + spec.hidden_size


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of all weights in `dtype` (the config's own when None)."""
    return parameter_count(spec) * dtype_bytes(dtype or spec.dtype)


def kv_bytes_per_token(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of keys and values that one token leaves in the cache, over all layers."""
    return 2 * spec.layers * spec.kv_size * dtype_bytes(dtype or spec.dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises `UnsupportedModelError` for a dtype that minfer does not run."""
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of {known}")
    return DTYPE_BYTES[dtype]


def parse_spec(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `where` names it in errors.

    Raises `UnsupportedModelError` for an architecture or option outside the family table and
    `ConfigError` for values that are missing, of the wrong type, or contradict each other.
    """
    family = _family(config, where)
    read = Reader({**family.defaults, **config}, where)
    _refuse_unsupported(read, family)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if read.absent("head_dim") and hidden % heads:
        raise read.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    head_dim = read.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise read.error("head_dim", f"even, which {head_dim} is not, as its halves are paired")
    layers, (rope, context) = read.size("num_hidden_layers"), parse_rope(read)
    attention_bias, mlp_bias = (
        flag in family.bias_flags and read.flag(flag) for flag in ("attention_bias", "mlp_bias")
    )
    return ModelSpec(
        family=family,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.positive("rms_norm_eps"),
        rope=rope,
        max_position_embeddings=context,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        dtype=read_dtype(read),
        bos_id=next(iter(read.ids("bos_token_id")), None),
        eos_ids=read.ids("eos_token_id"),
        initializer_range=read.positive("initializer_range", 0.02),
        windows=_windows(read, family, layers),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
    )


def _family(config: Mapping[str, Any], where: str) -> Family:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(
            f"{where}: architectures must be a list of class names, found {names!r}; "
            "restore the original config.json of the checkpoint"
        )
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"{where}: architecture {', '.join(names)} is not supported; "
        f"supported: {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(read: Reader, family: Family) -> None:
    act = read.config["hidden_act"]
    if act != family.activation:
        raise read.refusal(f"hidden_act {act!r} is not supported; only {family.activation!r} is")
    if not read.absent("quantization_config"):
        raise read.refusal(
            "quantized checkpoints (quantization_config) are not supported yet; use the "
            "unquantized checkpoint"
        )


def _windows(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, as transformers' configuration classes derive it."""
    window, first, used = None, 0, read.flag("use_sliding_window")
    if not read.absent("sliding_window"):
        if family.windows == "none" and (used or read.absent("use_sliding_window")):
            raise read.refusal(f"sliding_window is not known to {family.architecture}")
        if used or family.windows == "every":
            window = read.size("sliding_window", low=2)
    if family.windows == "upper":
        first = read.size("max_window_layers", low=0)
    kinds = read.config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise read.error("layer_types", f"null or a list of num_hidden_layers = {layers}")
    other = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if other or (family.windows == "every" and window and "full_attention" in kinds):
        raise read.refusal(f"layer_types {other or kinds} are not known to {family.architecture}")
    if "sliding_attention" in kinds and window is None:
        raise read.error("layer_types", "all full_attention, as no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_dtype(read: Reader) -> str:
    """The dtype that a config names. Raises `ConfigError` for one that does not run."""
    key = "torch_dtype" if read.absent("dtype") else "dtype"  # transformers 5 renamed it
    name = read.config.get(key) or "float32"
    if not isinstance(name, str):
        raise read.error(key, "the name of a dtype")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise read.error(key, "one of " + ", ".join(DTYPE_BYTES))
    return name
