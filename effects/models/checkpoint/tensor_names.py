"""The names of a model's tensors, as checkpoints write them."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final, TypeVar

from minfer.effects.models.architecture.spec import ModelSpec

PREFIX: Final = "model."  # of all names but the output head's
Value = TypeVar("Value")


def model_name(spec: ModelSpec, name: str, names: Collection[str]) -> str:
    """Returns the model's name of a tensor that a file calls `name`.

    As in transformers, `model.` is put before a name, or removed from it, where that
    makes it one of the `names`.
    """
    for renaming in spec.family.renamings:
        name = re.sub(renaming.pattern, renaming.name, name, count=1)
    name = _in_format(spec, name)
    for prefix in spec.family.prefixes:
        if (stripped := name.replace(prefix, "", 1)) in names:
            return stripped
    for candidate in (name.removeprefix(PREFIX), PREFIX + name):
        if candidate != name and candidate in names:
            return candidate
    return name


def _in_format(spec: ModelSpec, name: str) -> str:
    """Returns a tensor's name as the checkpoint's format has it."""
    if spec.quantization is None:
        return name
    other_suffix, own_suffix = spec.quantization.format.renamed
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
