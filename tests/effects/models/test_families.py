"""Every row of the family table, and every way of writing its options, against
transformers.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from safetensors.torch import load_file
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache
from minfer.effects.models.architecture.batch import Batch, BatchRow, make_batch
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import checkpoint_parts, named_parts
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.checkpoint.tensor_names import model_name
from minfer.effects.models.layout.shapes import parameter_count
from tests.effects.tiny_families import VARIANTS, WINDOW, save
from tests.effects.tiny_model import (
    BesideTheirs,
    cache_with_states,
    decode_batch,
    read_spec,
    state_tables,
    with_attention,
)

BLOCK = 4
# What transformers' float32 differs by from its float64 in gated delta nets: it computes
# them in chunks, and norms of results amplify the difference. Ours differs by less.
RECURRENT_ROUNDING = 2e-3
OPTIONS = {
    key: config for key, config in VARIANTS.items() if not key[1].startswith("rope ")
}
TESTED = [
    key for key in VARIANTS if key in OPTIONS or key[0] == "Llama"
]  # rope is everyone's
WINDOWED = [
    key
    for key, config in OPTIONS.items()
    # Laguna's config has a window although no layer may have one.
    if config["sliding_window"] and key != ("Laguna", "full")
]
CHUNKED = [key for key, config in OPTIONS.items() if config.get("attention_chunk_size")]


@frozen(eq=False)
class Pair(BesideTheirs):
    folder: Path = field(kw_only=True)

    def run(self, cache: KVCache, rows: list[BatchRow] | Batch) -> Tensor:
        batch = rows if isinstance(rows, Batch) else make_batch(rows, BLOCK)
        return forward(self.spec, self.weights, batch, cache)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, name: str) -> Pair:
        folder = tmp_path_factory.mktemp("model")
        hf_model = save(str(folder), family, VARIANTS[family, name])
        spec = read_spec(folder)
        weights = load_weights(folder, spec, "float32")
        return Pair(spec, weights, hf_model, folder=folder)

    return make


def sequence(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(160), k=length)


def close(logits: Tensor, expected: Tensor, atol: float = 4e-4) -> None:
    # Experts amplify the rounding of what they are chosen by.
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=atol)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def forget(spec: ModelSpec, cache: KVCache, table: list[int], position: int) -> None:
    """What the engine does to blocks that no query from `position` on reads: others get
    them.
    """
    if None not in spec.windows:
        for i in range(max(0, position + 1 - WINDOW) // BLOCK):
            if table[i] >= 0:
                cache.data[:, table[i]] = torch.nan
                table[i] = -1


@pytest.mark.long
@pytest.mark.parametrize("key", TESTED, ids=" ".join)
def test_chunks_and_decodes_give_transformers_logits(
    key: tuple[str, str], pair: Any
) -> None:
    """Chunks that end before, at and after a window's edge, then decodes far past it, all
    mixed.
    """
    model: Pair = pair(*key)
    lengths, cuts = [75, 22, 48, 5], [[19, 20, 21, 62], [7, 9, 21], [40, 41, 45], [4]]
    texts = [sequence(length, seed) for seed, length in enumerate(lengths)]
    ids = list(range(60))
    random.Random(0).shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-length // BLOCK))] for length in lengths]
    states = state_tables(model.spec, BLOCK, 60, len(texts))
    kv_cache = cache_with_states(model.spec, 60, BLOCK, states, max_model_len=80)
    text_logits = [model.logits(text) for text in texts]
    computed = [0] * len(texts)
    while any(
        num_computed < len(text)
        for num_computed, text in zip(computed, texts, strict=True)
    ):
        rows, expected = [], []
        for i, text in enumerate(texts):
            if computed[i] < len(text):
                forget(model.spec, kv_cache, tables[i], computed[i])
                end = next((cut for cut in cuts[i] if cut > computed[i]), computed[i] + 1)
                start, count = computed[i], end - computed[i]
                new = text[start:end]
                rows.append(BatchRow(new, start, tables[i], count, states[i]))
                expected.append(text_logits[i][computed[i] : end])
                computed[i] = end
        atol = RECURRENT_ROUNDING if model.spec.has_states else 4e-4
        close(model.run(kv_cache, rows), torch.cat(expected), atol)


@pytest.mark.long
@pytest.mark.parametrize("key", WINDOWED + CHUNKED, ids=" ".join)
def test_device_rows_decode_far_past_their_windows(
    key: tuple[str, str], pair: Any
) -> None:
    model: Pair = pair(*key)
    lengths, steps = [3, 25, 50], 45
    texts = [sequence(length, 9 + seed) for seed, length in enumerate(lengths)]
    tables = [list(range(30 * i, 30 * i + 30)) for i in range(3)]
    kv_cache = make_cache(model.spec, 90, BLOCK, "float32", max_model_len=120)
    rows = [BatchRow(text, 0, table) for text, table in zip(texts, tables, strict=True)]
    tokens_by_step = [model.run(kv_cache, rows).argmax(-1)]
    for step in range(steps):
        positions = torch.tensor(lengths) + step
        for table, position in zip(tables, positions.tolist(), strict=True):
            forget(model.spec, kv_cache, table, position)
        decode = decode_batch(tokens_by_step[-1], positions, torch.tensor(tables), BLOCK)
        tokens_by_step.append(model.run(kv_cache, decode).argmax(-1))
    for text, generated in zip(
        texts, torch.stack(tokens_by_step, 1).tolist(), strict=True
    ):
        expected = model.logits(text + generated)
        assert generated == expected[len(text) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("key", WINDOWED, ids=" ".join)
def test_windows_matter_and_are_transformers_own(key: tuple[str, str], pair: Any) -> None:
    model: Pair = pair(*key)
    layers = model.theirs.model.layers
    kinds = getattr(model.theirs.config, "layer_types", None) or ["sliding_attention"] * 3
    assert model.spec.windows == tuple(
        WINDOW if kind == "sliding_attention" else None
        for _, kind in zip(layers, kinds, strict=True)
    )
    ids, table = sequence(60, 1), list(range(15))
    kv_cache = make_cache(model.spec, 15, BLOCK, "float32")
    [windowed] = model.run(kv_cache, [BatchRow(ids, 0, table)])
    full = evolve(model, spec=with_attention(model.spec, window=None))
    [unwindowed] = full.run(
        make_cache(full.spec, 15, BLOCK, "float32"), [BatchRow(ids, 0, table)]
    )
    assert (windowed - unwindowed).abs().max() > 0.1


@pytest.mark.parametrize("key", CHUNKED, ids=" ".join)
def test_chunks_of_positions_matter_and_are_transformers_own(
    key: tuple[str, str], pair: Any
) -> None:
    model: Pair = pair(*key)
    chunk = model.theirs.config.attention_chunk_size
    kinds = model.theirs.config.layer_types
    chunks = [chunk if kind == "chunked_attention" else None for kind in kinds]
    assert model.spec.windows == tuple(chunks)
    ids, table = sequence(60, 1), list(range(15))
    kv_cache = make_cache(model.spec, 15, BLOCK, "float32")
    [chunked] = model.run(kv_cache, [BatchRow(ids, 0, table)])
    layers = tuple(
        evolve(layer, attention=evolve(layer.attention, chunk=0))
        for layer in model.spec.layers
        if isinstance(layer.attention, GQA)
    )
    windowed = evolve(model, spec=evolve(model.spec, layers=layers))
    kv_cache = make_cache(windowed.spec, 15, BLOCK, "float32")
    [by_windows] = windowed.run(kv_cache, [BatchRow(ids, 0, table)])
    assert (chunked - by_windows).abs().max() > 0.1


@pytest.mark.parametrize("key", OPTIONS, ids=" ".join)
def test_weights_follow_from_the_table(key: tuple[str, str], pair: Any) -> None:
    model: Pair = pair(*key)
    weight_parts = {
        weight_part.name: weight_part
        for weight_part in checkpoint_parts(model.spec, model.weights)
    }
    tensors = {
        model_name(model.spec, name, weight_parts.keys()): tensor
        for name, tensor in load_file(model.folder / "model.safetensors").items()
    }
    assert set(weight_parts) == set(tensors)
    for name, weight_part in weight_parts.items():
        stored = tensors[name]
        arranged = stored if weight_part.arrange is None else weight_part.arrange(stored)
        assert torch.equal(weight_part.target, arranged), name
        assert weight_part.shape == tuple(stored.shape)
    assert parameter_count(model.spec) == sum(p.numel() for p in tensors.values())
    random_ones = dict(named_parts(model.spec, random_weights(model.spec, "float32")))
    assert set(random_ones) == set(tensors)
    assert all(t.eq(1).all() for n, t in random_ones.items() if n.endswith("norm.weight"))


@pytest.mark.parametrize(("dtype", "worst"), [("bfloat16", 0.05), ("float16", 0.002)])
def test_half_precision_stays_near_float32(
    tmp_path: Path, dtype: str, worst: float
) -> None:
    config = VARIANTS["Qwen3", "biases, windows"] | {"initializer_range": 0.05}
    hf_model = save(str(tmp_path), "Qwen3", config)
    spec = read_spec(tmp_path)
    model = Pair(spec, load_weights(tmp_path, spec, dtype), hf_model, folder=tmp_path)
    ids, table = sequence(60, 4), list(range(15))
    kv_cache = make_cache(spec, 15, BLOCK, dtype)
    chunk_logits = [
        model.run(kv_cache, [BatchRow(ids[a:b], a, table, b - a)])
        for a, b in ((0, 37), (37, 59))
    ]
    chunk_logits.append(model.run(kv_cache, [BatchRow(ids[59:], 59, table)]))
    logprobs = torch.cat(chunk_logits).float().log_softmax(-1)
    expected = model.logits(ids).log_softmax(-1)
    assert chunk_logits[0].dtype is getattr(torch, dtype)
    assert (expected.exp() * (expected - logprobs)).sum(-1).mean().item() < worst
