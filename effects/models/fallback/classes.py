"""Finds the class of transformers that runs a checkpoint, or why none can run here."""

import contextlib
import dataclasses
import inspect
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import transformers
from attrs import frozen
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minfer.effects.models.architecture.refusals import refuse_kind
from minfer.effects.models.architecture.rope_scaling import ALL_KEYS, FULL
from minfer.effects.models.architecture.spec_reader import read_architectures
from minfer.effects.models.config_reader import (
    ConfigReader,
    ModelConfigError,
    whole_to_int,
)
from minfer.effects.models.fields import NEUTRAL, UNREAD, refuse_field
from minfer.values.texts import without_breaks

IGNORED_KEYS: Final = {
    "attn_implementation",
    "experts_implementation",
    "return_dict",
    "dtype",  # is read by `read_dtype`
    "torch_dtype",
    "quantization_config",  # minfer loads quantized matrices
}


@frozen
class HuggingFaceModel:
    """A causal language model of transformers, and its config; both untyped."""

    model: Any  # the class
    config: Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice: what matters is raised."""
    logging: Any = transformers.utils.logging
    with contextlib.ExitStack() as stack:
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


def resolve(reader: ConfigReader) -> HuggingFaceModel:
    """Returns the class and config of transformers for a checkpoint.

    Raises `UnsupportedModelError` if there is no usable one, and `ModelConfigError`.
    """
    names = read_architectures(reader)
    prefix = f"architecture {', '.join(names) or '(none)'} is not supported:"
    config = _config(reader, prefix)
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), object)
    if obstacle := _obstacle(reader, config, model_class, names):
        raise reader.refusal(f"{prefix} {obstacle}")
    if names and model_class.__name__ not in names:
        refuse_kind(reader, names)  # `model_type` is another's
    return HuggingFaceModel(model_class, config)


def _config(reader: ConfigReader, prefix: str) -> Any:
    """Returns transformers' config object; `prefix` begins refusals."""
    model_type = str(reader.config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        own_code = ", and its own code (auto_map) is never executed"
        note = "" if reader.is_absent("auto_map") else own_code
        raise reader.refusal(
            f"{prefix} {_version()} has no model_type {model_type!r}{note}"
        )
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    _check_finite(reader)
    fields = {
        k: v for k, v in reader.config.items() if k not in IGNORED_KEYS and k[:1] != "_"
    }
    try:
        config = _as_auto_config(fields | _whole_numbers(config_class, fields))
    except Exception as error:  # each model's config has its own checks and errors
        reason = without_breaks(error)
        raise ModelConfigError(
            f"{reader.source}: transformers cannot read it: {reason}"
        ) from error
    _refuse_ignored(reader, type(config))
    ropes = {key: reader.config.get(key) for key in ("rope_scaling", "rope_parameters")}
    _check_rope_keys(ConfigReader(ropes, reader.source), type(config))
    _check_ropes(reader, config)
    # Some models search every input for it, to warn of missing masks.
    config.pad_token_id = None
    return config


def _refuse_ignored(reader: ConfigReader, config_class: Any) -> None:
    """Refuse fields that change the logits of some models and that a config class
    ignores. Raises `UnsupportedModelError`.
    """
    known_keys = {field.name for field in dataclasses.fields(config_class)} | {
        *config_class.attribute_map
    }
    ignored = reader.config.keys() - (
        known_keys - UNREAD.get(config_class.model_type, frozenset())
    )
    for key in sorted(NEUTRAL.keys() & ignored):
        refuse_field(reader, key, NEUTRAL[key])
    if (
        "sliding_window" in ignored
        and reader.config.get("use_sliding_window") is not False
    ):
        refuse_field(reader, "sliding_window", ())
    kinds = reader.config.get("layer_types")
    if "layer_types" in ignored and isinstance(kinds, list):
        windowed = not reader.is_absent("sliding_window")
        refuse_field(reader, "layer_types", () if windowed else ([FULL] * len(kinds),))


def _check_rope_keys(reader: ConfigReader, config_class: Any) -> None:
    """Refuse keys of rotary scalings, by kind of layers or not, that no type of them has
    and that the code of a config's class and model does not name. Raises
    `ModelConfigError`.
    """
    for name, table in reader.config.items():
        if not isinstance(table, dict):
            continue
        rope = ConfigReader(table, f"{reader.source}: {name}")
        for key, value in table.items():
            if isinstance(value, dict):
                _check_rope_keys(ConfigReader({key: value}, rope.source), config_class)
            elif (
                value is not None
                and key not in ALL_KEYS
                and not _names(config_class, key)
            ):
                raise ModelConfigError(
                    f"{rope.source}: {key} is not a key of rotary scalings; correct its "
                    f"name, or remove it"
                )


def _names(config_class: Any, key: str) -> bool:
    """Returns whether the code of transformers about a model names a key."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, config_class)
    modules = (
        sys.modules[hf_class.__module__] for hf_class in (config_class, model_class)
    )
    return any(f'"{key}"' in inspect.getsource(module) for module in modules)


def _check_ropes(reader: ConfigReader, config: Any) -> None:
    """Refuse types of rotary scaling that transformers does not have, and kinds of layers
    that the model does not have. Raises `UnsupportedModelError`, `ModelConfigError`.
    """
    tables = getattr(config, "rope_parameters", None) or {}
    nested = {key: value for key, value in tables.items() if isinstance(value, dict)}
    kinds = {*(getattr(config, "layer_types", None) or ())}
    for key in sorted(nested.keys() - kinds):
        raise ModelConfigError(
            f"{reader.source}: rope_parameters: {key} is no kind of this model's layers; "
            f"remove it, or correct model_type"
        )
    for table in nested.values() or (tables,):
        kind = table.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            supported = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise reader.refusal(
                f"rope_parameters: rope_type {kind!r} is not known to {_version()}; "
                f"{supported} are"
            )


def _as_auto_config(fields: Mapping[str, Any]) -> Any:
    """Returns the config object that `AutoConfig` makes of a config.json: its class is
    not always that of `model_type`.
    """
    with tempfile.TemporaryDirectory(prefix="minfer-config-") as folder:
        Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        config: Any = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    config.name_or_path = ""
    return config


def _check_finite(reader: ConfigReader) -> None:
    """Refuse numbers that are NaN or infinite, which would look like damaged weights.
    Raises `ModelConfigError`.
    """
    for key, value in reader.config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise reader.error(key, "a finite number")
        if isinstance(value, dict):
            _check_finite(ConfigReader(value, f"{reader.source}: {key}"))


def _whole_numbers(config_class: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a config class declares as whole numbers only, as such."""
    types = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    int_keys = (
        k for k in fields if "int" in types.get(k, "") and "float" not in types[k]
    )
    return {name: whole_to_int(fields[name]) for name in int_keys}


def _obstacle(
    reader: ConfigReader, config: Any, model_class: Any, names: list[Any]
) -> str:
    """Returns why a class cannot run over a paged cache, as far as its config shows
    it.
    """
    layers = set(map(str, getattr(config, "layer_types", None) or ()))
    other_layers = ", ".join(sorted(layers - {"full_attention", "sliding_attention"}))
    composite = config.get_text_config(decoder=True) is not config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    if composite or "vision_config" in reader.config:
        return "it is multimodal"
    causal = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    if model_class is object or (names and causal.isdisjoint(names)):
        return f"it is no causal language model of {_version()}"
    if other_layers:
        return f"it has layers other than attention ({other_layers})"
    if getattr(model_class, "_is_stateful", False):
        return "it is recurrent"
    if getattr(config, "num_kv_shared_layers", 0):
        return "layers share keys (num_kv_shared_layers)"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its attention is not reached through transformers' attention interface"
    return ""


def _version() -> str:
    return f"transformers {transformers.__version__}"
