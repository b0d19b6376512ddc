"""Reads the text half of a multimodal model's config.json, as transformers does."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.multimodal import (
    MULTIMODAL,
    TEXT_PREFIXES,
    TEXT_SIZES,
    Multimodal,
)
from minfer.effects.models.families.table import BY_MODEL_TYPE, MODEL_TYPE_ALIASES
from minfer.effects.models.families.text_halves import TEXT_HALVES

_TEXT: Final = "text_config"
_TIED: Final = "tie_word_embeddings"
_ROPES: Final = ("rope_scaling", "rope_parameters")
_TYPES: Final = ("rope_type", "type")  # of a rope, by new and old configs
_SHARE: Final = "partial_rotary_factor"
_SECTIONS, _INTERLEAVED = "mrope_section", "mrope_interleaved"
NUM_SECTIONS: Final = 3  # of positions: time, height, width
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
# Fields of the whole that hold for its text half, whatever that says of itself.
_OUTER_KEYS: Final = (*_DTYPE_KEYS, "eos_token_id", "quantization_config")
# Objects in a config that describe a part of a multimodal model.
PART_KEYS: Final = (_TEXT, "vision_config", "audio_config", "llm_config")


@frozen
class TextHalf:
    """The text half of a multimodal model: a config as of a model of its own."""

    family: Family
    config: Mapping[str, Any]
    other_parts: tuple[str, ...]  # how names of tensors begin that are not of it


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Returns whether a config describes parts of a multimodal model."""
    return any(isinstance(config.get(key), dict) for key in PART_KEYS)


def read_text_half(
    config: Mapping[str, Any], names: list[str], source: str
) -> TextHalf | None:
    """Returns the text half of a multimodal model; None: the config is of another model.
    `names` are its classes.

    Raises `UnsupportedModelError` for classes and text models that the table does not
    have, `ModelConfigError` for a missing text half.
    """
    row = MULTIMODAL.get(str(config.get("model_type")))
    if row is None:
        return None
    outer = ConfigReader(config, source)
    text = _text_config(row, outer)
    kind = str(text.get("model_type") or row.texts[0])
    kind = MODEL_TYPE_ALIASES.get(kind, kind)
    if kind not in row.texts:
        raise outer.refusal(
            f"{_TEXT}: model_type {kind!r} is not supported in {row.architecture}; "
            f"{', '.join(row.texts)} {'are' if len(row.texts) > 1 else 'is'}"
        )
    family = TEXT_HALVES.get(kind) or BY_MODEL_TYPE[kind]
    if names and not _names_of(row, family) & {*map(_simplified, names)}:
        raise outer.refusal(
            f"architecture {', '.join(names)} is not supported for model_type "
            f"{row.model_type!r}; {row.architecture} is"
        )
    merged = {
        **TEXT_SIZES.get(kind, {}),
        **{key: value for key, value in text.items() if key != "architectures"},
        **_outer_fields(row, config, text),
        "model_type": family.model_type,
    }
    prefixes = tuple(
        prefix + part for part in row.other_parts for prefix in ("", "model.")
    )
    return TextHalf(family, merged, prefixes)


def _text_config(row: Multimodal, outer: ConfigReader) -> Mapping[str, Any]:
    """Returns the fields of the text half."""
    text = outer.config.get(_TEXT)
    if text is None and row.flat:
        return {**outer.config, "model_type": row.texts[0]}
    if not isinstance(text, dict):
        raise outer.error(_TEXT, "an object")
    return text


def without_sections(
    family: Family, text: Mapping[str, Any], source: str
) -> Mapping[str, Any]:
    """Returns the fields of a text half without what they say of sections of positions
    (M-RoPE), if the family has them: they are equal in text. Raises `ModelConfigError`
    for sections that do not divide the pairs of rotated dimensions.
    """
    if not family.positions.sections:
        return text
    reader = ConfigReader({**family.defaults, **text}, source)
    ropes = {name: text[name] for name in _ROPES if isinstance(text.get(name), dict)}
    for name, table in ropes.items():
        rope = ConfigReader(table, f"{reader.source}: {name}")
        rope.flag(_INTERLEAVED)
        if not rope.is_absent(_SECTIONS):
            shares = rope if _SHARE in table else reader
            _check_sections(rope, int(_head_dim(reader) * shares.positive(_SHARE, 1.0)))
        kept = {key: table[key] for key in table if key not in (_SECTIONS, _INTERLEAVED)}
        # What Qwen2-VL's configs call the default.
        types = {key: "default" for key in _TYPES if kept.get(key) == "mrope"}
        ropes[name] = kept | types
    return {**text, **ropes}


def _head_dim(reader: ConfigReader) -> int:
    heads = reader.size("num_attention_heads")
    return reader.size("head_dim", reader.size("hidden_size") // heads)


def _check_sections(rope: ConfigReader, rotary_dim: int) -> None:
    sizes, pairs = rope.config[_SECTIONS], rotary_dim // 2
    are_sizes = isinstance(sizes, list) and all(
        type(size) is int and size >= 0 for size in sizes
    )
    if not are_sizes or len(sizes) != NUM_SECTIONS or sum(sizes) != pairs:
        raise rope.error(
            _SECTIONS,
            f"a list of {NUM_SECTIONS} numbers of pairs of rotated dimensions, with the "
            f"sum {pairs}",
        )


def _outer_fields(
    row: Multimodal, config: Mapping[str, Any], text: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of the whole that replace those of its text half."""
    fields = {key: config[key] for key in _OUTER_KEYS if config.get(key) is not None}
    if fields.keys() & {*_DTYPE_KEYS}:
        fields = {**dict.fromkeys(_DTYPE_KEYS), **fields}
    outer_tied = config.get(_TIED)
    is_decided = row.tied_by_text or (row.tied_by_either and text.get(_TIED) is True)
    if outer_tied is not None and not is_decided:
        fields[_TIED] = outer_tied
    return fields


def _simplified(name: str) -> str:
    """Returns a class's name without what checkpoints spell in several ways: Kimi K2.5's
    class is KimiK25 in its own code, Kimi_K25 in transformers.
    """
    return name.replace("_", "")


def _names_of(row: Multimodal, family: Family) -> set[str]:
    """Returns the classes whose checkpoints can be read: that of the row, the one without
    an output head, and that of the text half.
    """
    base = row.architecture.replace("ForConditionalGeneration", "Model")
    return {*map(_simplified, (row.architecture, base, family.architecture))}


def prefixed(name: str) -> list[str]:
    """Returns how a name of the text half may begin in a checkpoint."""
    inner = name.removeprefix("model.")
    return [
        name,
        *(prefix + name for prefix in TEXT_PREFIXES),
        *(f"model.{prefix}{inner}" for prefix in TEXT_PREFIXES),
    ]
