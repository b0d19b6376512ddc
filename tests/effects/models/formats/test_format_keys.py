"""Keys of `quantization_config` and zero points: read as they are meant, or named."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.quantization import (
    Quantization,
    warn_of_cache_scheme,
)
from minfer.effects.models.architecture.quantization_files import FILE, KEY
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.models.config_reader import CheckpointError
from minfer.kernels.quantized import dequantize
from tests.effects.checkpoints.formats_made import (
    FORMATS,
    GROUP,
    Tensors,
    Writer,
    compressed_zeros,
    gptq,
    quantized,
    rounded,
)
from tests.effects.models.formats.test_formats import leaves, read
from tests.effects.tiny_model import CONFIG, write_checkpoint

AWQ, GPTQ, INT4, FP8 = (FORMATS[name][0] for name in ("awq", "gptq", "4 bits", "fp8"))
SYMMETRIC = {**GPTQ, "sym": True}
SYM_ABSENT = {**GPTQ, "sym": None}
ORDERED = {**GPTQ, "desc_act": True, "static_groups": True}


def byte_zeros(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """As compressed-tensors wrote zero points before version 0.10."""
    tensors, _ = compressed_zeros(matrix)
    numbers, zeros, scales = rounded(matrix, zeros=True)
    signed = (zeros - 8).to(torch.int8)
    arguments: Any = QuantizationArgs(
        num_bits=4, type="int", group_size=GROUP, symmetric=False, strategy="group"
    )
    copy = reference((numbers - 8).to(torch.int8), scales, signed, args=arguments)
    return {**tensors, "weight_zero_point": signed}, copy.float()


CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "symmetric, less one": (SYMMETRIC, partial(gptq, zeros=False)),
    "symmetric, as they are": (SYMMETRIC, partial(gptq, less=0, zeros=False)),
    "symmetric, named v1": (
        {**SYMMETRIC, "checkpoint_format": "gptq"},
        partial(gptq, less=0, zeros=False),
    ),
    "symmetric, named v2": (
        {**SYMMETRIC, "checkpoint_format": "gptq_v2"},
        partial(gptq, less=0, zeros=False),
    ),
    "sym absent, less one": (SYM_ABSENT, partial(gptq, zeros=False)),
    "sym absent, as they are": (SYM_ABSENT, partial(gptq, less=0, zeros=False)),
    "sym absent, zero points": (SYM_ABSENT, gptq),
    "ordered behind static groups": (ORDERED, gptq),
    "format instead of checkpoint_format": (
        {**GPTQ, "format": "gptq_v2"},
        partial(gptq, less=0),
    ),
    "modules left out": ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, gptq),
    "the same for some": ({**GPTQ, "dynamic": {"+:.*up.*": {"bits": 4}}}, gptq),
    "AutoAWQ's own names": (
        {
            "quant_method": "awq",
            "w_bit": 4,
            "q_group_size": GROUP,
            "zero_point": True,
            "version": "GEMM",
        },
        FORMATS["awq"][1],
    ),
    "zero points in bytes": (FORMATS["4 bits, zeros"][0], byte_zeros),
    "symmetric AWQ": ({**AWQ, "zero_point": False, "sym": True}, FORMATS["awq"][1]),
    "AutoRound": ({**GPTQ, "data_type": "int", "act_bits": 16, "iters": 200}, gptq),
    "another name of E4M3": ({**FP8, "fmt": "float8_e4m3fn"}, FORMATS["fp8"][1]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_other_tools_write_is_read_as_it_is_meant(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layers, "in_kernel_layout", lambda leaf: leaf
    )  # leaves stay as stored
    monkeypatch.setitem(FORMATS, name, CASES[name])
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, copy = quantized(folder, tmp_path, name)
    for loaded, expected in zip(
        leaves(read(quantized_folder)[1]), leaves(read(copy)[1]), strict=True
    ):
        torch.testing.assert_close(
            dequantize(loaded), expected.weight, rtol=1e-6, atol=1e-7
        )


def test_symmetric_weights_with_other_zero_points_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "x", (SYMMETRIC, partial(gptq, zeros=False)))
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, _ = quantized(folder, tmp_path, "x")
    file = quantized_folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.qzeros"
    for low, high, wrong in ((9, 9, 0x99999999 - (1 << 32)), (7, 8, 0x78787878)):
        tensors[name] = torch.full_like(tensors[name], wrong)
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{name}.* {low} to {high}.* sym"):
            read(quantized_folder)


def test_zero_points_of_the_other_version_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sym: all of them 8 as they are, where they are less one."""
    middles = partial(gptq, less=0, zeros=False)
    for name, quantization in (
        ("v1", GPTQ),
        ("v2", {**GPTQ, "checkpoint_format": "gptq_v2"}),
    ):
        monkeypatch.setitem(FORMATS, name, (quantization, middles))
        (parent := tmp_path / name).mkdir()
        folder = write_checkpoint(parent / "plain", hidden_size=64, intermediate_size=96)
        quantized_folder, _ = quantized(folder, parent, name)
        if name == "v2":
            assert read(quantized_folder)
            continue
        message = r"qzeros: all .* stored as 8.* sym to true, or checkpoint_format"
        with pytest.raises(CheckpointError, match=message):
            read(quantized_folder)


@pytest.mark.parametrize("order", [None, torch.arange(95, -1, -1) // GROUP])
def test_ordered_inputs_are_named_where_static_groups_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Tensor | None
) -> None:
    """Or without the tensor that shows them."""
    monkeypatch.setitem(FORMATS, "x", (ORDERED, gptq))
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, _ = quantized(folder, tmp_path, "x")
    file = quantized_folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.g_idx"
    del tensors[name]
    if order is not None:
        tensors[name] = order.int()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        read(quantized_folder)


def wide_zeros(matrix: Tensor) -> tuple[Tensors, Tensor]:
    tensors, copy = byte_zeros(matrix)
    return {**tensors, "weight_zero_point": tensors["weight_zero_point"].long()}, copy


ZEROS = FORMATS["4 bits, zeros"][0]
ONE_GROUP = ZEROS["config_groups"]["group_0"]
WIDER = {**ONE_GROUP, "weights": {**ONE_GROUP["weights"], "group_size": 64}}
MISFITS: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "AWQ": ({**AWQ, "group_size": 64}, FORMATS["awq"][1], "qzeros has .*group_size"),
    "GPTQ": ({**GPTQ, "group_size": 64}, gptq, "qzeros has .*group_size"),
    "compressed-tensors": (
        {**ZEROS, "config_groups": {"group_0": WIDER}},
        FORMATS["4 bits, zeros"][1],
        "weight_scale has .*group_size",
    ),
    "FP8": (
        {**FORMATS["fp8, deepseek"][0], "weight_block_size": None},
        FORMATS["fp8, deepseek"][1],
        "weight_scale_inv has .*weight_block_size",
    ),
    "zero points of another type": (ZEROS, wide_zeros, "zero_point has type I64.* I8"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_do_not_fit_are_named_with_the_keys(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization, writer, message = MISFITS[name]
    monkeypatch.setitem(FORMATS, name, (quantization, writer))
    folder = write_checkpoint(tmp_path / "plain", hidden_size=192, intermediate_size=192)
    quantized_folder, _ = quantized(folder, tmp_path, name)
    with pytest.raises(CheckpointError, match=message):
        read(quantized_folder)


def group(**changes: Any) -> dict[str, Any]:
    changed = INT4["config_groups"]["group_0"] | changes
    return {**INT4, "config_groups": {"group_0": changed}}


def weights(**changes: Any) -> dict[str, Any]:
    return group(weights=INT4["config_groups"]["group_0"]["weights"] | changes)


REFUSED = [
    ({**GPTQ, "dynamic": {"+:.*up.*": {"bits": 8}}}, ["dynamic: bits 8", "'+:.*up.*'"]),
    ({**GPTQ, "dynamic": {".*up.*": {"group_size": 64}}}, ["dynamic: group_size 64"]),
    ({**GPTQ, "dynamic": {".*up.*": {"sym": True}}}, ["dynamic: sym True"]),
    ({**GPTQ, "dynamic": {".*up.*": {"secret": 1}}}, ["dynamic: secret 1"]),
    ({**GPTQ, "dynamic": [1]}, ["dynamic [1]"]),
    ({**GPTQ, "dynamic": {"+:.*up.*": "no"}}, ["dynamic: '+:.*up.*'", "'no'"]),
    ({**GPTQ, "sym": "yes"}, ["sym must be true or false"]),
    ({**GPTQ, "desc_act": "false"}, ["desc_act must be true or false"]),
    ({**GPTQ, "desc_act": True}, ["desc_act"]),
    ({**INT4, "format": "int-quantized"}, ["'int-quantized'", "4 bits"]),
    ({**FORMATS["int8"][0], "format": "pack-quantized"}, ["'pack-quantized'", "8 bits"]),
    ({**GPTQ, "adapter": {"rank": 8}}, ["adapter"]),
    ({**GPTQ, "rotation": "hadamard"}, ["rotation 'hadamard'"]),
    ({**GPTQ, "pack_dtype": "int16"}, ["pack_dtype 'int16'"]),
    ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format True"]),
    ({**AWQ, "act_bits": 8}, ["act_bits 8"]),
    ({**AWQ, "q_group_size": 64}, ["group_size", "q_group_size", "not the same"]),
    ({**AWQ, "format": "gemv"}, ["format 'gemv'"]),
    ({**FP8, "activation_scheme": "mixed"}, ["activation_scheme 'mixed'"]),
    ({**INT4, "moe_sparsity_config": {"a": 1}}, ["moe_sparsity_config"]),
    (weights(dynamic=True), ["dynamic True"]),
    *(
        ({**INT4, key: {"secret": 1}}, [key, "key 'secret'"])
        for key in ("sparsity_config", "transform_config")
    ),
    *(({**FORMATS[name][0], "secret": 1}, ["key 'secret'"]) for name in FORMATS),
    ({"quant_method": "mxfp4", "secret": 1}, ["key 'secret'"]),
    (group(format="naive-quantized"), ["'naive-quantized'", "4 bits"]),
    (group(secret=1), ["group_0", "key 'secret'"]),
    (weights(secret=1), ["group_0: weights", "key 'secret'"]),
]


@pytest.mark.parametrize(("quantization", "named"), REFUSED)
def test_keys_that_are_not_known_are_named(
    quantization: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_spec(CONFIG | {"quantization_config": quantization}, "model/config.json")
    for word in ["model/config.json: quantization_config", *named]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_keys_without_a_value_are_absent(name: str) -> None:
    quantization = FORMATS[name][0]

    def found(config: dict[str, Any]) -> Quantization | None:
        return parse_spec(CONFIG | {"quantization_config": config}).quantization

    assert found({**quantization, "secret": None}) == found(quantization) is not None


MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.31.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
    },
}
INNER = MODELOPT["quantization"]
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "quantize_config.json": ("gptq", {**GPTQ, "model_file_base_name": "model"}),
    "quant_config.json": ("awq", CASES["AutoAWQ's own names"][0]),
    "hf_quant_config.json": ("fp8", MODELOPT),
}


@pytest.mark.parametrize("file", BESIDE)
def test_what_stands_beside_the_config_is_read(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layers, "in_kernel_layout", lambda leaf: leaf
    )  # leaves stay as stored
    name, quantization = BESIDE[file]
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, copy = quantized(folder, tmp_path, name)
    (quantized_folder / "config.json").write_bytes((copy / "config.json").read_bytes())
    quantization = {
        key: value for key, value in quantization.items() if key != "quant_method"
    }
    (quantized_folder / file).write_text(json.dumps(quantization))
    spec, weights = read(quantized_folder)
    assert spec.quantization is not None
    for loaded, expected in zip(leaves(weights), leaves(read(copy)[1]), strict=True):
        torch.testing.assert_close(
            dequantize(loaded), expected.weight, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("file", BESIDE)
def test_the_file_that_says_how_is_named(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = {"kv_cache_scheme": {"type": "float"}}
    beside = {KEY: scheme, FILE: file}
    warn_of_cache_scheme(beside, "model/config.json", "bfloat16")
    assert f"model/{file}: quantization_config: kv_cache_scheme" in caplog.text
    name, quantization = BESIDE[file]
    folder = write_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    quantized_folder, copy = quantized(folder, tmp_path, name)
    (quantized_folder / "config.json").write_bytes((copy / "config.json").read_bytes())
    quantization = {
        key: value for key, value in quantization.items() if key != "quant_method"
    }
    (quantized_folder / file).write_text(json.dumps({**quantization, "secret": 1}))
    with pytest.raises(CheckpointError, match=rf"/{file}: .*key 'secret'"):
        read(quantized_folder)
    (quantized_folder / file).write_text(json.dumps(quantization))
    tensors = load_file(quantized_folder / "model.safetensors")
    weight = next(key for key in tensors if "down_proj" in key and "weight" in key[-7:])
    tensors[weight] = tensors[weight][:-1].contiguous()
    save_file(tensors, quantized_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"config.json and {file} \("):
        read(quantized_folder)


def test_the_configs_own_quantization_has_priority(tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": GPTQ}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 3}))
    assert read_config(tmp_path) == config
    (tmp_path / "quant_config.json").write_text("[")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"quant_config\.json: cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({**MODELOPT, "secret": 1}, "key 'secret'"),
        ({**MODELOPT, "quantization": {**INNER, "secret": 1}}, "key 'secret'"),
        ({**MODELOPT, "quantization": {"quant_algo": "NVFP4_AWQ"}}, "algo 'NVFP4_AWQ'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not supported; 16"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"producer": {}}, "quant_algo None"),
    ],
)
def test_other_algorithms_of_modelopt_are_named(
    quantization: dict[str, Any], named: str
) -> None:
    config = CONFIG | {
        "quantization_config": {"quant_method": "modelopt", **quantization}
    }
    with pytest.raises(CheckpointError, match=named):
        parse_spec(config)
    inline = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    assert parse_spec(CONFIG | {"quantization_config": inline}).quantization is not None
