"""Caches beside recurrent layers, whose pages are whole, mean what other caches do."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.dtypes import FP8, INT8
from minfer.effects.models.layout.cache_layout import (
    CacheLayout,
    cache_layout,
    one_group,
    with_states,
)
from minfer.kernels.paged_states import PagedUnits, gather_states
from minfer.records.plan import Copy
from tests.effects.stateful import with_parts
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import CONFIG

PAGES, BLOCK, LENGTH = 20, 4, 64
CPU = torch.device("cpu")
KINDS = [
    ("Qwen3", "plain", None),
    ("Qwen3", "windows alternate", FP8),
    ("Qwen3", "windows alternate", INT8),
    ("DeepseekV3", "groups", None),
    ("DeepseekV3", "groups", FP8),
    ("Gemma4", "small full heads", None),
    ("Gemma4", "shared keys", None),
    ("MiMoV2Flash", "listed", None),
]
HEADS = StatePart("heads", 2, (4, 6), "state")
INPUTS = StatePart("inputs", 3, (2, 4), "activations")


def caches(spec: ModelSpec, layout: CacheLayout) -> Iterator[Any]:
    """A cache of a GPU, and of the CPU."""
    yield CudaCache.make(spec, layout, PAGES, BLOCK, LENGTH, CPU)
    yield make_cache(spec, PAGES, BLOCK, max_model_len=LENGTH, layout=layout)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_reads_the_same_in_whole_pages(kind: tuple[str, str, str]) -> None:
    """Chunks and decode rows; what other pages hold is not read."""
    family, variant, kv_dtype = kind
    spec = parse_spec(written(family, VARIANTS[family, variant]), dtype="float32")
    spec = evolve(spec, kv_dtype=kv_dtype)
    weights = random_weights(spec, "float32")
    layout = one_group(spec)
    states = with_states(
        layout, with_parts(spec, *[(HEADS, INPUTS)] * len(spec.layers)), BLOCK
    )
    assert states.states is not None
    for plain, paged in zip(caches(spec, layout), caches(spec, states), strict=True):
        assert paged.data.shape[1:] == (states.states.page_bytes,)
        if isinstance(paged, CudaCache):
            paged.data.fill_(255)  # NaN in all dtypes
        starts, draw = [0, 0], random.Random(0)
        tables = [3, 7, 1, 10, 11, 2], [12, 13, 14, 15]
        for counts in ((17, 5), (1, 8), (4, 1), (1, 1)):
            each_row = zip(counts, starts, tables, strict=True)
            rows = [
                BatchRow(draw.choices(range(spec.vocab_size), k=n), start, table, n)
                for n, start, table in each_row
            ]
            batch = make_batch(rows, BLOCK)
            expected = forward(spec, weights, batch, plain)
            torch.testing.assert_close(
                forward(spec, weights, batch, paged), expected, rtol=0, atol=0
            )
            starts = [start + n for start, n in zip(starts, counts, strict=True)]


def stateful() -> tuple[ModelSpec, CacheLayout]:
    spec = with_parts(parse_spec(CONFIG), (HEADS, INPUTS), (), (INPUTS, HEADS))
    return spec, with_states(cache_layout(spec), spec, BLOCK)


def units_of(cache: Any) -> list[PagedUnits]:
    indices = ((0, "heads"), (0, "inputs"), (2, "inputs"), (2, "heads"))
    return [cache.state(index).part(name) for index, name in indices]


@pytest.mark.parametrize("kv_dtype", ["float32", INT8])
def test_units_have_places_of_their_own(kv_dtype: str) -> None:
    """Written one after the other, all of two rows are read back."""
    spec, _ = stateful()
    spec = evolve(spec, kv_dtype=kv_dtype, state_dtype="bfloat16")
    layout = with_states(cache_layout(spec), spec, BLOCK)
    pages = layout.state_pages
    table = torch.arange(2 * pages, dtype=torch.int32).view(2, pages) + 3
    for cache in caches(spec, layout):
        for number, units in enumerate(units_of(cache)):
            expected = torch.bfloat16 if number in (0, 3) else torch.float32
            assert units.pages.dtype is expected
            for row in range(2):
                columns = (
                    units.first_page
                    + (units.first_unit + torch.arange(units.units))
                    // units.pages.shape[1]
                )
                places = (units.first_unit + torch.arange(units.units)) % (
                    units.pages.shape[1]
                )
                units.pages[table[row, columns].long(), places] = 10.0 * number + row
        for number, units in enumerate(units_of(cache)):
            states = gather_states(units, table, torch.tensor([0, 1]))
            assert states.shape == (2, units.units, *units.unit_shape)
            assert all((states[row] == 10.0 * number + row).all() for row in range(2))


def test_whole_pages_are_copied() -> None:
    """Of blocks and of states, scales of INT8 too."""
    spec, _ = stateful()
    spec = evolve(spec, kv_dtype=INT8)
    layout = with_states(cache_layout(spec), spec, BLOCK)
    for cache in caches(spec, layout):
        views = cache.page_views()
        assert len(views) == 2
        generator = torch.Generator().manual_seed(1)
        for view in views:
            numbers = torch.randint(0, 256, view.shape, generator=generator)
            view.copy_(numbers.to(view.dtype))
        before = [view.clone() for view in views]
        cache.copy([Copy(1, 3, BLOCK), Copy(0, 2, BLOCK), Copy(9, 4, BLOCK)])
        for view, old in zip(views, before, strict=True):
            for source, target in ((1, 3), (0, 2), (9, 4)):
                assert view[target].equal(old[source])
            others = [page for page in range(len(view)) if page not in (2, 3, 4)]
            assert view[others].equal(old[others])


def test_the_cpu_clears_blocks_and_nothing_else() -> None:
    spec, layout = stateful()
    cache = make_cache(spec, PAGES, BLOCK, layout=layout)
    numbers, extra = cache.memory.numbers, math.prod(cache.memory.numbers.shape)
    assert extra == 3 * PAGES * BLOCK * 32
    cache.data.fill_(255)
    cache.clear([4, 6], 3)
    is_cleared = torch.zeros(PAGES, BLOCK, dtype=torch.bool)
    is_cleared[4, 3:] = is_cleared[6] = True
    assert not numbers[:, is_cleared].any()
    assert numbers[:, ~is_cleared].isnan().all()


def test_there_are_pages_for_padding_rows() -> None:
    spec, layout = stateful()
    cache = CudaCache.make(spec, layout, PAGES, BLOCK, LENGTH, CPU)
    assert layout.state_pages > 0
    assert len(cache.data) == PAGES + 1 + layout.state_pages
    assert isinstance(make_cache(spec, PAGES, BLOCK, layout=layout), KVCache)
