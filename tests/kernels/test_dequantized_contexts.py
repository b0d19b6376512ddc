"""Contexts of prefill chunks, dequantized into a workspace."""

from typing import Any

import pytest
import torch

from minfer.kernels.attention import prefill_attention
from minfer.kernels.cache_numbers import FP8, INT8
from minfer.kernels.dequantized_contexts import dequantize_contexts
from minfer.kernels.dequantized_work import DequantizedWork
from tests.kernels.test_attention import DEVICE, SMALL, make, queries, written_out
from tests.kernels.test_cache_numbers import HALF, LIMIT, in_8_bits

pytestmark = pytest.mark.usefixtures("poisoned")

CHUNKS = [(0, 37), (63, 5), (70, 20), (17, 0)]  # (start, count)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (20, 0), (20, 5)])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_attention_over_the_workspace(
    dtype: torch.dtype,
    window: int,
    sinks: int,
    reference: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that no query reads have no id in the table, and are NaN in the cache."""
    starts, counts = zip(*CHUNKS, strict=True)
    lost = [max(0, start - window + 1) if window else 0 for start in starts]
    contexts = [start + count for start, count in CHUNKS]
    case = make(contexts, dtype=HALF, lost=lost, num_kept=sinks)
    keys, values, scales = in_8_bits(case, dtype)
    begins, sizes = (
        torch.tensor(column, dtype=torch.int32, device=DEVICE)
        for column in (starts, counts)
    )
    blocks = sum(contexts) // 16 + len(CHUNKS)
    width = case.table.shape[1]
    work = DequantizedWork.of(case.rows, begins, sizes, width, blocks, 16)
    reads: dict[str, Any] = {"window": window, "sink_tokens": sinks}
    if reference and DEVICE == "cpu":
        monkeypatch.setattr("minfer.kernels.interpreting", False)
    keys, values = dequantize_contexts(
        work, case.table, keys, values, scales, HALF, **reads
    )
    monkeypatch.undo()
    q, offsets = queries(sum(counts), 4, case), torch.tensor([0, 37, 42, 62])
    out = prefill_attention(
        q,
        keys,
        values,
        work.table,
        work.own_rows,
        begins,
        sizes,
        offsets.to(DEVICE),
        0.3,
        max_count=37,
        tune=SMALL,
        **reads,
    )
    for i, (start, count) in enumerate(CHUNKS[:3]):
        tokens = slice(int(offsets[i]), int(offsets[i]) + count)
        arguments = q[tokens], case.keys[i], case.values[i], start, 0.3, window, sinks
        assert (out[tokens].cpu() - written_out(*arguments)).abs().max() < LIMIT[HALF]


def test_a_step_without_contexts_copies_nothing() -> None:
    none = torch.zeros(2, dtype=torch.int32)
    work = DequantizedWork.of(none, none, none, 4, 3, 16)
    assert work.chunks.tolist() == [-1] * 3
