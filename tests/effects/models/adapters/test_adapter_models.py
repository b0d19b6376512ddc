"""Rows with adapters have the logits of transformers' merged models, in every family,
beside rows with other adapters and with none.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, fields, has
from torch import Tensor

from minfer.effects.models.adapters.peft_files import read_adapter
from minfer.effects.models.adapters.place_adapter import place_adapter
from minfer.effects.models.adapters.slot_layout import SlotLayout, SlotMemory, with_slots
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.linear import unquantized
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.quantization import LEVELS, Quantization
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.ranks import (
    SINGLE_RANK,
    Communicator,
    Parallel,
    whole_logits,
)
from minfer.kernels.leaves import Linear
from tests.effects.models.rank_threads import ThreadRanks, on_ranks
from tests.effects.models.test_ranks import fits, in_float64, use_float64
from tests.effects.tiny_adapters import Pair, merged, write_adapter, write_pairs
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import cache_with_states, read_spec, state_tables

BLOCK, LENGTH, MAX_RANK, ALPHA = 4, 11, 64, 8
RANKS = (4, 16, 64)  # of the adapters
QUICK = (
    ("Qwen3", "biases, windows"),
    ("Qwen3Moe", "experts"),
    ("DeepseekV3", "groups"),
    ("Qwen3_5", "plain"),
    ("Phi3", "fused"),
)
KEYS = [
    pytest.param(key, id=" ".join(key), marks=() if key in QUICK else pytest.mark.long)
    for key in VARIANTS
    if not key[1].startswith("rope ")
]
DIVIDED = [
    *(pytest.param(key, id=" ".join(key)) for key in QUICK),
    *(
        pytest.param(key, id=" ".join(key), marks=pytest.mark.long)
        for key in (
            ("GptOss", "alternate"),
            ("KimiLinear", "plain"),
            ("GraniteMoeHybrid", "experts"),
            ("Falcon", "all key heads"),
            ("Qwen3Next", "plain"),
            ("Jamba", "plain"),
            ("Lfm2", "plain"),
            ("Gemma3n", "all"),
            ("MiMoV2Flash", "plain"),
        )
    ),
]
WAYS = [
    pytest.param(Parallel(tensor=2), id="2"),
    pytest.param(Parallel(tensor=2, by_expert=True), id="2 by expert"),
    pytest.param(Parallel(tensor=2, pipeline=2), id="2 x 2", marks=pytest.mark.long),
]
TEXTS = [random.Random(seed).choices(range(160), k=LENGTH) for seed in range(4)]


def slots_with(
    folders: list[Path], model: ModelSpec, spec: ModelSpec | None = None
) -> SlotMemory:
    """Slots of a rank with these adapters; the numbers behind them are NaN."""
    spec = model if spec is None else spec
    layout = SlotLayout.of(spec, MAX_RANK)
    memory = SlotMemory.empty(spec, layout, len(folders) + 1, "cpu")
    memory.numbers.fill_(torch.nan)
    for slot, folder in enumerate(folders):
        adapter = read_adapter(folder, model, MAX_RANK)
        placed = place_adapter(adapter, model, spec, layout)
        memory.numbers[slot], memory.ranks[slot] = placed.numbers[0], placed.ranks[0]
    return memory


def run(
    spec: ModelSpec,
    weights: Weights,
    communicator: Communicator = SINGLE_RANK,
    slots: tuple[int, ...] = (0, 1, 2, -1),
) -> Tensor:
    """The logits of texts with the adapters of these slots: of prompts in one step, but
    for their last tokens, whose step samples.
    """
    states = state_tables(spec, BLOCK, 16, len(TEXTS))
    cache = cache_with_states(spec, 16, BLOCK, states, max_model_len=32)
    found = []
    for start, end in ((0, LENGTH - 1), (LENGTH - 1, LENGTH)):
        rows = [
            BatchRow(text[start:end], start, [*range(3 * i, 3 * i + 3)], 1, state, slot)
            for i, (text, state, slot) in enumerate(
                zip(TEXTS, states, slots, strict=True)
            )
        ]
        logits = forward(spec, weights, make_batch(rows, BLOCK), cache, communicator)
        if spec.rank_info.is_last_stage:
            logits = whole_logits(logits, spec.vocab_size, communicator)
        found.append(logits)
    return torch.stack(found, 1)


def expected_logits(models: list[Any]) -> Tensor:
    """Those of transformers' models, of a text each."""
    with torch.inference_mode():
        logits = [
            model(torch.tensor([text])).logits[0, -2:]
            for model, text in zip(models, TEXTS, strict=True)
        ]
    return torch.stack(logits)


@pytest.mark.parametrize("key", KEYS)
def test_logits_are_those_of_merged_models(
    key: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(str(tmp_path), key[0], VARIANTS[key]).double()
    # Its grouped products of experts have no float64.
    model.set_experts_implementation("eager")
    spec = read_spec(tmp_path)
    folders = [tmp_path / f"adapter{rank}" for rank in RANKS]
    models = []
    for folder, rank in zip(folders, RANKS, strict=True):
        pairs = write_adapter(folder, model, rank=rank, seed=rank, lora_alpha=ALPHA)
        models.append(merged(model, pairs, ALPHA / rank))
    in_float64(tmp_path)
    use_float64(monkeypatch)
    plain = load_weights(tmp_path, spec, "float32")
    weights = with_slots(spec, plain, slots_with(folders, spec))
    together = run(spec, weights)
    expected = expected_logits([*models, model])
    assert expected.dtype is torch.float64
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
    assert (expected - expected_logits([model] * 4)).abs().amax((1, 2))[:3].min() > 0.1
    alone = run(spec, plain, slots=(-1,) * 4)
    torch.testing.assert_close(together[3], alone[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("key", DIVIDED)
def test_ranks_have_their_parts_of_adapters(
    key: tuple[str, str],
    parallel: Parallel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save(str(tmp_path), key[0], VARIANTS[key]).double()
    spec = read_spec(tmp_path)
    if not fits(spec, parallel):
        pytest.skip("it cannot be divided so")
    folders = [tmp_path / f"adapter{rank}" for rank in RANKS]
    for folder, rank in zip(folders, RANKS, strict=True):
        write_adapter(folder, model, rank=rank, seed=rank)
    in_float64(tmp_path)
    use_float64(monkeypatch)
    plain = load_weights(tmp_path, spec, "float32")
    expected = run(spec, with_slots(spec, plain, slots_with(folders, spec)))

    def on_rank(ranks: ThreadRanks) -> Tensor:
        own = spec.for_rank(ranks.rank_info)
        weights = load_weights(tmp_path, spec, "float32", rank_info=ranks.rank_info)
        return run(own, with_slots(own, weights, slots_with(folders, spec, own)), ranks)

    results, _ = on_ranks(parallel, on_rank)
    torch.testing.assert_close(results[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("level", ["fp8", "mxfp4", "nvfp4"])
def test_products_are_added_to_those_of_quantized_matrices(
    level: str, tmp_path: Path
) -> None:
    key = ("Qwen3Moe", "dense layers")
    model = save(str(tmp_path), key[0], VARIANTS[key] | {"moe_intermediate_size": 32})
    scheme = evolve(LEVELS[level], activations="as they are")
    quantization = Quantization(OnLoad(scheme))
    spec = evolve(read_spec(tmp_path), quantization=quantization)
    folders = [tmp_path / f"adapter{rank}" for rank in RANKS]
    for folder, rank in zip(folders, RANKS, strict=True):
        write_adapter(folder, model, rank=rank, seed=rank)
    memory = slots_with(folders, spec)
    quantized = with_slots(spec, load_weights(tmp_path, spec, "float32"), memory)
    plain = evolve(
        quantized, layers=tuple(_dequantized(layer) for layer in quantized.layers)
    )
    expected = run(spec, plain)
    torch.testing.assert_close(run(spec, quantized), expected, rtol=1e-4, atol=1e-4)


def _dequantized(node: Any) -> Any:
    """The same weights in full numbers."""
    if isinstance(node, Linear):
        return unquantized(node, "float32")
    if not has(type(node)):
        return node
    names = [attribute.name for attribute in fields(type(node))]
    return evolve(node, **{name: _dequantized(getattr(node, name)) for name in names})


def test_experts_one_by_one_are_those_in_one_tensor(tmp_path: Path) -> None:
    """As peft wrote them for transformers 4; experts may have different ranks."""
    key = ("Qwen3Moe", "experts")
    model = save(str(tmp_path), key[0], VARIANTS[key])
    spec, folder = read_spec(tmp_path), tmp_path / "adapter"
    name = "model.layers.1.mlp.experts"
    parameters = dict(model.named_parameters())
    inter = parameters[f"{name}.down_proj"].shape[2]
    generator, pairs = torch.Generator().manual_seed(0), []
    for expert, rank in ((0, 4), (2, 8)):
        for matrix, target, rows in (
            ("gate_proj", "gate_up_proj", slice(0, inter)),
            ("up_proj", "gate_up_proj", slice(inter, None)),
            ("down_proj", "down_proj", slice(None)),
        ):
            stored = parameters[f"{name}.{target}"][expert, rows]
            a = torch.randn(rank, stored.shape[1], generator=generator)
            b = torch.randn(stored.shape[0], rank, generator=generator)
            module = f"{name}.{expert}.{matrix}"
            pairs.append(Pair(f"{module}.weight", module, a, b))
            with torch.no_grad():
                stored.add_(b @ a, alpha=2.0 * 4 / rank)
    ranks = {rf"experts\.2\.{end}": 8 for end in ("gate_proj", "up_proj", "down_proj")}
    write_pairs(folder, pairs, r=4, lora_alpha=8, rank_pattern=ranks)
    plain = load_weights(tmp_path, spec, "float32")
    weights = with_slots(spec, plain, slots_with([folder], spec))
    logits = run(spec, weights, slots=(0, 0, 0, 0))
    torch.testing.assert_close(logits, expected_logits([model] * 4), rtol=1e-4, atol=1e-3)
