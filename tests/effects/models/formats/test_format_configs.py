"""Damaged `quantization_config`s: refused by name, or read as what they mean."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pytest

from minfer.effects.models.architecture.quantization import Quantization
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.config_reader import CheckpointError
from tests.effects.checkpoints.formats_made import FORMATS, GROUP
from tests.effects.tiny_model import CONFIG

VALUES: Final[list[Any]] = [
    *(None, True, False, "", "4", "int", "float", "group", "channel", "block", "x"),
    *(-1, 0, 1, 4, 8, 32, 128, 32.0, 64.0, -1.0, 4.5, 1e400, float("nan"), 1 << 70),
    *([], {}, [[]], [128.0, 128.0], [128], [None], {"a": {}}, {"group_0": None}),
    *({"group_0": {}}, {"group_0": {"weights": {}}}, {"format": []}, {"type": {}}),
]
FURTHER: Final = (
    *("sparsity_config", "transform_config", "kv_cache_scheme", "format", "version"),
    *("desc_act", "checkpoint_format", "fmt", "bits", "weight_block_size", "actorder"),
)


def read(quantization: Any) -> Quantization | None:
    return parse_spec(CONFIG | {"quantization_config": quantization}).quantization


def damaged(value: Any) -> Iterator[Any]:
    """The value with each of its parts another, gone, or one more."""
    yield from VALUES
    if isinstance(value, list):
        yield from ([changed] for element in value for changed in damaged(element))
    if not isinstance(value, dict):
        return
    for key in (*value, *FURTHER):
        yield {name: kept_value for name, kept_value in value.items() if name != key}
        yield from (value | {key: changed} for changed in damaged(value.get(key)))


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_configs_are_refused_by_name_or_read(name: str) -> None:
    read_as = set()
    for quantization in damaged(FORMATS[name][0]):
        with suppress(CheckpointError):
            read_as.add(read(quantization))
    assert all(result is None or result.text for result in read_as)
    assert len(read_as) > 1


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_whole_floats_are_whole_numbers(name: str) -> None:
    quantization = FORMATS[name][0]
    assert read(quantization | {"group_size": float(GROUP), "bits": 4.0}) == read(
        quantization
    )
