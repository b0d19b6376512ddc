"""Reads a `ModelSpec` from a checkpoint's config.json, by the family table."""

from collections.abc import Mapping
from typing import Any, Final

from minfer.effects.models.architecture.layers import Layer, read_layers
from minfer.effects.models.architecture.linear import NormRule
from minfer.effects.models.architecture.quantization import read_quantization
from minfer.effects.models.architecture.refusals import refuse_kind
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.config_reader import ConfigReader, ModelConfigError
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.table import ALIASES, BY_MODEL_TYPE, FAMILIES
from minfer.effects.models.fields import check_fields

RMS_NORM_EPS = 1e-6  # where a config has none
# Other names of a `model_type`: Kimi K2 is DeepSeek-V3 with other sizes.
MODEL_TYPE_ALIASES: Final = {"kimi_k2": "deepseek_v3"}
# Models of text and images by `model_type`, with that of their part about text.
MULTIMODAL: Final = {"gemma3": "gemma3_text"}
OUTER_KEYS: Final = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# How the names of tensors begin that are of other parts.
OTHER_PREFIXES: Final = tuple(
    prefix + component
    for prefix in ("", "model.")
    for component in ("vision_tower.", "multi_modal_projector.")
)


def parse_spec(
    config: Mapping[str, Any], source: str = "config.json", dtype: str | None = None
) -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `source` names it in errors, and
    `dtype` is the requested dtype (None: the config's).

    Raises `UnsupportedModelError` for models outside the family table, `ModelConfigError`
    for bad values.
    """
    family, config = _family_of(config, source)
    assumed = {"rms_norm_eps": RMS_NORM_EPS, **family.defaults}
    reader = ConfigReader({**assumed, **config}, source)
    residual_multiplier = _factor(reader, family.residual_multiplier)
    norms = NormRule(
        eps=reader.positive("rms_norm_eps"),
        offset=family.norm_offset,
        residual_multiplier=residual_multiplier,
    )
    layers, context = read_layers(reader, family, norms)
    hidden = reader.size("hidden_size")
    embedding_scale = hidden**0.5 if family.embedding_scale else 1.0
    embedding_scale *= _factor(reader, family.embedding_multiplier)
    logit_scale = _factor(reader, family.logit_multiplier)
    return ModelSpec(
        family=family,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        max_position_embeddings=context,
        original_context=_original_context(layers, context),
        dtype=read_dtype(reader, dtype),
        quantization=read_quantization(reader),
        eos_ids=reader.ids("eos_token_id") or family.eos_ids,
        norms=norms,
        embedding_scale=embedding_scale / residual_multiplier,
        logit_scale=logit_scale / _factor(reader, family.logit_divisor),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        head_bias=reader.is_set(family.head_bias),
        initializer_range=reader.positive("initializer_range", 0.02),
        skipped_prefixes=(
            *OTHER_PREFIXES,
            *family.skipped,
            *_further_layers(reader, len(layers)),
        ),
    )


def _original_context(layers: tuple[Layer, ...], context: int) -> int | None:
    """Returns the tokens up to which the short factors of longrope hold; None: there are
    none, or they hold in the whole context.
    """
    ropes = (layer.attention.rope for layer in layers)
    originals = [
        rope.original for rope in ropes if rope is not None and rope.kind == "longrope"
    ]
    original = min([context, *originals])
    return None if original == context else original


def _factor(reader: ConfigReader, key: str) -> float:
    """Returns the factor with that key, 1 if it is absent or the family has no key."""
    return reader.positive(key, 1.0) if key else 1.0


def _family_of(
    config: Mapping[str, Any], source: str
) -> tuple[Family, Mapping[str, Any]]:
    """Returns a config's row of the table, and its part about text, if it has parts."""
    text = config.get("text_config")
    if config.get("model_type") in MULTIMODAL and isinstance(text, dict):
        outer = {key: config[key] for key in OUTER_KEYS if config.get(key) is not None}
        config = {**text, **outer, "model_type": MULTIMODAL[config["model_type"]]}
        return _family(ConfigReader(config, source)), config
    return _family(ConfigReader(config, source)), config


def _further_layers(reader: ConfigReader, layers: int) -> list[str]:
    """Returns how tensors of layers begin that predict further tokens: they stand behind
    the model's own.
    """
    keys = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    num_further = max(reader.size(key, 0, low=0) for key in keys)
    return [f"model.layers.{layers + i}." for i in range(num_further)]


def _family(reader: ConfigReader) -> Family:
    """Returns the table's row for a config; refuses configs without one.

    As in transformers, `model_type` decides. `architectures` decides where there is none,
    and refuses what is not a causal language model.
    """
    names = read_architectures(reader)
    kind = reader.config.get("model_type")
    kind = MODEL_TYPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    known = {**FAMILIES, **ALIASES}
    families = [known[name] for name in names if name in known]
    family = (
        BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else next(iter(families), None)
    )
    is_base_model = family is not None and _base_model(family) in names
    if family is None or (names and not families and not is_base_model):
        if not names and kind is None:
            raise reader.error("architectures", "a list of class names")
        refuse_kind(reader, names)
        name = f"architecture {', '.join(names)}" if names else f"model_type {kind!r}"
        raise reader.unknown(f"{name} is not supported; supported: {', '.join(FAMILIES)}")
    _check_activation(reader, family)
    check_fields(reader, family)
    return family


def _check_activation(reader: ConfigReader, family: Family) -> None:
    """Refuse an activation that the family does not have."""
    if family.activation == "clamped":
        return  # no field names gpt-oss's
    key, supported = "hidden_act", ("silu",)
    if family.activation == "gelu_tanh":
        key, supported = "hidden_activation", ("gelu_pytorch_tanh",)
    if (activation := reader.config.get(key) or supported[0]) not in supported:
        fault = f"{key} {activation!r} is not supported"
        raise reader.refusal(f"{fault}; only {supported[0]!r} is")


def _base_model(family: Family) -> str:
    """Returns the class without an output head; a tied model can be read from its
    checkpoints.
    """
    return family.architecture.replace("ForCausalLM", "Model")


def read_architectures(reader: ConfigReader) -> list[str]:
    """Returns the class names in a config, if there are any."""
    names = reader.config.get("architectures")
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list | None) or not all(
        isinstance(name, str) for name in listed or ()
    ):
        raise reader.error("architectures", "a list of class names")
    return listed or []


def read_dtype(reader: ConfigReader, requested: str | None = None) -> str:
    """Returns the requested dtype, or the one that a config names. Raises
    `ModelConfigError` for an unsupported one.
    """
    if requested is not None:
        return requested
    # transformers 5 renamed it.
    key = "torch_dtype" if reader.is_absent("dtype") else "dtype"
    name = str(reader.config.get(key) or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        supported = ", ".join(DTYPE_BYTES)
        fault = f"{reader.source}: {key} must be one of {supported}, found {name!r}"
        raise ModelConfigError(f"{fault}; run it in one of them with --dtype (dtype=...)")
    return name
