"""A checkpoint by itself: tensors that no training produces, ids without embeddings."""

from pathlib import Path
from typing import Final

from safetensors.torch import load_file
from torch import Tensor

from minfer.effects.cli.verify.dequantized import Dequantized
from minfer.effects.cli.verify.findings import Check, judge
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.checkpoint import (
    read_optional,
    shards,
    skipped_tensors,
)
from minfer.effects.text.tokenizer import Tokenizer

MAX_WEIGHT: Final = 1e6  # of a weight; trained ones stay below 1e3


def check_tensors(copy: Dequantized, spec: ModelSpec) -> Check:
    """Check for numbers that no training produces: NaN, infinities, constant matrices,
    rows of zeros, which rounding may also produce. Tensors that are not read are named.
    """
    bad, names = [], list[str]()
    for path, _ in shards(copy.folder):
        for name, stored in load_file(path).items():
            names.append(name)
            if name.startswith(spec.skipped_prefixes):
                continue
            rows = 0 if name in copy.quantized else spec.vocab_size
            wrong = _damage(stored.float(), rows)
            bad += [f"{name} {wrong}"] if wrong else []
    skipped = skipped_tensors(spec, names)
    note = f"; not read are {skipped}" if skipped else ""
    return judge("tensors", bad, f"{len(names)} tensors{note}")


def _damage(tensor: Tensor, vocabulary: int) -> str:
    """The damage of a tensor, if there is any. Rows of zeros are damage in tensors with
    fewer rows than `vocabulary`.
    """
    if not tensor.isfinite().all() or tensor.abs().max() > MAX_WEIGHT:
        return "is not finite, or huge"
    if tensor.dim() < 2:
        return ""
    if tensor.min() == tensor.max():
        return "is constant"
    padded = len(tensor) >= vocabulary  # embeddings may be
    if not padded and not tensor.flatten(1).any(1).all():
        return "has rows of zeros"
    return ""


def check_ids(folder: Path, tokenizer: Tokenizer, spec: ModelSpec) -> Check:
    """Token ids must have an embedding, and the configs must agree where
    sequences end.
    """
    valid_ids = set(range(spec.vocab_size))
    named = {"tokenizer.json": {tokenizer.largest_id}}
    for name in ("config.json", "generation_config.json"):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = read_optional(folder / name).get(key)
            values = value if isinstance(value, list) else [value]
            named[f"{key} of {name}"] = {token for token in values if token is not None}
    bad = [
        f"{source} has {token_ids}"
        for source, token_ids in named.items()
        if not token_ids <= valid_ids
    ]
    ends = [
        token_ids
        for source, token_ids in named.items()
        if source.startswith("eos") and token_ids
    ]
    if ends and not set.intersection(*ends):
        bad.append(f"the configs end sequences with {ends}")
    return judge(
        "ids", bad, f"{spec.vocab_size} embeddings, ends {list(tokenizer.eos_ids)}"
    )
