"""The draft model for speculative decoding: finds it, and checks that it fits the target.

A draft is a token id, so both models must have the same token for every id that both
have. Their vocabularies may be padded to different sizes: ids that the draft model lacks
are never drafted.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import (
    CheckpointError,
    config_path,
    read_config,
)
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.gguf.container import is_gguf, read_gguf
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.token_lists import token_texts
from minfer.effects.setup.folders import bundled_folder, model_folder
from minfer.effects.setup.speculation_settings import DRAFT_MODEL, SpeculativeConfig
from minfer.records.config import EngineConfig
from minfer.values.checks import ConfigError

_TOKENIZER: Final = "tokenizer.json"


@frozen
class DraftCheckpoint:
    """The draft model."""

    folder: Path
    spec: ModelSpec  # with the dtype in use


def find_draft_checkpoint(
    speculative: SpeculativeConfig | None,
    target: Path,
    spec: ModelSpec,
    config: EngineConfig,
) -> DraftCheckpoint | None:
    """Returns the draft model of the settings, for the model in the folder `target`; for
    the bundled model, unless they name another, the bundled draft model.

    Raises ConfigError if it does not fit the target, or cannot be read.
    """
    if speculative is None or speculative.method != DRAFT_MODEL:
        return None
    if speculative.model is None and target != bundled_folder():
        raise ConfigError(
            "speculative_config: draft_model needs a model: the path of the draft's "
            "checkpoint folder, or its name on the hub"
        )
    folder = _folder(speculative.model)
    draft = _spec(folder, spec.dtype)
    if draft.max_position_embeddings < config.max_model_len:
        raise ConfigError(
            f"speculative_config: the draft model {folder} was made for "
            f"{draft.max_position_embeddings} tokens, and the context is "
            f"{config.max_model_len}; lower --max-model-len, or choose another draft"
        )
    _check_vocabulary(folder, target, min(draft.vocab_size, spec.vocab_size))
    return DraftCheckpoint(folder, draft)


def _folder(model: str | None) -> Path:
    """Returns the folder of a draft model. Raises ConfigError that names it as a draft
    model.
    """
    if model is None:
        return bundled_folder("draft")
    try:
        return model_folder(model)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: as a draft model: {error}") from error


def _spec(folder: Path, dtype: str) -> ModelSpec:
    """Returns the draft model's sizes, in the target's dtype."""
    try:
        spec = parse_spec(read_config(folder), str(config_path(folder)), dtype)
        return as_stored(spec, folder)
    except CheckpointError as error:
        raise ConfigError(f"speculative_config: as a draft model: {error}") from error


def _check_vocabulary(draft: Path, target: Path, size: int) -> None:
    """Refuse a draft model with another token for an id below `size`. Raises
    ConfigError.
    """
    files = _tokenizer_file(draft), _tokenizer_file(target)
    if not all(file.is_file() for file in files):
        if any(file.is_file() for file in files):
            raise _mismatch_error(draft, target, "one of them has no tokenizer.json")
        return  # token ids in, token ids out
    if not any(map(is_gguf, files)) and files[0].read_bytes() == files[1].read_bytes():
        return
    draft_tokens, target_tokens = _tokens(files[0]), _tokens(files[1])
    for token in sorted((draft_tokens.keys() | target_tokens.keys()) & set(range(size))):
        if draft_tokens.get(token) != target_tokens.get(token):
            texts = f"{draft_tokens.get(token)!r} and {target_tokens.get(token)!r}"
            raise _mismatch_error(draft, target, f"token {token} is {texts:.200}")


def _tokenizer_file(model: Path) -> Path:
    return model if is_gguf(model) else model / _TOKENIZER


def _tokens(file: Path) -> Mapping[int, str]:
    """Returns the text of each token id."""
    if is_gguf(file):
        return token_texts(GgufMetadata(read_gguf(file)))
    try:
        parsed: Any = json.loads(file.read_bytes())
        vocab = parsed["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else _unigram_pairs(vocab)
        texts = {int(token): str(text) for text, token in pairs}
        added_entries = parsed.get("added_tokens", ())  # may be absent
        added = {int(entry["id"]): str(entry["content"]) for entry in added_entries}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"speculative_config: {file}: no tokenizer can be read of it ({error!r})"
        ) from error
    return {**texts, **added}


def _unigram_pairs(vocab: Any) -> list[tuple[str, int]]:
    """Returns the texts of a unigram vocabulary, which are listed by id, with their
    ids.
    """
    return [(text, token) for token, (text, *_) in enumerate(vocab)]


def _mismatch_error(draft: Path, target: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"speculative_config: the draft model {draft} has another tokenizer than "
        f"{target}: {reason}; a draft model must share the target's vocabulary"
    )
