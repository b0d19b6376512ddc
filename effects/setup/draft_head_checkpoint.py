"""The draft head for speculative decoding: finds it, and checks that it fits the target.

An MTP head is in the target's own checkpoint, an EAGLE-3 head in one of its own. Both
become part of the target's spec (`ModelSpec.draft_head`): what the cache keeps of a token
includes the head's layer.
"""

from pathlib import Path

from attrs import evolve, frozen

from minfer.effects.models.architecture.draft_head import MTP, HeadSpec
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.draft_heads.head_files import read_head
from minfer.effects.models.dtypes import INT8
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import model_folder
from minfer.effects.setup.speculation_settings import HEADS, SpeculativeConfig
from minfer.values.checks import ConfigError


@frozen
class HeadCheckpoint:
    """A draft head: its sizes, and where its weights are."""

    folder: Path  # of its weights: the target's own for MTP
    spec: HeadSpec


def find_head_checkpoint(
    speculative: SpeculativeConfig | None,
    args: EngineArgs,
    target: Path,
    spec: ModelSpec,
) -> HeadCheckpoint | None:
    """Returns the draft head of the settings, for the model in the folder `target`.

    Raises ConfigError if settings beside it are not supported, and CheckpointError if it
    is not there, does not fit the target, or cannot be read.
    """
    if speculative is None or speculative.method not in HEADS:
        return None
    _check_settings(speculative, args, spec)
    folder = target
    if speculative.method != MTP:
        folder = _folder(speculative.model)
    has_files = args.executor == "torch" and args.load_format != "dummy"
    head = read_head(spec, speculative.method, folder, random=not has_files)
    _check_layer(head, spec)
    return HeadCheckpoint(folder, head)


def _folder(model: str | None) -> Path:
    """Returns the folder of a head. Raises ConfigError that names it as a draft head."""
    try:
        return model_folder(model)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: as a draft head: {error}") from error


def _check_settings(
    speculative: SpeculativeConfig, args: EngineArgs, spec: ModelSpec
) -> None:
    """Refuse what is not supported beside draft heads. Raises ConfigError."""
    method = f"speculative_config: method {speculative.method!r}"
    if spec.parameters:
        raise ConfigError(
            f"{method} is not supported for {spec.family.architecture}, which "
            f"transformers' own model runs; choose ngram, suffix or draft_model"
        )
    if args.attention_window is not None:
        raise ConfigError(
            f"{method} is not supported beside attention_window; leave one of them out"
        )


def _check_layer(head: HeadSpec, spec: ModelSpec) -> None:
    """Refuse a head whose layer cannot stand in the target's cache. Raises
    ConfigError.
    """
    attention = head.layer.attention
    kinds = {type(group.attention) for group in spec.groups}
    if kinds != {type(attention)}:
        own, others = ("keys", "latents (MLA)")
        if not isinstance(attention, GQA):
            own, others = others, own
        raise ConfigError(
            f"speculative_config: the draft head keeps {own} of a token, and the layers "
            f"of {spec.family.architecture} keep {others}; choose another method"
        )
    mixed = evolve(spec, draft_head=head).with_head_layer().has_mixed_layers
    if spec.kv_dtype == INT8 and mixed:
        raise ConfigError(
            f"speculative_config: the draft head keeps other numbers of a token than "
            f"{spec.family.architecture}, which is not supported with a KV cache of INT8 "
            f"(kv_cache_dtype); choose fp8 or auto"
        )


def with_head(spec: ModelSpec, head: HeadCheckpoint | None) -> ModelSpec:
    """Returns the spec of a target with its draft head, if it has one."""
    return spec if head is None else evolve(spec, draft_head=head.spec)
