"""The names of a model's tensors, as checkpoints write them."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final, TypeVar

from minfer.effects.models.architecture.spec import ModelSpec

PREFIX: Final = "model."  # of all names but the output head's
Value = TypeVar("Value")


def model_name(spec: ModelSpec, name: str, known: Collection[str]) -> str:
    """Returns the model's name of a tensor that a file calls `name`.

    As in transformers, `model.` is put before a name, or removed from it, where that
    makes it one of the `known`.
    """
    for one in spec.family.renamings:
        name = re.sub(one.pattern, one.name, name, count=1)
    name = _in_format(spec, name)
    for prefix in spec.family.prefixes:
        if (found := name.replace(prefix, "", 1)) in known:
            return found
    for candidate in (name.removeprefix(PREFIX), PREFIX + name):
        if candidate != name and candidate in known:
            return candidate
    return name


def _in_format(spec: ModelSpec, name: str) -> str:
    """Returns a tensor's name as the checkpoint's format has it."""
    if spec.quantization is None:
        return name
    other, own = spec.quantization.format.renamed
    return name.removesuffix(other) + own if other and name.endswith(other) else name


def model_names(
    spec: ModelSpec, places: Iterable[tuple[str, Value]], known: Collection[str]
) -> Iterator[tuple[str, Value]]:
    """Yields the model's names of tensors, those of other parts left out."""
    for name, value in places:
        if not name.startswith(spec.skipped):
            yield model_name(spec, name, known), value
