"""The names of a model's tensors, as checkpoints write them."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final, TypeVar

from minfer.effects.models.architecture.quantization import Quantization
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.families.multimodal import TEXT_PREFIXES

PREFIX: Final = "model."  # of all names but the output head's
Value = TypeVar("Value")


def model_name(spec: ModelSpec, name: str, names: Collection[str]) -> str:
    """Returns the model's name of a tensor that a file calls `name`.

    As in transformers, `model.` is put before a name, or removed from it, where that
    makes it one of the `names`. So is what the text half of a multimodal model is called
    there.
    """
    inner = _in_text_half(name)
    for stored_name in (name,) if inner == name else (inner, name):
        for renaming in spec.family.stored.renamings:
            stored_name = re.sub(renaming.pattern, renaming.name, stored_name, count=1)
        stored_name = name_in_format(spec.quantization, stored_name)
        for candidate in (
            stored_name,
            stored_name.removeprefix(PREFIX),
            PREFIX + stored_name,
        ):
            if candidate in names:
                return candidate
    return stored_name


def _in_text_half(name: str) -> str:
    """Returns a tensor's name without the name of the text half: of
    `model.language_model.norm.weight`, `model.norm.weight`.
    """
    outer = PREFIX if name.startswith(PREFIX) else ""
    for prefix in TEXT_PREFIXES:
        if name.startswith(outer + prefix):
            return outer + name.removeprefix(outer + prefix)
    return name


def name_in_format(quantization: Quantization | None, name: str) -> str:
    """Returns a tensor's name as the checkpoint's format has it."""
    if quantization is None:
        return name
    other_suffix, own_suffix = quantization.format.renamed
    return (
        name.removesuffix(other_suffix) + own_suffix
        if other_suffix and name.endswith(other_suffix)
        else name
    )


def model_names(
    spec: ModelSpec, places: Iterable[tuple[str, Value]], names: Collection[str]
) -> Iterator[tuple[str, Value]]:
    """Yields the model's names of tensors, those of other parts left out."""
    for name, value in places:
        if not name.startswith(spec.skipped_prefixes):
            yield model_name(spec, name, names), value
