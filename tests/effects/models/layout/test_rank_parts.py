"""Each rank reads its part of a checkpoint, whatever the form of that."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.ranks import WHOLE_MODEL, Parallel, RankInfo
from minfer.kernels.quantized import dequantize
from tests.effects.checkpoints.formats_made import FORMATS, quantized
from tests.effects.models.formats.test_formats import blocks_of, leaves, write_stacked
from tests.effects.models.gguf.written import write
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec

WIDE = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
WHOLE_BLOCKS = {**WIDE, "hidden_size": 256}  # of 128 x 128 numbers, on each of two ranks
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4}


def edited(folder: Path, change: Any, **config: Any) -> None:
    """Change the tensors, and the config, of a checkpoint."""
    file, config_file = folder / "model.safetensors", folder / "config.json"
    changed = change(load_file(file))
    save_file({k: v.contiguous() for k, v in changed.items()}, file, {"format": "pt"})
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | config))


def read(spec: ModelSpec, folder: Path, rank_info: RankInfo = WHOLE_MODEL) -> Weights:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layers, "in_kernel_layout", lambda leaf: leaf
        )  # leaves stay as they are stored
        return load_weights(folder, spec, "float32", rank_info=rank_info)


def matrices(weights: Weights) -> Iterator[Tensor]:
    """The matrices of the layers in full numbers: [experts, outputs, inputs], 1 expert
    where there are none.
    """
    for leaf in leaves(weights.layers):
        stacked = leaf.weight.dim() == 3
        experts = [leaf.select(i) for i in range(len(leaf.weight))] if stacked else [leaf]
        pieces = [[dequantize(piece) for piece in expert.pieces()] for expert in experts]
        yield from (torch.stack(same) for same in zip(*pieces, strict=True))


def check_parts(folder: Path, by_expert: bool = False) -> None:
    """Matrices of two ranks beside each other are those of one; others are the same."""
    spec = as_stored(read_spec(folder), folder)
    parallel = Parallel(2, by_expert=by_expert)
    undivided = matrices(read(spec, folder))
    ranks = [read(spec, folder, RankInfo(rank, parallel)) for rank in range(2)]
    divided = 0
    for matrix, *rank_matrices in zip(undivided, *map(matrices, ranks), strict=True):
        sizes = zip(matrix.shape, rank_matrices[0].shape, strict=True)
        dims = [dim for dim, (size, rank_size) in enumerate(sizes) if size != rank_size]
        for dim in dims:
            assert torch.cat(rank_matrices, dim).equal(matrix)
        if not dims:
            assert all(rank_matrix.equal(matrix) for rank_matrix in rank_matrices)
        divided += len(dims)
    assert divided >= 4 * len(spec.layers)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_divided(tmp_path: Path, name: str) -> None:
    save(str(tmp_path), "Qwen2", VARIANTS["Qwen2", "plain"] | WHOLE_BLOCKS)
    folder, _ = quantized(tmp_path, tmp_path, name)
    check_parts(folder)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of all experts in one tensor: gates, then ups, of each."""
    result = {k: v for k, v in tensors.items() if ".experts." not in k}
    for name in [k for k in tensors if k.endswith("experts.0.down_proj.weight")]:
        stem = name.removesuffix("0.down_proj.weight")

        def of(which: str, stem: str = stem) -> Tensor:
            names = (f"{stem}{i}.{which}_proj.weight" for i in range(4))
            return torch.stack([tensors[name] for name in names])

        result[f"{stem}gate_up_proj"] = torch.cat((of("gate"), of("up")), 1)
        result[f"{stem}down_proj"] = of("down")
    return result


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("form", ["single", "stacked", "awq", "fp8, stacked"])
def test_experts_are_divided(tmp_path: Path, form: str, by_expert: bool) -> None:
    save(str(tmp_path), "Qwen3Moe", VARIANTS["Qwen3Moe", "experts"] | WIDE | EXPERTS)
    folder = tmp_path
    if form.endswith("stacked"):
        edited(tmp_path, stacked)
    if form == "fp8, stacked":
        _, writer = FORMATS["fp8, transformers"]
        folder, copy = quantized(tmp_path, tmp_path, "fp8, transformers")
        write_stacked(folder, copy, writer)
    elif form == "awq":
        folder, _ = quantized(tmp_path, tmp_path, "awq")
    check_parts(folder, by_expert)


@pytest.mark.parametrize("by_expert", [False, True])
def test_gpt_oss_as_it_is_published_is_divided(tmp_path: Path, by_expert: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    save(str(tmp_path), "GptOss", VARIANTS["GptOss", "alternate"] | sizes)

    def in_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [
            tensor_name for tensor_name in tensors if tensor_name.endswith("_proj")
        ]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks, scales = blocks_of(outputs, inputs, experts)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return tensors

    edited(tmp_path, in_blocks, quantization_config={"quant_method": "mxfp4"})
    check_parts(tmp_path, by_expert)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize(
    ("family", "variant"), [("Qwen2", "plain"), ("Phi3", "fused"), ("Glm4", "more eps")]
)
def test_gguf_files_are_divided(
    tmp_path: Path, family: str, variant: str, kind: str
) -> None:
    model = save(str(tmp_path), family, VARIANTS[family, variant] | WIDE)
    file = tmp_path / "model.gguf"
    write(file, family, model, {}, GGMLQuantizationType[kind])
    check_parts(file)
