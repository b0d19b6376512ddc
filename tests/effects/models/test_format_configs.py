"""Damaged `quantization_config`s: refused by name, or read as what they mean."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.quantization import Quantization
from minfer.effects.models.spec_reader import parse_spec
from tests.effects.checkpoints.formats_made import FORMATS, GROUP
from tests.effects.tiny_model import CONFIG

KEYS = [
    *("weights", "type", "num_bits", "strategy", "format", "config_groups", "bits"),
    *("group_size", "sparsity_config", "transform_config", "kv_cache_scheme", "dynamic"),
    *("desc_act", "checkpoint_format", "version", "fmt", "weight_block_size"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([32.0, 128.0, 4.0, 1e400, float("nan")]),
    st.sampled_from(["", "4", "int", "float", "group", "channel", "block", "gemm"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=2),
    ),
    max_leaves=4,
)


def read(how: Any) -> Quantization | None:
    return parse_spec(CONFIG | {"quantization_config": how}).quantization


def damaged(value: Any, draw: Any) -> Any:
    """The value, of which one part is another, is gone, or has one more beside it."""
    inside = value if isinstance(value, dict) else {}
    if not inside or draw(st.integers(0, 3)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from([*inside, *KEYS]))
    if key in inside and draw(st.booleans()):
        return {name: one for name, one in inside.items() if name != key}
    return inside | {key: damaged(inside.get(key), draw)}


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_damaged_configs_are_refused_by_name_or_read(name: str, data: Any) -> None:
    how: Any = FORMATS[name][0]
    for _ in range(data.draw(st.integers(1, 3))):
        how = damaged(how, data.draw)
    with suppress(CheckpointError):
        found = read(how)
        assert found is None or found.text


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_whole_floats_are_whole_numbers(name: str) -> None:
    how = FORMATS[name][0]
    assert read(how | {"group_size": float(GROUP), "bits": 4.0}) == read(how)
