"""Reads a `ModelSpec` from a checkpoint's config.json, by the family table."""

from collections.abc import Mapping
from typing import Any

from minfer.effects.models.config_reader import ConfigReader, ModelConfigError
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.families import FAMILIES, OF_TYPE, Family
from minfer.effects.models.layers import read_layers
from minfer.effects.models.rope_scaling import parse_rope
from minfer.effects.models.spec import ModelSpec

RMS_NORM_EPS = 1e-6  # where a config has none


def parse_spec(
    config: Mapping[str, Any], where: str = "config.json", dtype: str | None = None
) -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `where` names it in errors, and
    `dtype` is the requested dtype (None: the config's).

    Raises `UnsupportedModelError` for models outside the family table, `ModelConfigError`
    for bad values.
    """
    family = _family(ConfigReader(config, where))
    assumed = {"rms_norm_eps": RMS_NORM_EPS, **family.defaults}
    read = ConfigReader({**assumed, **config}, where)
    layers = read_layers(read, family)
    rope, context = parse_rope(read)
    return ModelSpec(
        family=family,
        vocab_size=read.size("vocab_size"),
        hidden_size=read.size("hidden_size"),
        layers=layers,
        max_position_embeddings=context,
        dtype=read_dtype(read, dtype),
        eos_ids=read.ids("eos_token_id"),
        rms_norm_eps=read.positive("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        initializer_range=read.positive("initializer_range", 0.02),
    )


def _family(read: ConfigReader) -> Family:
    """Returns the table's row for a config; refuses configs without one.

    As in transformers, `model_type` decides. `architectures` decides where there is none,
    and refuses what is not a causal language model.
    """
    names = read_architectures(read)
    known = [FAMILIES[name] for name in names if name in FAMILIES]
    kind = read.config.get("model_type")
    family = OF_TYPE.get(kind) if isinstance(kind, str) else next(iter(known), None)
    own = family is not None and _base_model(family) in names
    if family is None or (names and not known and not own):
        if not names and kind is None:
            raise read.error("architectures", "a list of class names")
        what = f"architecture {', '.join(names)}" if names else f"model_type {kind!r}"
        raise read.refusal(f"{what} is not supported; supported: {', '.join(FAMILIES)}")
    if (act := read.config.get("hidden_act", "silu")) != "silu":
        raise read.refusal(f"hidden_act {act!r} is not supported; only 'silu' is")
    if not read.absent("quantization_config"):
        what = "quantized checkpoints (quantization_config) are not supported yet"
        raise read.refusal(f"{what}; use the unquantized checkpoint")
    return family


def _base_model(family: Family) -> str:
    """Returns the class without an output head; a tied model can be read from its
    checkpoints.
    """
    return family.architecture.replace("ForCausalLM", "Model")


def read_architectures(read: ConfigReader) -> list[str]:
    """Returns the class names in a config, if there are any."""
    names = read.config.get("architectures")
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list | None) or not all(
        isinstance(name, str) for name in listed or ()
    ):
        raise read.error("architectures", "a list of class names")
    return listed or []


def read_dtype(read: ConfigReader, requested: str | None = None) -> str:
    """Returns the requested dtype, or the one that a config names. Raises
    `ModelConfigError` for an unsupported one.
    """
    if requested is not None:
        return requested
    key = "torch_dtype" if read.absent("dtype") else "dtype"  # transformers 5 renamed it
    name = str(read.config.get(key) or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        found = f"{read.where}: {key} must be one of {known}, found {name!r}"
        raise ModelConfigError(f"{found}; run it in one of them with --dtype (dtype=...)")
    return name
