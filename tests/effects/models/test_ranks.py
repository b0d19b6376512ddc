"""A model divided among ranks computes what one rank computes, from parts of the same
checkpoint.
"""

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.dense import Dense
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.mamba import Mamba
from minfer.effects.models.architecture.mamba2 import Mamba2
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.quantization import LEVELS, Quantization
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import Weights, empty_weights, named_parts
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.checkpoint.weight_files import TensorPlace
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layout.shapes import weight_bytes
from minfer.effects.models.ranks import (
    SINGLE_RANK,
    WHOLE_MODEL,
    Communicator,
    Parallel,
    RankInfo,
    whole_logits,
)
from minfer.kernels.sample import SIZES
from minfer.values.checks import ConfigError
from tests.effects.models.rank_threads import ThreadRanks, on_ranks
from tests.effects.tiny_families import VARIANTS, save, written
from tests.effects.tiny_model import (
    CONFIG,
    cache_with_states,
    read_spec,
    state_tables,
    write_checkpoint,
)

BLOCK = 4
SPEC = parse_spec(CONFIG)
QUICK = (("Qwen3", "biases, windows"), ("Qwen2", "plain"), ("Mixtral", "experts"))
KEYS = [
    pytest.param(key, id=" ".join(key), marks=() if key in QUICK else pytest.mark.long)
    for key in VARIANTS
    if not key[1].startswith("rope ")
]
WAYS = [
    pytest.param(Parallel(tensor=2), id="2"),
    pytest.param(Parallel(tensor=2, by_expert=True), id="2 by expert"),
    pytest.param(Parallel(tensor=4), id="4", marks=pytest.mark.long),
    pytest.param(Parallel(tensor=1, pipeline=3), id="3 stages", marks=pytest.mark.long),
    pytest.param(Parallel(tensor=2, pipeline=2), id="2 x 2", marks=pytest.mark.long),
]


def run(spec: ModelSpec, weights: Weights, communicator: Communicator) -> Tensor:
    """A prompt in two chunks, then a decode step; all logits."""
    ids, table = random.Random(1).choices(range(160), k=31), list(range(8))
    [state] = state_tables(spec, BLOCK, 8, 1)
    cache = cache_with_states(spec, 8, BLOCK, [state])
    cuts = ((0, 19), (19, 30), (30, 31))
    rows = (BatchRow(ids[a:b], a, table, b - a, state) for a, b in cuts)
    chunk_logits = [
        forward(spec, weights, make_batch([row], BLOCK), cache, communicator)
        for row in rows
    ]
    if not spec.rank_info.is_last_stage:
        return torch.cat(chunk_logits)
    return torch.cat(
        [whole_logits(logits, spec.vocab_size, communicator) for logits in chunk_logits]
    )


def fits(spec: ModelSpec, parallel: Parallel) -> bool:
    """Whether a model can be divided so, and pages of its parts have room for states."""
    try:
        for rank in parallel.first_ranks:
            state_tables(spec.for_rank(RankInfo(rank, parallel)), BLOCK, 8, 1)
    except (UnsupportedModelError, ConfigError):
        return False
    return True


def sums(layer: Layer) -> int:
    """Those over ranks in a step: one of each sublayer, one of queries and keys that are
    normalised over all heads, one of results of a group that ranks share, and one of
    gates that have a cutoff.
    """
    count = len(layer.sublayers) + isinstance(layer.recurrent, Mamba)
    if isinstance(gqa := layer.attention, GQA) and gqa.qk_norm_over == "all":
        count += gqa.qk_norm
    if isinstance(mamba2 := layer.recurrent, Mamba2) and mamba2.groups == 1:
        count += mamba2.output_norm != "none"
    if isinstance(dense := layer.feed_forward, Dense):
        count += dense.cutoff is not None
    return count


def use_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 in the place of float32, so that the order of sums hardly matters."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setitem(cast(dict[str, int], DTYPE_BYTES), "float32", 8)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def in_float64(folder: Path) -> None:
    """Rewrite a checkpoint in float64."""
    file = folder / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file)


@pytest.fixture(scope="module")
def checkpoint_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[tuple[str, str]], Path]:
    """Writes checkpoints in float64. Tests of one follow each other."""

    @lru_cache(maxsize=1)
    def write(key: tuple[str, str]) -> Path:
        folder = tmp_path_factory.mktemp("model")
        save(str(folder), key[0], VARIANTS[key])
        in_float64(folder)
        return folder

    return write


@lru_cache(maxsize=1)
def on_one_rank(folder: Path) -> Tensor:
    spec = read_spec(folder)
    return run(spec, load_weights(folder, spec, "float32"), SINGLE_RANK)


@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("key", KEYS)
def test_ranks_compute_what_one_computes(
    key: tuple[str, str],
    parallel: Parallel,
    checkpoint_of: Callable[[tuple[str, str]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint_of(key)
    spec = read_spec(folder)
    if not fits(spec, parallel):
        pytest.skip("it cannot be divided so")
    use_float64(monkeypatch)
    expected = on_one_rank(folder)

    def on_rank(ranks: ThreadRanks) -> Tensor:
        rank_spec = spec.for_rank(ranks.rank_info)
        weights = load_weights(folder, spec, "float32", rank_info=ranks.rank_info)
        return run(rank_spec, weights, ranks)

    results, stages = on_ranks(parallel, on_rank)
    last = results[: parallel.tensor]
    assert all(len(result) == 0 for result in results[parallel.tensor :])
    assert all(result.equal(last[0]) for result in last)
    assert expected.dtype is torch.float64
    torch.testing.assert_close(last[0], expected, rtol=1e-9, atol=1e-9)
    assert last[0].argmax(1).equal(expected.argmax(1))
    if parallel.tensor > 1:
        calls = sum(stage.calls for stage in stages)
        assert calls == 3 * (sum(map(sums, spec.layers)) + 2)  # embedding and logits


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (("DeepseekV3", "groups"), {"q_lora_rank": 40, "num_hidden_layers": 2}),
        (
            ("KimiLinear", "plain"),
            {"linear_head_dim": 32, "linear_num_heads": 8, "kv_lora_rank": 120},
        ),
    ],
)
def test_blocks_of_one_scale_are_not_divided(
    key: tuple[str, str], changes: dict[str, Any]
) -> None:
    """Ranks divide outputs, or inputs, at blocks' edges; those of matrices that all ranks
    have, of latents, may be any. Numbers are quantized as they are for one rank.
    """
    wide = {"moe_intermediate_size": 256, "intermediate_size": 256, "v_head_dim": 64}
    sizes = {"qk_nope_head_dim": 56, "qk_rope_head_dim": 8, **wide, **changes}
    plain = parse_spec(written(key[0], VARIANTS[key] | sizes))
    scheme = LEVELS["fp8_per_block"]
    spec = evolve(plain, quantization=Quantization(OnLoad(scheme)))
    infos = [RankInfo(rank, Parallel(tensor=2)) for rank in range(2)]
    for info in infos:
        empty_weights(spec.for_rank(info), "float32", "meta")
    whole = run(spec, random_weights(spec, "float32"), SINGLE_RANK)

    def on_rank(ranks: ThreadRanks) -> Tensor:
        weights = random_weights(spec, "float32", rank_info=ranks.rank_info)
        return run(spec.for_rank(ranks.rank_info), weights, ranks)

    results, _ = on_ranks(Parallel(tensor=2), on_rank)
    torch.testing.assert_close(results[0], whole, rtol=1e-4, atol=1e-3)


def test_of_few_key_heads_several_ranks_have_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)  # 4 heads, 2 key heads
    spec = read_spec(tmp_path)
    tensors = dict(named_parts(spec, load_weights(tmp_path, spec, "float32")))
    name = "model.layers.0.self_attn.k_proj.weight"
    halves = tensors[name].chunk(2)
    for rank in range(4):
        rank_info = RankInfo(rank, Parallel(tensor=4))
        weights = load_weights(tmp_path, spec, "float32", rank_info=rank_info)
        assert dict(named_parts(spec.for_rank(rank_info), weights))[name].equal(
            halves[rank // 2]
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_vocabulary_need_not_be_divisible(ranks: int) -> None:
    spec = evolve(SPEC, vocab_size=161, tie_word_embeddings=False)
    model_weights = random_weights(spec, "float32", 1)
    rank_weights = [
        random_weights(
            spec, "float32", 1, rank_info=RankInfo(rank, Parallel(tensor=ranks))
        )
        for rank in range(ranks)
    ]
    for name in ("embed", "head"):
        rows = [
            weights.embed if name == "embed" else weights.lm_head.weight
            for weights in rank_weights
        ]
        assert len({len(matrix) for matrix in rows}) == 1
        joined, all_rows = torch.cat(rows), model_weights.embed
        if name == "head":
            all_rows = model_weights.lm_head.weight
        assert joined[:161].equal(all_rows)
        assert not joined[161:].any()


@pytest.mark.parametrize("vocab", [151_936, 128_256, 32_000])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parts_of_large_vocabularies_are_chunks_of_the_sampler(
    ranks: int, vocab: int
) -> None:
    spec = evolve(SPEC, vocab_size=vocab)
    infos = [RankInfo(rank, Parallel(tensor=ranks)) for rank in range(ranks)]
    ranges = [evolve(spec, rank_info=rank_info).vocab_rows for rank_info in infos]
    assert not any(len(rows) % SIZES.chunk for rows in ranges)
    assert [rows.start for rows in ranges] == [
        rank * len(ranges[0]) for rank in range(ranks)
    ]
    assert ranges[-1].start < vocab <= ranges[-1].stop
    assert spec.vocab_rows == range(vocab)


def test_random_weights_of_a_rank_are_a_part_of_the_model_s() -> None:
    spec = parse_spec(written("Qwen3Moe", VARIANTS["Qwen3Moe", "dense layers"]))
    tensors = dict(named_parts(spec, random_weights(spec, "float32", 3)))
    for by_expert in (False, True):
        for rank in range(2):
            rank_info = RankInfo(rank, Parallel(tensor=2, by_expert=by_expert))
            weights = random_weights(spec, "float32", 3, rank_info=rank_info)
            for name, tensor in named_parts(spec.for_rank(rank_info), weights):
                model_tensor = tensors[name]
                dims = [
                    d for d, n in enumerate(tensor.shape) if n != model_tensor.shape[d]
                ]
                expected = model_tensor.chunk(2, dims[0])[rank] if dims else model_tensor
                assert tensor.equal(expected), name


def test_planned_bytes_are_those_of_the_weights() -> None:
    for key in (
        ("Qwen3Moe", "dense layers"),
        ("DeepseekV3", "groups"),
    ):
        spec = parse_spec(written(key[0], VARIANTS[key]))
        for parallel in (Parallel(tensor=2), Parallel(tensor=2, by_expert=True)):
            if not fits(spec, parallel):
                continue
            rank_spec = spec.for_rank(RankInfo(1, parallel))
            weights = empty_weights(rank_spec, spec.dtype, "meta")
            num_bytes = sum(
                tensor.nbytes for _, tensor in named_parts(rank_spec, weights)
            )
            assert weight_bytes(rank_spec, cuda=True) == num_bytes


def test_a_rank_reads_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, hidden_size=64, intermediate_size=256)
    spec, read = read_spec(tmp_path), list[int]()
    real = TensorPlace.tensor

    def counted(place: TensorPlace, *index: Any) -> Any:
        tensor = real(place, *index)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(TensorPlace, "tensor", counted)
    sizes = []
    for rank_info in (
        WHOLE_MODEL,
        RankInfo(0, Parallel(tensor=2)),
        RankInfo(1, Parallel(tensor=2)),
    ):
        read.clear()
        load_weights(tmp_path, spec, "float32", rank_info=rank_info)
        sizes.append(sum(read))
    assert sizes[1] == sizes[2]
    assert sizes[1] < 0.52 * sizes[0]


@pytest.mark.parametrize(
    ("changes", "parallel", "says"),
    [
        ({}, Parallel(tensor=3), "attention heads .*: 4 cannot be divided among 3"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            Parallel(tensor=2),
            "key heads .*: 3 cannot be divided among 2 ranks",
        ),
        ({"intermediate_size": 97}, Parallel(tensor=2), "channels of mlp: 97"),
        ({}, Parallel(pipeline=9), "layers cannot be divided among 9 stages"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: dict[str, Any], parallel: Parallel, says: str
) -> None:
    spec = parse_spec({**CONFIG, **changes})
    with pytest.raises(UnsupportedModelError, match=says):
        spec.for_rank(RankInfo(0, parallel))
