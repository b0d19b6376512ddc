"""A GPU's cache means what the CPU's does; without a GPU, by its kernels' references."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.execution.cuda import cuda_attention
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.models.architecture.attention_window import with_attention_window
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.layout.cache_layout import cache_layout, one_group
from minfer.kernels.attention import decode_attention
from minfer.kernels.dequantized_work import DequantizedWork
from minfer.kernels.flash import FlashWork
from minfer.kernels.packages import FLASH
from minfer.records.plan import Copy
from tests.effects.execution.test_attention import SPEC
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import gqa_of, with_attention, with_windows
from tests.kernels.test_flash import stand_in

# Models whose queries, or what they attend to, depend on positions otherwise.
POSITIONED = [
    ("Ministral3", "scaled queries"),
    ("Mistral4", "groups"),
    ("Mistral4", "experts"),
    ("Llama4", "chunks"),
    ("Llama4", "listed"),
    ("MiMoV2Flash", "listed"),
    ("MiMoV2Flash", "groups"),
]


@pytest.mark.parametrize(
    ("scale", "window", "cap"),
    [(None, None, None), (0.3, None, None), (None, 6, None), (0.3, None, 0.5)],
)
def test_the_cache_of_a_gpu_means_the_same(
    scale: float | None, window: int | None, cap: float | None
) -> None:
    spec = with_attention(evolve(SPEC, dtype="float32"), score_cap=cap)
    spec = with_windows(spec, None, 5)
    spec = with_attention_window(spec, window, 3 if window else 0)
    gpu_cache = CudaCache.make(spec, one_group(spec), 16, 4, 64, torch.device("cpu"))
    cpu_cache, tables = (
        make_cache(spec, 16, 4),
        ([3, 7, 1, 10], [5, 0, 9, 2, 14], [6, 4, 8]),
    )
    starts = [0, 0, 0]
    for counts in ((9, 14, 2), (1, 1, 1), (3, 2, 1), (1, 1, 1)):
        each_row = zip(counts, starts, tables, strict=True)
        batch = make_batch(
            [BatchRow([0] * n, start, table) for n, start, table in each_row], 4
        )
        for layer in range(2):
            gqa = gqa_of(spec)
            width = (gqa.heads + 2 * gqa.kv_heads) * gqa.head_dim
            qkv = torch.randn(sum(counts), width)
            actual, want = (
                c.attend(batch, layer, qkv.clone(), scale) for c in (gpu_cache, cpu_cache)
            )
            torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-5)
        starts = [start + n for start, n in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("key", POSITIONED, ids=" ".join)
def test_models_through_both_caches(key: tuple[str, str]) -> None:
    """Chunks and decode rows, in steps of all layers."""
    spec = parse_spec(written(key[0], VARIANTS[key]), dtype="float32")
    weights = random_weights(spec, "float32")
    gpu_cache = CudaCache.make(spec, one_group(spec), 16, 4, 64, torch.device("cpu"))
    cpu_cache, tables = make_cache(spec, 16, 4), ([3, 7, 1, 10, 11, 2], [5, 0, 9, 14])
    starts, draw = [0, 0], random.Random(0)
    for counts in ((17, 5), (1, 8), (4, 1), (1, 1)):
        each_row = zip(counts, starts, tables, strict=True)
        rows = [
            BatchRow(draw.choices(range(160), k=n), start, table, n)
            for n, start, table in each_row
        ]
        batch = make_batch(rows, 4)
        actual, want = (
            forward(spec, weights, batch, cache) for cache in (gpu_cache, cpu_cache)
        )
        torch.testing.assert_close(actual, want, rtol=1e-4, atol=4e-4)
        starts = [start + n for start, n in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("window", [None, 6])
def test_dequantized_contexts_are_what_the_cache_holds(
    kind: str, window: int | None
) -> None:
    """Chunks of several rows, one of them padding, by both ways, and on the CPU."""
    spec = with_windows(evolve(SPEC, dtype="float32", kv_dtype=kind), None, 5)
    spec = with_attention_window(spec, window, 3 if window else 0)
    make = spec, one_group(spec), 16, 4, 64, torch.device("cpu")
    direct, copied = CudaCache.make(*make), CudaCache.make(*make)
    on_cpu, tables = make_cache(spec, 16, 4), ([3, 7, 1, 10], [5, 0, 9, 2, 14], [6, 4, 8])
    lengths = [0, 0, 0]
    for counts in ((9, 14, 2), (1, 1, 1), (3, 2, 1), (1, 1, 1)):
        each_row = zip(counts, lengths, tables, strict=True)
        rows = [BatchRow([0] * n, start, table) for n, start, table in each_row]
        by_copy = batch = make_batch(rows, 4)
        if (chunks := batch.chunks) is not None:
            four = chunks.rows, chunks.starts, chunks.counts, chunks.offsets
            rows_of, starts, sizes, offsets = (
                torch.cat((rows_copy, rows_copy[:1] * 0)) for rows_copy in four
            )
            changed = evolve(
                chunks,
                rows=rows_of,
                starts=starts,
                counts=sizes,
                offsets=offsets,
                dequantized=DequantizedWork.of(
                    rows_of, starts, sizes, batch.table.shape[2], 20, 4
                ),
            )
            by_copy = evolve(batch, chunks=changed)
        for layer in range(2):
            gqa = gqa_of(spec)
            width = (gqa.heads + 2 * gqa.kv_heads) * gqa.head_dim
            qkv = torch.randn(sum(counts), width)
            expected = direct.attend(batch, layer, qkv.clone())
            for actual in (
                copied.attend(by_copy, layer, qkv.clone()),
                on_cpu.attend(batch, layer, qkv.clone()),
            ):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        lengths = [start + n for start, n in zip(lengths, counts, strict=True)]


def test_flash_attn_and_splits_are_a_groups_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves the layer without a window, by the table of that layer's pages."""
    written, cut = list[Tensor](), list[tuple[int, int]]()

    def attend(*arguments: Tensor, **keywords: Any) -> None:
        written.append(keywords["page_table"])
        stand_in(*arguments, **keywords)

    def decode(*arguments: Any, splits: int, window: int, **keywords: Any) -> Tensor:
        cut.append((window, splits))
        return decode_attention(*arguments, splits=splits, window=window, **keywords)

    monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=attend))
    monkeypatch.setattr(cuda_attention, "decode_attention", decode)
    spec = with_windows(evolve(SPEC, dtype="float32"), 5, None)
    layout = cache_layout(spec)
    gpu_cache = CudaCache.make(spec, layout, 40, 4, 64, torch.device("cpu"))
    cpu_cache = make_cache(spec, 40, 4, layout=layout)
    steps = ((9, 14), (3, 1), (6, 2), (1, 1))
    starts = [0, 0]
    for counts in steps:
        each_row = list(zip(counts, starts, strict=True))
        tables = [[3, 7, 1, 10, 11, 12], [5, 0, 9, 2, 14, 15]]
        apart = [
            make_batch(
                [
                    BatchRow([0] * n, start, [page + extra_slots for page in table])
                    for (n, start), table in zip(each_row, tables, strict=True)
                ],
                4,
            )
            for extra_slots in (0, 20)
        ]
        batch = evolve(
            apart[0],
            table=torch.cat([group_batch.table for group_batch in apart]),
            slots=torch.cat([group_batch.slots for group_batch in apart]),
            splits=(2, 7),
        )
        if (chunks := batch.chunks) is not None:
            arguments = (
                chunks.rows,
                chunks.starts,
                chunks.counts,
                batch.table,
                chunks.longest,
            )
            flash = None, FlashWork.of(*arguments)
            batch = evolve(batch, chunks=evolve(chunks, flash=flash))
        gqa = gqa_of(spec)
        width = (gqa.heads + 2 * gqa.kv_heads) * gqa.head_dim
        for layer in range(2):
            qkv = torch.randn(sum(counts), width)
            actual, want = (
                c.attend(batch, layer, qkv.clone()) for c in (gpu_cache, cpu_cache)
            )
            torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-5)
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
    assert len(written) == 3
    assert all(int(pages.max()) >= 20 for pages in written)
    assert {*cut} == {(5, 2), (0, 7)}


def test_blocks_are_copied_in_all_layers_and_the_last_is_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = with_windows(evolve(SPEC, dtype="float32"), None, None)
    cache = CudaCache.make(spec, one_group(spec), 4, 8, 32, torch.device("cpu"))
    assert cache.data.shape == (2, 2, 5, 8, gqa_of(spec).kv_heads, gqa_of(spec).head_dim)
    cache.data.normal_()
    before = cache.data.clone()
    monkeypatch.setattr(cuda_attention, "BLOCKS_PER_COPY", 2)
    cache.copy([Copy(1, 3, 5), Copy(0, 2, 8), Copy(1, 4, 1)])
    for source, target, count in ((1, 3, 5), (0, 2, 8), (1, 4, 1)):
        assert cache.data[:, :, target, :count].equal(before[:, :, source, :count])
    cache.clear([0, 1])  # no kernel lets what is behind a context reach its result
    assert cache.data[:, :, :2].equal(before[:, :, :2])
    keys, values = cache.layers[1]
    assert keys.data_ptr() == cache.data[1, 0].data_ptr()
    assert values.data_ptr() == cache.data[1, 1].data_ptr()
