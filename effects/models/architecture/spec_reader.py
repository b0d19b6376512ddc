"""Reads a `ModelSpec` from a checkpoint's config.json, by the family table."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve

from minfer.effects.models.architecture.hybrid_layers import with_layer_count
from minfer.effects.models.architecture.layer_inputs import InputTable
from minfer.effects.models.architecture.layer_reader import read_layers
from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.linear import NormRule
from minfer.effects.models.architecture.own_names import (
    names_in_file,
    with_common_names,
)
from minfer.effects.models.architecture.quantization import read_quantization
from minfer.effects.models.architecture.refusals import refuse_kind
from minfer.effects.models.architecture.spec import ModelSpec, layer_prefix
from minfer.effects.models.architecture.text_half import (
    TextHalf,
    is_multimodal,
    prefixed,
    read_text_half,
    without_sections,
)
from minfer.effects.models.config_reader import (
    ConfigReader,
    ModelConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.multimodal import MULTIMODAL
from minfer.effects.models.families.table import (
    BY_MODEL_TYPE,
    CLASS_ALIASES,
    FAMILIES,
    MODEL_TYPE_ALIASES,
)
from minfer.effects.models.fields import check_fields
from minfer.kernels.leaves import Activation

RMS_NORM_EPS = 1e-6  # where a config has none
# Names of an activation in configs; the first is meant where there is none.
ACTIVATION_NAMES: Final[Mapping[Activation, tuple[str, ...]]] = {
    "silu": ("silu",),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "ungated_gelu": ("gelu",),
    "ungated_gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "ungated_relu2": ("relu2",),
}
# How the names of tensors begin that are of other parts, beside a config of text alone.
OTHER_PARTS: Final = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.")
)


def parse_spec(
    config: Mapping[str, Any], source: str = "config.json", dtype: str | None = None
) -> ModelSpec:
    """Turn a config.json's contents into a `ModelSpec`; `source` names it in errors, and
    `dtype` is the requested dtype (None: the config's).

    Raises `UnsupportedModelError` for models outside the family table, `ModelConfigError`
    for bad values.
    """
    half = _family_of(config, source)
    family, config = half.family, half.config
    assumed = {"rms_norm_eps": RMS_NORM_EPS, **family.defaults}
    names = names_in_file(family, config)
    reader = ConfigReader({**assumed, **config}, source, names)
    reader = with_layer_count(reader, family)
    residual_multiplier = _factor(reader, family.factors.residual)
    norms = NormRule(
        eps=reader.positive("rms_norm_eps"),
        offset=family.norms.offset,
        centered=family.norms.layer_norm,
        bias=family.norms.bias,
        float32=family.norms.float32,
        residual_multiplier=residual_multiplier,
    )
    layers, context = read_layers(reader, family, norms)
    hidden = reader.size("hidden_size")
    embedding_scale = hidden**0.5 if family.factors.embedding_root else 1.0
    embedding_scale *= _factor(reader, family.factors.embedding)
    logit_scale = _factor(reader, family.factors.logits)
    return ModelSpec(
        family=family,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        max_position_embeddings=context,
        original_context=_original_context(layers, context),
        dtype=read_dtype(reader, dtype),
        quantization=read_quantization(reader),
        eos_ids=(
            family.eos_ids
            if reader.is_absent("eos_token_id")
            else reader.ids("eos_token_id")
        ),
        norms=norms,
        embedding_scale=embedding_scale / residual_multiplier,
        logit_scale=logit_scale / _factor(reader, family.factors.logit_divisor),
        logit_cap=reader.optional_positive(family.factors.logit_cap),
        input_table=_read_input_table(reader, family, norms),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        head_bias=reader.is_set(family.biases.lm_head),
        initializer_range=reader.positive("initializer_range", 0.02),
        skipped_prefixes=(
            *half.other_parts,
            *family.stored.skipped,
            *_further_layers(reader, len(layers)),
            *_unused_keys(layers),
        ),
    )


def _original_context(layers: tuple[Layer, ...], context: int) -> int | None:
    """Returns the tokens up to which the short factors of longrope hold; None: there are
    none, or they hold in the whole context.
    """
    attentions = (layer.attention for layer in layers)
    ropes = (attention.rope for attention in attentions if attention is not None)
    originals = [
        rope.original for rope in ropes if rope is not None and rope.kind == "longrope"
    ]
    original = min([context, *originals])
    return None if original == context else original


def _read_input_table(
    reader: ConfigReader, family: Family, norms: NormRule
) -> InputTable | None:
    """Returns the sizes of what makes the inputs of layers, if they have some. Raises
    `ModelConfigError`.
    """
    key, width_key = "vocab_size_per_layer_input", family.extras.inputs
    if not width_key or not reader.size(width_key, 0, low=0):
        return None
    has_all_tokens = reader.size(key) >= reader.size("vocab_size")
    if not has_all_tokens and not family.extras.fewer_inputs:
        raise reader.error(key, f"at least vocab_size = {reader.size('vocab_size')}")
    return InputTable(
        vocab_size=reader.size(key),
        hidden_size=reader.size("hidden_size"),
        layers=reader.size("num_hidden_layers"),
        width=reader.size(width_key),
        norms=norms,
        has_all_tokens=has_all_tokens,
    )


def _unused_keys(layers: tuple[Layer, ...]) -> list[str]:
    """Returns how tensors begin of keys and values that layers have in checkpoints, and
    do not use, as they read those of other layers.
    """
    return [
        prefix
        for index, layer in enumerate(layers)
        if layer.shares_keys_of is not None
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        for prefix in prefixed(f"{layer_prefix(index)}self_attn.{name}")
    ]


def _factor(reader: ConfigReader, key: str) -> float:
    """Returns the factor with that key, 1 if it is absent or the family has no key."""
    return reader.positive(key, 1.0) if key else 1.0


def _family_of(config: Mapping[str, Any], source: str) -> TextHalf:
    """Returns a config's row of the table, and its part about text, if it has parts."""
    reader = ConfigReader(config, source)
    half = read_text_half(config, read_architectures(reader), source)
    if half is None:
        half = TextHalf(_family(reader), config, OTHER_PARTS)
    else:
        _check_family(ConfigReader(half.config, source), half.family)
    text = without_sections(half.family, half.config, source)
    family, config = _variant(ConfigReader(text, source), half.family)
    return evolve(half, family=family, config=config)


def _variant(reader: ConfigReader, family: Family) -> tuple[Family, Mapping[str, Any]]:
    """Returns the row for this config, and the config with the names of values that most
    families have. Raises `ModelConfigError`, `UnsupportedModelError`.
    """
    values = {**family.defaults, **reader.config}
    config = with_common_names(reader, family)
    for variant in family.variants:
        for key, value in variant.when.items():
            if isinstance(value, bool):
                reader.flag(key)
        if all(values.get(key) == value for key, value in variant.when.items()):
            family = evolve(family, **variant.row)
            config |= variant.config
            if variant.refusal:
                raise reader.refusal(variant.refusal)
    return family, config


def _further_layers(reader: ConfigReader, layers: int) -> list[str]:
    """Returns how tensors of layers begin that predict further tokens: they stand behind
    the model's own.
    """
    keys = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    num_further = max(reader.size(key, 0, low=0) for key in keys)
    return [
        prefix
        for i in range(num_further)
        for prefix in prefixed(layer_prefix(layers + i))
    ]


def _family(reader: ConfigReader) -> Family:
    """Returns the table's row for a config; refuses configs without one.

    As in transformers, `model_type` decides. `architectures` decides where there is none,
    and refuses what is not a causal language model.
    """
    names = read_architectures(reader)
    kind = reader.config.get("model_type")
    kind = MODEL_TYPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    known = {**FAMILIES, **CLASS_ALIASES}
    families = [known[name] for name in names if name in known]
    family = (
        BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else next(iter(families), None)
    )
    is_base_model = family is not None and _base_model(family) in names
    if family is None or (names and not families and not is_base_model):
        if not names and kind is None:
            raise reader.error("architectures", "a list of class names")
        refuse_kind(reader, names)
        if is_multimodal(reader.config):
            raise _unknown_multimodal(reader, names)
        name = f"architecture {', '.join(names)}" if names else f"model_type {kind!r}"
        raise reader.unknown(f"{name} is not supported; supported: {', '.join(FAMILIES)}")
    _check_family(reader, family)
    return family


def _unknown_multimodal(reader: ConfigReader, names: list[str]) -> UnsupportedModelError:
    """Returns the error about a multimodal model that the table does not have."""
    kind = reader.config.get("model_type")
    return reader.refusal(
        f"{', '.join(names) or f'model_type {kind!r}'} is multimodal, and which of its "
        f"tensors are of its text half is not known; of multimodal models, the text "
        f"halves of {', '.join(MULTIMODAL)} work"
    )


def _check_family(reader: ConfigReader, family: Family) -> None:
    """Refuse what the config of a family asks for and minfer does not compute."""
    _check_activation(reader, family)
    check_fields(reader, family)


def _check_activation(reader: ConfigReader, family: Family) -> None:
    """Refuse an activation that the family does not have."""
    if family.activation == "clamped":
        return  # no field names gpt-oss's
    key, supported = "hidden_act", ACTIVATION_NAMES[family.activation]
    if family.activation == "gelu_tanh":
        key = "hidden_activation"
    key = family.own_names.get(key, key)
    if (activation := reader.config.get(key) or supported[0]) not in supported:
        fault = f"{key} {activation!r} is not supported"
        names = " or ".join(map(repr, supported))
        raise reader.refusal(f"{fault}; only {names} is")


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
