"""Where states are in the pages of a cache."""

from collections import Counter

import pytest
from attrs import evolve

from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.dtypes import INT8, dtype_bytes
from minfer.effects.models.layout.cache_layout import (
    cache_layout,
    layout_for,
    one_group,
    page_bytes,
    with_states,
)
from minfer.effects.models.layout.state_layout import StateLayout, state_bytes
from minfer.records.config import CacheGroup, EngineConfig
from minfer.values.checks import ConfigError
from tests.effects.stateful import with_parts
from tests.effects.tiny_model import CONFIG, with_windows

HEADS = StatePart("heads", 4, (6, 8), "state")  # 4 x 192 bytes in float32
INPUTS = StatePart("inputs", 3, (3, 5), "activations")  # 3 x 60 bytes
SPEC = parse_spec(CONFIG)  # 2 layers of 128 bytes of a token each
BLOCK = 4


def states_of(spec: ModelSpec, block_size: int = BLOCK) -> StateLayout:
    states = with_states(one_group(spec), spec, block_size).states
    assert states is not None
    return states


def units_by_page(states: StateLayout) -> Counter[tuple[int, int]]:
    """How many units have each place of each page."""
    return Counter(
        (
            placed.first_page + (placed.first_unit + unit) // placed.units_a_page,
            (placed.first_unit + unit) % placed.units_a_page,
        )
        for parts in states.layers
        for placed in parts
        for unit in range(placed.part.units)
    )


def test_units_of_a_kind_are_side_by_side_in_pages_of_their_own() -> None:
    # Pages of 3 layers x 4 tokens x 128 bytes: 8 units of heads, or 25 of inputs.
    spec = with_parts(SPEC, (HEADS, INPUTS), (), (HEADS, INPUTS))
    states = states_of(spec)
    assert states.page_bytes == 3 * BLOCK * 128
    assert [len(parts) for parts in states.layers] == [2, 0, 2]
    (heads, inputs), _, (more_heads, more_inputs) = states.layers
    assert (heads.first_page, heads.first_unit, heads.units_a_page) == (0, 0, 8)
    assert (more_heads.first_page, more_heads.first_unit) == (0, 4)
    assert (inputs.first_page, inputs.first_unit, inputs.units_a_page) == (1, 0, 25)
    assert (more_inputs.first_page, more_inputs.first_unit) == (1, 3)
    assert states.pages == 2
    assert (heads.dtype, inputs.dtype) == ("float32", "float32")


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_no_two_units_share_a_place_and_all_are_inside(
    count: int, state_dtype: str
) -> None:
    sizes = (HEADS, INPUTS), (), (INPUTS, evolve(HEADS, units=5))
    spec = evolve(with_parts(SPEC, *sizes * count), state_dtype=state_dtype)
    states = states_of(spec)
    places = units_by_page(states)
    assert len(places) == places.total() == count * (4 + 3 + 5 + 3)
    assert max(page for page, _ in places) == states.pages - 1
    for parts in states.layers:
        for placed in parts:
            size = placed.part.unit_elements * dtype_bytes(placed.dtype)
            assert placed.units_a_page * size <= states.page_bytes
    kinds = {(p.part.shape, p.dtype): p.first_page for ps in states.layers for p in ps}
    assert len({*kinds.values()}) == len(kinds)  # no page has units of two kinds
    expected = 2 if state_dtype == "bfloat16" else 4
    assert state_bytes(spec) == count * (9 * 48 * expected + 6 * 15 * 4)


def test_the_group_of_states_is_the_last() -> None:
    parts = with_parts(SPEC, (HEADS,), (HEADS,), ()).layers
    windows = with_windows(SPEC, 8, None, 8)
    layers = (
        evolve(stateful, attention=layer.attention)
        for stateful, layer in zip(parts, windows.layers, strict=True)
    )
    spec = evolve(SPEC, layers=tuple(layers))
    layout = with_states(cache_layout(spec), spec, BLOCK)
    # Pages of one layer: 512 bytes, 2 units.
    state = CacheGroup(state=True, pages=4)
    assert layout.groups == (CacheGroup(8, pages=2), CacheGroup(), state)
    assert (layout.block_groups, layout.state_pages) == (layout.groups[:2], 4)
    assert layout.tables == 3
    config = EngineConfig(
        num_blocks=20, block_size=BLOCK, max_num_seqs=4, groups=layout.groups
    )
    assert layout_for(spec, config) == layout
    wrong = (*layout.block_groups, CacheGroup(state=True, pages=5))
    with pytest.raises(ConfigError, match="groups: this model's layers are of"):
        layout_for(spec, evolve(config, groups=wrong))
    single = EngineConfig(
        num_blocks=20, block_size=BLOCK, max_num_seqs=4, groups=(CacheGroup(), wrong[-1])
    )
    with pytest.raises(ConfigError, match="groups: this model's layers are of"):
        layout_for(spec, single)  # of which a page has three layers


def test_a_page_has_room_for_a_unit() -> None:
    spec = with_parts(SPEC, (evolve(HEADS, shape=(16, 16)),), ())  # 1,024 bytes a unit
    assert states_of(spec).pages == 4
    with pytest.raises(ConfigError) as caught:
        with_states(one_group(spec), spec, 1)
    assert str(caught.value) == (
        "a block of 1 token(s) (--block-size) is a page of 256 bytes, which must have "
        "room for a unit of the recurrent layers' state: 16 x 16 numbers in float32, "
        "1024 bytes; use --block-size 4"
    )
    assert states_of(evolve(spec, state_dtype="bfloat16"), 2).pages == 4


def test_pages_begin_at_whole_lines_of_memory() -> None:
    spec = with_parts(SPEC, (HEADS,))  # one layer of 128 bytes a token
    assert states_of(spec, 3).page_bytes == 3 * 128
    half = evolve(spec, kv_dtype="bfloat16")
    layout = with_states(one_group(half), half, 3)
    assert layout.states is not None
    assert layout.states.page_bytes == 2 * 128  # for 3 x 64
    assert page_bytes(half, layout, 3) == 2 * 128
    assert page_bytes(half, one_group(half), 3) == 3 * 64
    # A float32 scale beside each head's keys, and values.
    eight = evolve(spec, kv_dtype=INT8)
    layout = with_states(one_group(eight), eight, 6)
    assert layout.states is not None
    assert layout.states.page_bytes == 2 * 128  # for 6 x 32
    assert page_bytes(eight, layout, 6) == 2 * 128 + 6 * 2 * 2 * 4


def test_a_model_without_recurrent_layers_has_no_such_group() -> None:
    layout = with_states(one_group(SPEC), SPEC, BLOCK)
    assert layout == one_group(SPEC)
    assert (layout.states, layout.state_pages) == (None, 0)
    assert layout.block_groups == layout.groups == (CacheGroup(),)
