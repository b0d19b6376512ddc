"""MTP heads of published checkpoints: every tensor of a head is read, or is a copy of the
target's that is known not to be.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from minfer.effects.models.architecture.draft_head import MTP
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.draft_heads.head_files import (
    checked_places,
    head_form,
    read_head,
)
from minfer.effects.models.draft_heads.head_weights import expected_head_parts
from minfer.effects.models.parts import WeightPart
from tests.effects.models.checkpoint.test_published_tensors import (
    CHECKPOINTS,
    Header,
    Published,
    predicts_further,
    published,
)

UNKNOWN: Final = ("nemotron_h",)  # families whose heads are not known
WITH_HEADS: Final = [
    label
    for label, row in CHECKPOINTS.items()
    if predicts_further(label) and row["config"]["model_type"] not in UNKNOWN
]
QUICK: Final = ("ERNIE-4.5-21B-A3B-PT", "Qwen3.5-0.8B-Base", "Qwen3.5-35B-A3B")
PREFIXES: Final = ("mtp.", "model.mtp", "model.layers.{layers}.")


def with_headers(checkpoint: Published, expected: Mapping[str, WeightPart]) -> Published:
    """The checkpoint, its files saying of a head's tensors what is expected."""
    for name, place in checkpoint.found.places.items():
        if (part := expected.get(name)) is not None:
            place.file.headers[name] = Header(part.shape, part.types[0])
    return checkpoint


@pytest.mark.parametrize(
    "label",
    [
        label if label in QUICK else pytest.param(label, marks=pytest.mark.long)
        for label in WITH_HEADS
    ],
)
def test_every_tensor_of_a_head_is_read(tmp_path: Path, label: str) -> None:
    checkpoint = published(tmp_path, label)
    spec, found = checkpoint.spec, checkpoint.found
    head = read_head(spec, MTP, tmp_path)
    form = head_form(spec, head, found)
    expected = expected_head_parts(head, spec.dtype, form)
    with_headers(checkpoint, expected)
    places = checked_places(spec, head, expected, found, tmp_path)
    prefixes = tuple(prefix.format(layers=len(spec.layers)) for prefix in PREFIXES)
    own = {name for name in found.places if name.startswith(prefixes)}
    unread = own - {place.name for place in places.values()}
    inert = () if head.quantization is None else head.quantization.format.inert
    further = "model.mtp.layers.1.", "model.mtp.layers.2."  # heads of MiMo
    assert all(
        name.startswith((*head.names.unread, *further)) or name.endswith(inert)
        for name in unread
    )
    assert {*places} <= own


@pytest.mark.long
def test_a_head_may_be_quantized_otherwise_than_its_target(tmp_path: Path) -> None:
    label = "Qwen3.6-27B (Qwen36)"
    spec = published(tmp_path, label).spec
    head = read_head(spec, MTP, tmp_path)
    assert spec.quantization is not None
    assert head.quantization is not None
    assert spec.quantization.format.scheme.group == 128
    assert head.quantization.format.scheme.group == 32
    config = CHECKPOINTS[label]["config"]
    groups = config["quantization_config"]["config_groups"]
    assert groups["group_mtp"]["weights"]["group_size"] == 32


def test_heads_of_other_families_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = published(tmp_path, "Qwen3-8B-FP8")
    with pytest.raises(UnsupportedModelError, match="MTP heads of Qwen3ForCausalLM are"):
        read_head(checkpoint.spec, MTP, tmp_path)
