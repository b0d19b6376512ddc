"""Quantized checkpoints, as others write them, are read as the numbers that they mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import fields, has
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as decompressed
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.layout.shapes import weight_bytes
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize
from tests.effects.checkpoints.formats_made import FORMATS, Writer, quantized
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec, write_checkpoint

# Sizes that groups of 32 divide.
WIDE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "linear_head_dim": 32,
    "linear_num_heads": 8,
}
KINDS = [
    pytest.param(("Qwen2", "plain"), id="Qwen2"),
    *(
        pytest.param(key, marks=pytest.mark.long, id=key[0])
        for key in (
            ("Qwen3Moe", "dense layers"),
            ("Mixtral", "experts"),
            ("Glm4Moe", "experts"),
            ("DeepseekV3", "groups"),
            ("Phi3", "partial"),
            ("Glm4", "quarter"),
            ("Cohere", "norms of heads"),
            ("StableLm", "all"),
            ("Falcon", "two norms"),
            ("KimiLinear", "plain"),
            ("Jamba", "plain"),
        )
    ),
]


@pytest.fixture(autouse=True)
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves stay as they are stored."""
    monkeypatch.setattr(layers, "in_kernel_layout", lambda leaf: leaf)


def leaves(node: Any) -> list[Linear]:
    """All matrices of a tree of weights, in order."""
    if isinstance(node, Linear):
        return [node]
    if isinstance(node, tuple):
        return [leaf for child in node for leaf in leaves(child)]
    if not has(type(node)):
        return []
    inner = (getattr(node, child.name) for child in fields(type(node)))
    return [leaf for child in inner for leaf in leaves(child)]


def read(folder: Path) -> tuple[ModelSpec, Weights]:
    spec = as_stored(read_spec(folder), folder)
    return spec, load_weights(folder, spec, "float32")


def leaf_bytes(weights: Weights) -> int:
    """Bytes of all leaves of the layers."""
    tensors = (
        tensor
        for leaf in leaves(weights.layers)
        for tensor in (leaf.weight, leaf.scales, leaf.zeros, leaf.factors)
    )
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_matrices_mean_what_their_writer_meant(
    tmp_path: Path, name: str, key: tuple[str, str]
) -> None:
    config = VARIANTS[key]
    config = config | {k: v for k, v in WIDE.items() if k in config}
    if key[0] in ("DeepseekV3", "KimiLinear"):
        config = config | {"kv_lora_rank": 32, "v_head_dim": 16, "q_lora_rank": 32}
    if key[0] == "Jamba":
        config = config | {"mamba_dt_rank": 32}
    save(str(tmp_path), key[0], config)
    quantized_folder, copy = quantized(tmp_path, tmp_path, name)
    spec, weights = read(quantized_folder)
    plain_spec, plain_weights = read(copy)
    assert spec.quantization is not None
    assert spec.quantization.plain == frozenset()
    pairs = [*zip(leaves(weights), leaves(plain_weights), strict=True)]
    assert any(not loaded.scheme.is_plain for loaded, _ in pairs)
    for loaded, expected in pairs:
        torch.testing.assert_close(
            dequantize(loaded), expected.weight, rtol=1e-6, atol=1e-7
        )
    less = leaf_bytes(plain_weights) - leaf_bytes(weights)
    planned = [weight_bytes(model_spec, cuda=True) for model_spec in (plain_spec, spec)]
    assert planned[0] - planned[1] == less > 0


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_that_files_leave_as_they_are(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)

    def is_unquantized(key: str) -> bool:
        return ".layers.1.mlp.down_proj" in key or ".layers.0.self_attn.o_proj" in key

    quantized_folder, copy = quantized(folder, tmp_path, name, is_unquantized)
    spec, weights = read(quantized_folder)
    assert spec.quantization is not None
    names = {"model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj"}
    assert spec.quantization.plain == names
    for loaded, expected in zip(leaves(weights), leaves(read(copy)[1]), strict=True):
        torch.testing.assert_close(
            dequantize(loaded), expected.weight, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "fp8, deepseek"])
def test_a_single_scale_may_have_any_shape(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, copy = quantized(folder, tmp_path, name)
    tensors = load_file(quantized_folder / "model.safetensors")
    for key in [tensor_name for tensor_name in tensors if "scale" in tensor_name]:
        tensors[key] = tensors[key].reshape(shape)
    save_file(tensors, quantized_folder / "model.safetensors", {"format": "pt"})
    for loaded, expected in zip(
        leaves(read(quantized_folder)[1]), leaves(read(copy)[1]), strict=True
    ):
        torch.testing.assert_close(
            dequantize(loaded), expected.weight, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("name", ["fp8, transformers", "fp8, deepseek"])
def test_fp8_experts_in_one_tensor(tmp_path: Path, name: str) -> None:
    """As Mistral Small 4 is published, with scales of matrices or of blocks."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 96}
    save(str(tmp_path), "Mistral4", VARIANTS["Mistral4", "groups"] | sizes)
    quantized_folder, copy = quantized(tmp_path, tmp_path, name)
    write_stacked(quantized_folder, copy, FORMATS[name][1])
    spec, weights = read(quantized_folder)
    assert spec.quantization is not None
    assert spec.quantization.plain == frozenset()
    pairs = [*zip(leaves(weights), leaves(read(copy)[1]), strict=True)]
    assert any(loaded.weight.dim() == 3 for loaded, _ in pairs)
    for loaded, expected in pairs:
        torch.testing.assert_close(
            dequantize(loaded), expected.weight, rtol=1e-6, atol=1e-7
        )


# How names of tensors end, of a matrix, and of those of all experts.
STACKED_ENDS = {
    "weight": "",
    "weight_scale_inv": "_scale_inv",
    "activation_scale": "_activation_scale",
}


def write_stacked(folder: Path, copy: Path, writer: Writer) -> None:
    """Quantize the matrices of all experts, each by itself, and write in `copy` what they
    mean.
    """
    file, copy_file = (path / "model.safetensors" for path in (folder, copy))
    stored, meant = load_file(file), load_file(copy_file)
    for name in [key for key in stored if key.endswith("_proj")]:
        pairs = [writer(matrix) for matrix in stored.pop(name)]
        meant[name] = torch.stack([numbers for _, numbers in pairs])
        for end in pairs[0][0]:
            stacked = torch.stack([tensors[end] for tensors, _ in pairs])
            stored[name + STACKED_ENDS[end]] = stacked
    save_file(stored, file, {"format": "pt"})
    save_file(meant, copy_file, {"format": "pt"})


def test_fused_matrices_of_which_one_is_quantized_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, _ = quantized(
        folder, tmp_path, "awq", lambda key: "layers.1.mlp.up" in key
    )
    with pytest.raises(UnsupportedModelError, match=r"1\.mlp\.gate_proj and .*up_proj"):
        as_stored(read_spec(quantized_folder), quantized_folder)


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(
    tmp_path: Path,
) -> None:
    """Qwen's GPTQ checkpoints have such biases."""
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, copy = quantized(folder, tmp_path, "gptq")
    tensors = load_file(quantized_folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.bias"
    for value in (0.0, 1e-3):
        tensors[name] = torch.zeros(64).half()
        tensors[name][7] = value
        save_file(tensors, quantized_folder / "model.safetensors", {"format": "pt"})
        if value:
            with pytest.raises(CheckpointError, match=f"unexpected tensor {name}"):
                read(quantized_folder)
            continue
        for loaded, expected in zip(
            leaves(read(quantized_folder)[1]), leaves(read(copy)[1]), strict=True
        ):
            torch.testing.assert_close(dequantize(loaded), expected.weight)


# --- NVFP4 ------------------------------------------------------------------------------


def test_nvfp4_is_what_compressed_tensors_decompresses(tmp_path: Path) -> None:
    """Matrices that its own compressor writes."""
    scheme = QuantizationScheme(targets=["Linear"], weights=NVFP4A16["weights"])
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    tensors = load_file(folder / "model.safetensors")
    copy = dict(tensors)
    for name in [tensor_name for tensor_name in tensors if "_proj.weight" in tensor_name]:
        weight = tensors.pop(name)
        largest = weight.view(len(weight), -1, 16).abs().amax(-1)
        factor = (448 * 6 / weight.abs().max()).view(1)
        scale = (largest / 6 * factor).to(torch.float8_e4m3fn)
        made = NVFP4PackedCompressor.compress(
            {
                "weight": weight,
                "weight_scale": scale.float(),
                "weight_global_scale": factor,
            },
            scheme,
        )
        copy[name] = decompressed(  # in float32: `decompress` rounds to bfloat16
            x_q=unpack_fp4_from_uint8(
                made["weight_packed"], *weight.shape, torch.float32
            ),
            scale=made["weight_scale"].float(),
            args=scheme.weights,
            global_scale=factor,
            dtype=torch.float32,
        )
        tensors |= {name.replace("weight", key): tensor for key, tensor in made.items()}
    config = json.loads((folder / "config.json").read_text())
    for kind, stored, extra in (
        ("made", tensors, {"quantization_config": FORMATS["nvfp4"][0]}),
        ("copy", copy, {}),
    ):
        (tmp_path / kind).mkdir()
        save_file(stored, tmp_path / kind / "model.safetensors", {"format": "pt"})
        (tmp_path / kind / "config.json").write_text(json.dumps(config | extra))
    for loaded, expected in zip(
        leaves(read(tmp_path / "made")[1]),
        leaves(read(tmp_path / "copy")[1]),
        strict=True,
    ):
        torch.testing.assert_close(dequantize(loaded), expected.weight)


# --- MXFP4 ------------------------------------------------------------------------------


def blocks_of(outputs: int, inputs: int, experts: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(outputs)
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(119, 125, shape, generator=draw, dtype=torch.uint8)
    return blocks, scales


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """transformers' own code says what blocks and scales mean."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = save(str(tmp_path), "GptOss", VARIANTS["GptOss", "alternate"] | sizes)
    config = model.config
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copy = dict(tensors)
    for name in [tensor_name for tensor_name in tensors if tensor_name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = blocks_of(outputs, inputs, experts)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        copy[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    plain_config = json.loads((tmp_path / "config.json").read_text())
    published = plain_config | {"quantization_config": {"quant_method": "mxfp4"}}
    for folder, stored, folder_config in (
        ("a", tensors, published),
        ("b", copy, plain_config),
    ):
        (tmp_path / folder).mkdir()
        stored = {key: tensor.contiguous() for key, tensor in stored.items()}
        save_file(stored, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(folder_config))
    spec, weights = read(tmp_path / "a")
    assert spec.quantization is not None
    assert len(spec.quantization.plain) == 4 * config.num_hidden_layers
    for loaded, expected in zip(
        leaves(weights), leaves(read(tmp_path / "b")[1]), strict=True
    ):
        assert dequantize(loaded).equal(expected.weight)
    assert transformers.__version__  # its code is the reference


# --- refusals ---------------------------------------------------------------------------


def refused(tmp_path: Path, quantization: Any) -> str:
    folder = tmp_path / "refused"
    folder.mkdir(exist_ok=True)
    source = write_checkpoint(tmp_path / "made")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization})
    )
    with pytest.raises(CheckpointError) as caught:
        read_spec(folder)
    return str(caught.value)


def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    awq, gptq = FORMATS["awq"][0], FORMATS["gptq"][0]
    int4, rows = FORMATS["4 bits"][0], FORMATS["fp8 rows"][0]
    weights = int4["config_groups"]["group_0"]["weights"]

    def compressed(**changes: Any) -> Any:
        group = {"weights": weights | changes, "input_activations": None}
        return int4 | {"config_groups": {"group_0": group}}

    def group(**changes: Any) -> Any:
        changed = rows["config_groups"]["group_0"] | changes
        return rows | {"config_groups": {"group_0": changed}}

    two = int4["config_groups"] | {"group_1": rows["config_groups"]["group_0"]}
    for quantization, message in (
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        ("awq", "'awq' is not supported"),
        (awq | {"bits": 8}, "8 bits are not supported; 4 are"),
        (awq | {"group_size": 48}, "group_size 48"),
        (awq | {"version": "gemv"}, "version 'gemv'"),
        (gptq | {"desc_act": True}, "desc_act"),
        (gptq | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (compressed(num_bits=8), "8 bits by 'group', activations not rounded"),
        (compressed(actorder="group"), "actorder"),
        (compressed(actorder="dynamic"), "actorder"),
        (compressed(symmetric="no"), "symmetric 'no'"),
        (int4 | {"config_groups": two}, "2 ways in one model"),
        (int4 | {"config_groups": None}, "config_groups"),
        (group(input_activations={"type": "int", "num_bits": 8}), "'int' with 8 bits"),
        (group(input_activations={"type": "float", "num_bits": 4}), "4 bits"),
        (group(input_activations=True), "input_activations True"),
        (group(output_activations={"num_bits": 8}), "output_activations"),
        (group(format="marlin-24"), "format 'marlin-24'"),
        (int4 | {"format": "sparse-bitmask"}, "format 'sparse-bitmask'"),
        (int4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (int4 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "[64, 64]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
    ):
        assert message in refused(tmp_path, quantization)


def test_damaged_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    key = "model.layers.0.mlp.down_proj"

    def refusal_of(name: str, change: Any) -> str:
        parent = tmp_path / str(len([*tmp_path.iterdir()]))
        parent.mkdir()
        quantized_folder, _ = quantized(folder, parent, name)
        tensors = load_file(quantized_folder / "model.safetensors")
        change(tensors)
        save_file(tensors, quantized_folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError) as caught:
            read(quantized_folder)
        return str(caught.value)

    assert "down_proj.scales" in refusal_of("awq", lambda t: t.pop(f"{key}.scales"))
    halved = {f"{key}.scales": torch.ones(1, 64)}
    assert "[1, 64], expected [3, 64]" in refusal_of("awq", lambda t: t.update(halved))
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong = {f"{key}.scales": torch.full((3, 64), value)}
        message = refusal_of("gptq", lambda t, wrong=wrong: t.update(wrong))
        assert f"tensor {key}.scales: scales are NaN or infinite in float32" in message
    for name in ("lm_head.qweight", "model.embed_tokens.scales"):
        message = refusal_of("awq", lambda t, n=name: t.update({n: torch.ones(8)}))
        assert f"tensor {name}: quantized embeddings and output heads" in message
    floats = {f"{key}.qweight": torch.ones(96, 8)}
    assert "type F32, expected one of I32" in refusal_of(
        "awq", lambda t: t.update(floats)
    )
    shuffled = {f"{key}.g_idx": torch.arange(96).int() % 3}
    assert "desc_act" in refusal_of("gptq", lambda t: t.update(shuffled))
