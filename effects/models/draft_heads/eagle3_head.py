"""Reads an EAGLE-3 head from a checkpoint of its own, in one of two forms of config.json.

SpecForge, AngelSlim and ModelOpt write the config of a Llama or Qwen3 model of one layer,
with fields of the head beside it or in `eagle_config`, as the authors of EAGLE-3 do.
speculators writes the fields of the head, with the layer in `transformer_layer_config`.

Both list the layers of the target that the head reads. vLLM and speculators count
residual streams: 2 is the one before layer 2, behind two layers. SGLang, with whose
states SpecForge trains, counts layers, and reads behind them: the same stream is 1 there.
No field says which is meant. As in SGLang, a list that begins with 1 counts layers,
unless it is speculators', or for gpt-oss, whose heads (of ModelOpt) count streams.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from attrs import evolve

from minfer.effects.models.architecture.draft_head import EAGLE3, HeadNames, HeadSpec
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.layer_states import BEHIND_LAST
from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec, read_architectures
from minfer.effects.models.config_reader import (
    ConfigReader,
    ModelConfigError,
    UnsupportedModelError,
)

LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"
DRAFT_VOCAB: Final = "draft_vocab_size"
LAYER_CONFIG: Final = "transformer_layer_config"  # of speculators
SPECULATORS_TYPE: Final = "speculators_model_type"
EMBED: Final = "embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"
USES_LAYERS: Final = "use_aux_hidden_state"
TARGET_IDS: Final = "d2t"
# The architecture of the layer by the model_type of its config.
LAYER_TYPES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Fields of `eagle_config` that minfer's computation is for one value of.
FIXED: Final = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
_NAMES: Final = HeadNames(
    projection="",
    embedding_norm="layers.0.input_layernorm",
    hidden_norm="layers.0.hidden_norm",
    layer="layers.0.",
    norm="norm",
    unread=("t2d", "verifier_norm.", "verifier_lm_head."),
)


def read_eagle3_head(
    target: ModelSpec,
    config: Mapping[str, Any],
    tensor_names: Collection[str] | None = None,
    source: str = "config.json",
) -> HeadSpec:
    """Returns the head that its config describes, for a target. `tensor_names` are those
    of its checkpoint, as `eagle3_name` has them, which say what it shares with the
    target; None: it shares the embedding alone. Raises `ModelConfigError`, and
    `UnsupportedModelError` for another kind of head, or a head of another model.
    """
    fields, layer_config = _head_fields(config, source)
    reader = ConfigReader(fields, source)
    _check_fixed(reader)
    layer_spec = _layer_spec(target, layer_config, source)
    _check_target(target, layer_spec, reader)
    reads_layers = _reads_layers(reader)
    hidden_layers = (
        _read_hidden_layers(target, reader) if reads_layers else (BEHIND_LAST,)
    )
    draft_vocab = reader.size(DRAFT_VOCAB, target.vocab_size)
    names = _tensor_names(target, layer_spec, draft_vocab, tensor_names, source)
    state_norms = _state_norms(reader, len(hidden_layers))
    if reads_layers:
        names = evolve(names, projection="fc", state_norms=state_norms)
    return HeadSpec(
        kind=EAGLE3,
        hidden_size=layer_spec.hidden_size,
        layer=_first_layer(layer_spec),
        norms=layer_spec.norms,
        names=names,
        hidden_layers=hidden_layers,
        after_norm=not reads_layers,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab if names.lm_head else None,
        logit_scale=reader.positive("logit_scale", 1.0),
        chains_normed=reader.flag("norm_output"),
        normed_residual=reader.flag("norm_before_residual"),
        quantization=layer_spec.quantization,
    )


def eagle3_name(stored_name: str) -> str:
    """Returns the name of a tensor as `HeadNames` has it: checkpoints may write `model.`
    before it, and call the layer `midlayer`.
    """
    name = stored_name.removeprefix("model.")
    if name.startswith("midlayer."):
        return _NAMES.layer + name.removeprefix("midlayer.")
    return name


def _head_fields(
    config: Mapping[str, Any], source: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the fields of a head, and the config of its layer. Raises
    `ModelConfigError`, and `UnsupportedModelError` for what is no EAGLE-3 head.
    """
    reader = ConfigReader(config, source)
    kind = config.get(SPECULATORS_TYPE)
    if kind is not None:
        if kind != EAGLE3:
            raise reader.refusal(
                f"draft heads of {SPECULATORS_TYPE} {kind!r} are not supported; eagle3 is"
            )
        layer_config = config.get(LAYER_CONFIG)
        if not isinstance(layer_config, dict):
            raise reader.error(LAYER_CONFIG, "an object")
        residual = {"norm_before_residual": True}  # where there is none, as in vLLM
        return {**residual, **_given(config)}, layer_config
    names = read_architectures(reader)
    is_head = any("eagle3" in name.lower() for name in names)
    if not is_head and reader.is_absent(DRAFT_VOCAB):
        raise reader.refusal(
            f"this is no EAGLE-3 head: of architectures {', '.join(names) or 'nothing'}, "
            f"and without {DRAFT_VOCAB}; give a head's checkpoint, or for a smaller "
            f"model the method draft_model"
        )
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise reader.error("eagle_config", "an object or null")
    return {**config, **_given(inner)}, config


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are not null."""
    return {key: value for key, value in config.items() if value is not None}


def _check_fixed(reader: ConfigReader) -> None:
    """Refuse values of fields for which minfer computes one."""
    for key, supported in FIXED.items():
        value = reader.config.get(key, supported)
        if value is not supported:
            raise reader.refusal(
                f"{key} {value!r} is not supported for an EAGLE-3 head; "
                f"{str(supported).lower()} is"
            )
    for key in ("pard_token", "mask_token_id"):
        if not reader.is_absent(key):
            raise reader.refusal(
                f"{key}: heads that draft several tokens at once (P-EAGLE) are not "
                f"supported; those that draft one after another are"
            )


def _layer_spec(target: ModelSpec, config: Mapping[str, Any], source: str) -> ModelSpec:
    """Returns the spec of a model of the head's layer alone. Raises `ModelConfigError`,
    `UnsupportedModelError`.
    """
    reader = ConfigReader(config, source)
    kind = config.get("model_type", "llama")
    if kind not in LAYER_TYPES:
        raise reader.refusal(
            f"EAGLE-3 heads of model_type {kind!r} are not supported; those of "
            f"{', '.join(LAYER_TYPES)} are"
        )
    if (layers := reader.size("num_hidden_layers", 1)) != 1:
        raise reader.refusal(f"an EAGLE-3 head of {layers} layers; heads of one work")
    own = {"architectures": [LAYER_TYPES[kind]], "model_type": kind}
    return parse_spec({**config, **own}, source, target.dtype)


def _first_layer(spec: ModelSpec) -> Layer:
    """Returns the head's layer, whose queries, keys and values are products of an
    embedding and a hidden state, which are normalised outside it.
    """
    layer = spec.layers[0]
    attention = layer.attention
    if not isinstance(attention, GQA):
        raise TypeError(f"an EAGLE-3 head with {attention}")
    unnormed = evolve(attention.norms, before_name="")
    twice = evolve(attention, input_size=2 * spec.hidden_size, norms=unnormed)
    return evolve(layer, attention=twice)


def _check_target(target: ModelSpec, head: ModelSpec, reader: ConfigReader) -> None:
    """Refuse a head of another model than the target."""
    if target.parameters:
        raise UnsupportedModelError(
            f"{reader.source}: {target.family.architecture} runs by transformers' own "
            f"model, which gives a draft head no hidden states; use another method of "
            f"speculation, such as ngram"
        )
    factors = target.embedding_scale, target.logit_scale, target.norms.residual_multiplier
    is_scaled = any(factor != 1 for factor in factors) or target.logit_cap is not None
    if is_scaled or target.altup is not None:
        raise UnsupportedModelError(
            f"{reader.source}: draft heads for {target.family.architecture}, which "
            f"scales embeddings, residuals or logits, are not supported; use another "
            f"method of speculation, such as ngram"
        )
    size = reader.size("target_hidden_size", head.hidden_size)
    if not _reads_layers(reader):
        size = head.hidden_size  # which is the target's, as there is no projection
    for label, own, targets in (
        ("hidden states of", size, target.hidden_size),
        ("a vocabulary of", head.vocab_size, target.vocab_size),
    ):
        if own != targets:
            raise ModelConfigError(
                f"{reader.source}: the head is of a model with {label} {own}, and "
                f"{target.family.architecture} here has {targets}; use the head of this "
                f"model"
            )


def _reads_layers(reader: ConfigReader) -> bool:
    """Returns whether a head reads residual streams between layers, of which a projection
    makes a state; else it reads the last hidden state. Raises `ModelConfigError`.
    """
    return reader.is_absent(USES_LAYERS) or reader.flag(USES_LAYERS)


def _read_hidden_layers(target: ModelSpec, reader: ConfigReader) -> tuple[int, ...]:
    """Returns the layers before which the head reads the residual stream. Raises
    `ModelConfigError`.
    """
    layers = len(target.layers)
    listed = reader.config.get(LAYER_IDS) or [2, layers // 2, layers - 3]
    is_valid = isinstance(listed, list) and all(
        type(layer) is int and 0 <= layer <= layers for layer in listed
    )
    if not is_valid:
        raise reader.error(
            LAYER_IDS, f"a list of layers from 0 to {layers}, those of the model"
        )
    ascending = sorted({*listed})
    counts_streams = (
        reader.config.get(SPECULATORS_TYPE) is not None
        or target.family.model_type == "gpt_oss"
    )
    if ascending[0] == 1 and ascending[-1] < layers and not counts_streams:
        ascending = [layer + 1 for layer in ascending]
    return tuple(BEHIND_LAST if layer == layers else layer for layer in ascending)


def _state_norms(reader: ConfigReader, streams: int) -> tuple[str, ...]:
    """Returns the names of the norms before the projection: of all streams as one, of
    each, or none. Raises `ModelConfigError`.
    """
    norms_whole, norms_each = reader.flag("norm_before_fc"), reader.flag("fc_norm")
    if norms_whole and norms_each:
        raise reader.error("fc_norm", "false, as norm_before_fc is true")
    if norms_each:
        return tuple(f"fc_norm.{stream}" for stream in range(streams))
    return ("input_norm",) if norms_whole else ()


def _tensor_names(
    target: ModelSpec,
    head: ModelSpec,
    draft_vocab: int,
    tensor_names: Collection[str] | None,
    source: str,
) -> HeadNames:
    """Returns the names of the head's tensors, those left out that are the target's.
    Raises `ModelConfigError` for a width at which it cannot share the embedding.
    """
    stored = {LM_HEAD, TARGET_IDS} if tensor_names is None else {*tensor_names}
    has_embedding = EMBED in stored or (
        tensor_names is None and head.hidden_size != target.hidden_size
    )
    if not has_embedding and head.hidden_size != target.hidden_size:
        raise ModelConfigError(
            f"{source}: the head has hidden_size {head.hidden_size} and no {EMBED}, so "
            f"it needs a target with that hidden_size, and this one's is "
            f"{target.hidden_size}; use the head of this model"
        )
    if draft_vocab > target.vocab_size:
        raise ModelConfigError(
            f"{source}: {DRAFT_VOCAB} must be at most vocab_size = {target.vocab_size}, "
            f"found {draft_vocab}; restore the original config.json of the checkpoint"
        )
    is_reduced = draft_vocab < target.vocab_size
    has_head = is_reduced or LM_HEAD in stored
    has_ids = is_reduced or (TARGET_IDS in stored and tensor_names is not None)
    return evolve(
        _NAMES,
        embed=EMBED if has_embedding else "",
        lm_head=LM_HEAD if has_head else "",
        target_ids=TARGET_IDS if has_ids else "",
    )
