"""From a checkpoint's config.json to a `ModelSpec`, by the family table."""

from collections.abc import Mapping
from typing import Any

from minfer.effects.models.config_reader import Reader
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.families import FAMILIES, Family
from minfer.effects.models.layers import read_layers
from minfer.effects.models.rope import parse_rope
from minfer.effects.models.spec import ModelSpec

RMS_NORM_EPS = 1e-6  # where a config says none


def parse_spec(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `where` names it in errors.

    Raises `UnsupportedModelError` for what the family table lacks, `ConfigError` for bad
    values.
    """
    family = _family(Reader(config, where))
    assumed = {"rms_norm_eps": RMS_NORM_EPS, **family.defaults}
    read = Reader({**assumed, **config}, where)
    layers = read_layers(read, family)
    rope, context = parse_rope(read)
    return ModelSpec(
        family=family,
        vocab_size=read.size("vocab_size"),
        hidden_size=read.size("hidden_size"),
        layers=layers,
        max_position_embeddings=context,
        dtype=read_dtype(read),
        eos_ids=read.ids("eos_token_id"),
        rms_norm_eps=read.positive("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        initializer_range=read.positive("initializer_range", 0.02),
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


def read_dtype(read: Reader) -> str:
    """The dtype that a config names. Raises `ConfigError` for one that does not run."""
    key = "torch_dtype" if read.absent("dtype") else "dtype"  # transformers 5 renamed it
    name = str(read.config.get(key) or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise read.error(key, "one of " + ", ".join(DTYPE_BYTES))
    return name
