"""What a model is, as a value: sizes read from a checkpoint's config, and the family table.

Nothing here touches files or imports torch: memory plans and `--help` need these numbers at once.
A family is a row of `FAMILIES`, not a class: adding one means adding a row (and, where the row
says something new, the few lines of `effects/model.py` that read it).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import field, frozen

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the thing, the file and the remedy."""


class ConfigError(CheckpointError):
    """config.json is missing, unreadable, or has a value of the wrong type or range."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound but asks for something that minfer does not do (yet)."""


@frozen
class Family:
    """One row of the family table: how models of one architecture differ from the others.

    `names` and `layer_names` map a role (of `Weights`) to the tensor's name in the checkpoint;
    `{i}` stands for the layer. `defaults` are the config values transformers assumes when absent.
    """

    architecture: str
    norm: str
    qkv_bias: bool
    rope: str
    attention: str
    feed_forward: str
    activation: str
    defaults: Mapping[str, Any]
    names: Mapping[str, str]
    layer_names: Mapping[str, str]


_LLAMA_NAMES: Final[Mapping[str, str]] = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LLAMA_LAYER_NAMES: Final[Mapping[str, str]] = {
    "input_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "out": "model.layers.{i}.self_attn.o_proj.weight",
    "post_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}

FAMILIES: Final[Mapping[str, Family]] = {
    "Qwen2ForCausalLM": Family(
        architecture="Qwen2ForCausalLM",
        norm="rms",
        qkv_bias=True,
        rope="neox",  # the two halves of a head rotate against each other
        attention="causal",
        feed_forward="gated",
        activation="silu",
        defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
        names=_LLAMA_NAMES,
        layer_names=_LLAMA_LAYER_NAMES,
    ),
}


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
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    initializer_range: float = field(default=0.02)

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
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q": (spec.q_size, hidden),
        "k": (spec.kv_size, hidden),
        "v": (spec.kv_size, hidden),
    }
    if spec.family.qkv_bias:
        shapes |= {"q_bias": (spec.q_size,), "k_bias": (spec.kv_size,), "v_bias": (spec.kv_size,)}
    return shapes | {
        "out": (hidden, spec.q_size),
        "post_norm": (hidden,),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }


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
    read = _Reader({**family.defaults, **config}, where)
    _refuse_unsupported(read, family)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = heads if read.absent("num_key_value_heads") else read.size("num_key_value_heads")
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if not read.absent("head_dim"):
        head_dim = read.size("head_dim")
    elif hidden % heads:
        raise read.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise ConfigError(
            f"{where}: head_dim {head_dim} must be even, as rotary embedding pairs "
            "its halves; correct the config or use another checkpoint"
        )
    vocab = read.size("vocab_size")
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        layers=read.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.positive("rms_norm_eps"),
        rope_theta=_rope_theta(read),
        max_position_embeddings=read.size("max_position_embeddings"),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        dtype=_dtype(read),
        bos_id=next(iter(read.ids("bos_token_id")), None),
        eos_ids=read.ids("eos_token_id"),
        initializer_range=read.positive("initializer_range", 0.02),
    )


class _Reader:
    """Typed reads of a config, whose errors name key, file, expected and found value."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def absent(self, key: str) -> bool:
        return self.config.get(key) is None

    def error(self, key: str, expected: str) -> ConfigError:
        found = repr(self.config[key]) if key in self.config else "nothing"
        return ConfigError(
            f"{self.where}: {key} must be {expected}, found {found}; correct it or "
            "restore the original config.json of the checkpoint"
        )

    def size(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is not int or not 0 < value < 1 << 40:  # bool is an int, and not a size
            raise self.error(key, "a positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = default if self.absent(key) else self.config[key]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise self.error(key, "a positive finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and type(value) is not bool:
            raise self.error(key, "true or false")
        return bool(value)

    def table(self, key: str) -> dict[str, Any]:
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "an object or null")
        return dict(value or {})

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            raise self.error(key, "a token id, a list of token ids, or null")
        return tuple(dict.fromkeys(ids))


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


def _refuse_unsupported(read: _Reader, family: Family) -> None:
    if read.flag("use_sliding_window"):
        raise UnsupportedModelError(
            f"{read.where}: sliding-window attention (use_sliding_window) "
            "is not supported yet; use a checkpoint with full attention"
        )
    layer_types = read.config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise read.error("layer_types", "a list or null")
    other = set(map(str, layer_types or ())) - {"full_attention"}
    if other:
        raise UnsupportedModelError(
            f"{read.where}: layer_types {sorted(other)} are not supported "
            "yet; only full_attention is"
        )
    if read.config["hidden_act"] != family.activation:
        raise UnsupportedModelError(
            f"{read.where}: hidden_act {read.config['hidden_act']!r} is "
            f"not supported; only {family.activation!r} is"
        )
    if not read.absent("quantization_config"):
        raise UnsupportedModelError(
            f"{read.where}: quantized checkpoints (quantization_config) "
            "are not supported yet; use the unquantized checkpoint"
        )


def _rope_theta(read: _Reader) -> float:
    """Base of the rotary frequencies: transformers 5 nests it, older configs do not."""
    new, old = read.table("rope_parameters"), read.table("rope_scaling")
    kind = new.get("rope_type", old.get("rope_type", old.get("type", "default")))
    if kind != "default":
        raise UnsupportedModelError(
            f"{read.where}: rope scaling {kind!r} is not supported yet; "
            "remove it from the config to run within the original context"
        )
    if "rope_theta" in new:
        return _Reader(new, f"{read.where}: rope_parameters").positive("rope_theta")
    return read.positive("rope_theta", 10000.0)


def _dtype(read: _Reader) -> str:
    key = "torch_dtype" if read.absent("dtype") else "dtype"  # transformers 5 renamed it
    name = read.config.get(key) or "float32"
    if not isinstance(name, str):
        raise read.error(key, "the name of a dtype")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise read.error(key, "one of " + ", ".join(DTYPE_BYTES))
    return name
