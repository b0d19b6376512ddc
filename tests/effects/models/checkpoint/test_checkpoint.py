"""Reading checkpoints: what loads agrees with transformers, what is wrong is named."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from minfer.effects.models.architecture.rope_scaling import Rope
from minfer.effects.models.architecture.weights import named_parts
from minfer.effects.models.checkpoint.checkpoint import (
    CorruptFileError,
    TensorMismatchError,
    load_weights,
    random_weights,
    read_config,
)
from minfer.effects.models.config_reader import (
    CheckpointError,
    ModelConfigError,
    UnsupportedModelError,
)
from tests.effects.tiny_model import gqa_of, read_spec

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def save(
    folder: Path, *, shard: str = "1GB", dtype: torch.dtype | None = None, **config: Any
) -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**TINY, **config})).train(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def check_equal(folder: Path, model: Any, dtype: str) -> None:
    spec = read_spec(folder)
    weights = load_weights(folder, spec, dtype)
    expected = dict(model.named_parameters())
    loaded = dict(named_parts(spec, weights))
    assert set(loaded) == set(expected)
    for name, tensor in loaded.items():
        assert tensor.dtype is getattr(torch, dtype)
        assert torch.equal(tensor, expected[name].detach().to(tensor.dtype)), name
    assert (weights.lm_head.weight is weights.embed) == spec.tie_word_embeddings


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loads_what_transformers_saved(
    tmp_path: Path, tied: bool, shard: str, dtype: str
) -> None:
    model = save(tmp_path, shard=shard, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "8KB")
    check_equal(tmp_path, model, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loads_half_checkpoints_as_they_are_and_widened(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = save(tmp_path, dtype=dtype)
    spec = read_spec(tmp_path)
    assert spec.dtype == str(dtype).removeprefix("torch.")
    assert load_weights(tmp_path, spec).embed.dtype is dtype
    check_equal(tmp_path, model, "float32")


def test_large_matrices_by_column_hold_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "minfer.effects.models.architecture.linear.MIN_BY_COLUMN_ELEMENTS", 64
    )
    model = save(tmp_path)
    assert load_weights(tmp_path, read_spec(tmp_path), "float32").embed.stride() == (
        1,
        96,
    )
    check_equal(tmp_path, model, "float32")
    spec = read_spec(tmp_path)
    by_column = dict(named_parts(spec, random_weights(spec, "float32", 3)))
    monkeypatch.undo()
    for name, tensor in named_parts(spec, random_weights(spec, "float32", 3)):
        assert torch.equal(tensor, by_column[name])


def test_reads_the_spec(tmp_path: Path) -> None:
    save(
        tmp_path,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=[3, 4],
        bos_token_id=1,
        rms_norm_eps=1e-5,
    )
    spec = read_spec(tmp_path)
    sizes = gqa_of(spec)
    assert (sizes.head_dim, sizes.q_size, sizes.kv_size) == (16, 64, 32)
    assert (gqa_of(spec).rope, spec.norms.eps) == (Rope(theta=5e5), 1e-5)
    assert spec.eos_ids == (3, 4)


def test_reads_configs_of_older_transformers(tmp_path: Path) -> None:
    save(tmp_path)
    edit(
        tmp_path,
        rope_parameters=...,
        rope_theta=1e6,
        dtype=...,
        torch_dtype="bfloat16",
        layer_types=...,
        head_dim=...,
        rope_scaling=None,
    )
    spec = read_spec(tmp_path)
    assert (gqa_of(spec).rope, spec.dtype, gqa_of(spec).head_dim) == (
        Rope(theta=1e6),
        "bfloat16",
        8,
    )


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    model = save(tmp_path, tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.0.mlp.shared.weight"] = torch.ones(0, 4)

    edit_tensors(tmp_path, add)
    check_equal(tmp_path, model, "float32")


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        (lambda t: t.pop(K), TensorMismatchError, [K, "missing", "[16, 32]"]),
        (
            put("model.extra", torch.ones(1)),
            TensorMismatchError,
            ["model.extra", "unexpected"],
        ),
        (put(K, torch.ones(32, 16)), TensorMismatchError, [K, "[32, 16]", "[16, 32]"]),
        (put(K, torch.ones(16, 32, dtype=torch.int8)), UnsupportedModelError, [K, "I8"]),
        (
            put("lm_head.weight", torch.ones(96, 32)),
            TensorMismatchError,
            ["lm_head.weight", "tie_word_embeddings"],
        ),
        (
            put("lm_head.weight", torch.ones(95, 32)),
            TensorMismatchError,
            ["lm_head.weight", "[95, 32]"],
        ),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, change: Any, error: type[Exception], names: list[str]
) -> None:
    save(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, change)
    with pytest.raises(error) as caught:
        load_weights(tmp_path, read_spec(tmp_path))
    for name in [*names, str(tmp_path)]:
        assert name in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors.*download"):
        load_weights(tmp_path, read_spec(tmp_path))


def test_garbage_file(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(CorruptFileError, match="corrupt"):
        load_weights(tmp_path, read_spec(tmp_path))


def test_missing_weights(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"not found.*dummy"):
        load_weights(tmp_path, read_spec(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UnsupportedModelError, match=r"pickle.*save_pretrained"):
        load_weights(tmp_path, read_spec(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 96.0, "num_hidden_layers": 2.0, "eos_token_id": [3.0, 4]},
        {"architectures": ...},
        {"architectures": None},
        {"architectures": []},
        {"architectures": "Qwen2ForCausalLM"},
        {"architectures": ["Qwen2Model"]},
        # transformers goes by the model type.
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": ...},
    ],
)
def test_forms_of_a_config_that_say_the_same(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    save(tmp_path, eos_token_id=[3, 4])
    expected = read_spec(tmp_path)
    edit(tmp_path, **changes)
    assert read_spec(tmp_path) == expected


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedModelError,
            ["GPT2LMHeadModel", "Qwen2ForCausalLM"],
        ),
        (
            {"architectures": ..., "model_type": ...},
            ModelConfigError,
            ["architectures", "nothing"],
        ),
        ({"architectures": [7]}, ModelConfigError, ["architectures", "7"]),
        (
            {"architectures": None, "model_type": "gpt2"},
            UnsupportedModelError,
            ["model_type 'gpt2'", "Qwen2ForCausalLM"],
        ),
        (
            {"use_sliding_window": True, "sliding_window": 1},
            ModelConfigError,
            ["sliding_window", "2"],
        ),
        ({"use_sliding_window": 1}, ModelConfigError, ["use_sliding_window", "1"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ModelConfigError,
            ["layer_types", "sliding window"],
        ),
        ({"layer_types": ["full_attention"]}, ModelConfigError, ["layer_types", "2"]),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            UnsupportedModelError,
            ["linear_attention"],
        ),
        ({"layer_types": 3}, ModelConfigError, ["layer_types", "3"]),
        ({"hidden_act": "gelu"}, UnsupportedModelError, ["gelu", "silu"]),
        (
            {"quantization_config": {"bits": 4}},
            UnsupportedModelError,
            ["quantization_config"],
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            UnsupportedModelError,
            ["dynamic"],
        ),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "longrope", "factor": 2}},
            UnsupportedModelError,
            ["rope_scaling", "longrope"],
        ),
        ({"rope_parameters": [1]}, ModelConfigError, ["rope_parameters"]),
        (
            {"rope_parameters": {"rope_theta": "big"}},
            ModelConfigError,
            ["rope_theta", "'big'"],
        ),
        ({"hidden_size": "32"}, ModelConfigError, ["hidden_size", "'32'"]),
        ({"hidden_size": True}, ModelConfigError, ["hidden_size", "True"]),
        ({"hidden_size": ...}, ModelConfigError, ["hidden_size", "nothing"]),
        ({"num_hidden_layers": 0}, ModelConfigError, ["num_hidden_layers", "0"]),
        ({"vocab_size": -5}, ModelConfigError, ["vocab_size", "-5"]),
        ({"vocab_size": 96.5}, ModelConfigError, ["vocab_size", "96.5"]),
        ({"vocab_size": float("nan")}, ModelConfigError, ["vocab_size", "nan"]),
        (
            {"num_key_value_heads": 3},
            ModelConfigError,
            ["num_key_value_heads", "divisor"],
        ),
        (
            {"head_dim": ..., "hidden_size": 30},
            ModelConfigError,
            ["hidden_size", "multiple"],
        ),
        ({"head_dim": 7}, ModelConfigError, ["head_dim", "even"]),
        ({"rms_norm_eps": 0}, ModelConfigError, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("inf")}, ModelConfigError, ["rms_norm_eps", "inf"]),
        (
            {"tie_word_embeddings": "yes"},
            ModelConfigError,
            ["tie_word_embeddings", "yes"],
        ),
        ({"dtype": "float8"}, ModelConfigError, ["dtype", "float8", "bfloat16"]),
        ({"dtype": 16}, ModelConfigError, ["dtype", "16"]),
        ({"eos_token_id": "</s>"}, ModelConfigError, ["eos_token_id"]),
        ({"eos_token_id": [1, -1]}, ModelConfigError, ["eos_token_id"]),
    ],
)
def test_bad_configs_are_named(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], names: list[str]
) -> None:
    save(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(error) as caught:
        read_spec(tmp_path)
    assert isinstance(caught.value, CheckpointError)
    for name in [*names, "config.json"]:
        assert name in str(caught.value)


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: not found"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelConfigError, match="object"):
        read_config(tmp_path)


@pytest.mark.long
def test_reading_a_spec_loads_no_torch(tmp_path: Path) -> None:
    save(tmp_path)
    code = (
        "import sys; "
        "from minfer.effects.models.checkpoint.checkpoint import read_config; "
        "from minfer.effects.models.architecture.spec_reader import parse_spec; "
        f"parse_spec(read_config({str(tmp_path)!r})); assert 'torch' not in sys.modules; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
