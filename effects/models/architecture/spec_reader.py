"""Reads a `ModelSpec` from a checkpoint's config.json, by the family table."""

from collections.abc import Mapping
from typing import Any, Final

from minfer.effects.models.architecture.layers import read_layers
from minfer.effects.models.architecture.linear import NormRule
from minfer.effects.models.architecture.quantization import read_quantization
from minfer.effects.models.architecture.refusals import refuse_kind
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.config_reader import ConfigReader, ModelConfigError
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.families import FAMILIES, OF_TYPE, Family
from minfer.effects.models.fields import check_fields

RMS_NORM_EPS = 1e-6  # where a config has none
# Other names of a `model_type`: Kimi K2 is DeepSeek-V3 with other sizes.
SAME_AS: Final = {"kimi_k2": "deepseek_v3"}
# Models of text and images by `model_type`, with that of their part about text.
MULTIMODAL: Final = {"gemma3": "gemma3_text"}
OUTER: Final = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# How the names of tensors begin that are of other parts.
OTHER_PARTS: Final = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.")
)


def parse_spec(
    config: Mapping[str, Any], where: str = "config.json", dtype: str | None = None
) -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `where` names it in errors, and
    `dtype` is the requested dtype (None: the config's).

    Raises `UnsupportedModelError` for models outside the family table, `ModelConfigError`
    for bad values.
    """
    family, config = _family_of(config, where)
    assumed = {"rms_norm_eps": RMS_NORM_EPS, **family.defaults}
    read = ConfigReader({**assumed, **config}, where)
    norms = NormRule(
        eps=read.positive("rms_norm_eps"),
        offset=family.norm_offset,
        after=family.norm_after,
    )
    layers, context = read_layers(read, family, norms)
    hidden = read.size("hidden_size")
    return ModelSpec(
        family=family,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        max_position_embeddings=context,
        dtype=read_dtype(read, dtype),
        quantization=read_quantization(read),
        eos_ids=read.ids("eos_token_id"),
        norms=norms,
        embedding_scale=hidden**0.5 if family.embedding_scale else 1.0,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        initializer_range=read.positive("initializer_range", 0.02),
        skipped=(*OTHER_PARTS, *_further_layers(read, len(layers))),
    )


def _family_of(config: Mapping[str, Any], where: str) -> tuple[Family, Mapping[str, Any]]:
    """Returns a config's row of the table, and its part about text, if it has parts."""
    text = config.get("text_config")
    if config.get("model_type") in MULTIMODAL and isinstance(text, dict):
        outer = {key: config[key] for key in OUTER if config.get(key) is not None}
        config = {**text, **outer, "model_type": MULTIMODAL[config["model_type"]]}
        return _family(ConfigReader(config, where)), config
    return _family(ConfigReader(config, where)), config


def _further_layers(read: ConfigReader, layers: int) -> list[str]:
    """Returns how tensors of layers begin that predict further tokens: they stand behind
    the model's own.
    """
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    more = max(read.size(key, 0, low=0) for key in keys)
    return [f"model.layers.{layers + i}." for i in range(more)]


def _family(read: ConfigReader) -> Family:
    """Returns the table's row for a config; refuses configs without one.

    As in transformers, `model_type` decides. `architectures` decides where there is none,
    and refuses what is not a causal language model.
    """
    names = read_architectures(read)
    kind = read.config.get("model_type")
    kind = SAME_AS.get(kind, kind) if isinstance(kind, str) else kind
    known = [FAMILIES[name] for name in names if name in FAMILIES]
    family = OF_TYPE.get(kind) if isinstance(kind, str) else next(iter(known), None)
    own = family is not None and _base_model(family) in names
    if family is None or (names and not known and not own):
        if not names and kind is None:
            raise read.error("architectures", "a list of class names")
        refuse_kind(read, names)
        what = f"architecture {', '.join(names)}" if names else f"model_type {kind!r}"
        raise read.unknown(f"{what} is not supported; supported: {', '.join(FAMILIES)}")
    _check_activation(read, family)
    check_fields(read, family)
    return family


def _check_activation(read: ConfigReader, family: Family) -> None:
    """Refuse an activation that the family does not have."""
    if family.activation == "clamped":
        return  # no field names gpt-oss's
    key, known = "hidden_act", ("silu",)
    if family.activation == "gelu_tanh":
        key, known = "hidden_activation", ("gelu_pytorch_tanh",)
    if (found := read.config.get(key) or known[0]) not in known:
        what = f"{key} {found!r} is not supported"
        raise read.refusal(f"{what}; only {known[0]!r} is")


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
