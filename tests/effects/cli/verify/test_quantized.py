"""`minfer verify` of quantized checkpoints and GGUF files: what works is supported, and
what is damaged or computed otherwise is not.
"""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend

from minfer.effects.setup.folders import bundled_folder
from minfer.kernels import quantized as products
from tests.circles import claimed, long
from tests.effects.checkpoints.formats_made import FORMATS, quantized
from tests.effects.cli.verify.test_command import checked, rewrite
from tests.effects.models.formats.test_formats import blocks_of
from tests.effects.models.gguf.written import add_tokenizer, write
from tests.effects.tiny_fallback import save as save_fallback
from tests.effects.tiny_families import VARIANTS, save

WEIGHTS = "model.safetensors"
SAMPLE_FORMATS = ("awq", "fp8 rows")  # of those that round activations, and that do not


def with_text_files(folder: Path) -> Path:
    """The folder, with the bundled model's tokenizer."""
    for path in bundled_folder().iterdir():
        if path.is_file() and path.name not in ("config.json", WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    return folder


def draft_in_format(name: str, folder: Path) -> Path:
    """The bundled draft model in a format."""
    return with_text_files(quantized(bundled_folder("draft"), folder, name)[0])


@pytest.mark.parametrize(
    "name",
    [
        *long(SAMPLE_FORMATS),
        *claimed(name for name in FORMATS if name not in SAMPLE_FORMATS),
    ],
)
def test_every_format_is_supported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = checked(capsys, draft_in_format(name, tmp_path), 0)
    assert findings["verdict"] == "supported"
    assert {
        "tensors",
        "ids",
        "logits float32",
        "greedy text",
        "sanity",
    } <= findings.keys()


@pytest.mark.parametrize("name", long(SAMPLE_FORMATS))
def test_models_that_transformers_runs_are_supported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 4096}
    save_fallback(tmp_path, "gpt_neox", **sizes)
    folder, _ = quantized(tmp_path, tmp_path, name)
    findings = checked(capsys, with_text_files(folder), 0)
    assert findings["verdict"].startswith("supported; its weights are random")
    assert findings["tensors"]["figures"] == "28 tensors"


@pytest.mark.claimed
def test_experts_of_all_in_one_tensor_are_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As gpt-oss is published."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 4096}
    save(str(tmp_path), "GptOss", VARIANTS["GptOss", "alternate"] | sizes)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in [key for key in tensors if key.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = blocks_of(outputs, inputs, experts)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    rewrite(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    findings = checked(capsys, with_text_files(tmp_path), 0)
    assert findings["verdict"].startswith("supported; its weights are random")
    assert "logits float32" in findings["verdict"]


@pytest.mark.claimed
@pytest.mark.parametrize("name", ["awq", "fp8 rows"])
def test_experts_one_by_one_are_supported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"moe_intermediate_size": 32, "vocab_size": 4096}
    save(str(tmp_path), "Qwen3Moe", VARIANTS["Qwen3Moe", "dense layers"] | sizes)
    folder, _ = quantized(tmp_path, tmp_path, name)
    findings = checked(capsys, with_text_files(folder), 0)
    assert findings["verdict"].startswith("supported; its weights are random")


@pytest.mark.long
def test_a_gguf_file_is_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bundled_folder("draft")
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(folder, dtype=torch.float32)
    kinds = {"ffn": gguf.GGMLQuantizationType.Q4_0}
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    path = write(
        tmp_path / "model.gguf",
        type(model).__name__.removesuffix("ForCausalLM"),
        model,
        kinds,
        gguf.GGMLQuantizationType.Q8_0,
        lambda writer: add_tokenizer(writer, backend, "qwen2", eos=0, eot=2),
    )
    findings = checked(capsys, path, 0)
    assert findings["verdict"] == "supported"
    assert findings["tokenizer"]["state"] == "skipped"


def shuffle_scales(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    draw = torch.Generator().manual_seed(0)
    for name, scales in tensors.items():
        if name.endswith("scales"):
            order = torch.randperm(scales.shape[1], generator=draw)
            tensors[name] = scales[:, order].contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.long
def test_damaged_scales_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = draft_in_format("awq", tmp_path)
    shuffle_scales(folder)
    assert "sanity" in checked(capsys, folder, 1)["verdict"]


@pytest.mark.long
def test_other_arithmetic_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products whose activations are 5 % off, as no scheme has them."""
    real = products.round_activations

    def wrong(x: torch.Tensor, scheme: Any) -> Any:
        numbers, scales = real(x, scheme)  # type: ignore[misc]  # of FP8, never None
        return numbers, scales * 1.05

    monkeypatch.setattr(products, "round_activations", wrong)
    findings = checked(capsys, draft_in_format("fp8 rows", tmp_path), 1)
    assert findings["logits float32"]["state"] == "fail"


@pytest.mark.long
def test_ids_without_embeddings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "few"
    shutil.copytree(bundled_folder(), folder)
    tensors = load_file(folder / WEIGHTS)
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name][:1000].contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    rewrite(folder / "config.json", vocab_size=1000)
    findings = checked(capsys, folder, 1)
    assert findings["verdict"] == "NOT supported: ids"
    assert "tokenizer.json has" in findings["ids"]["figures"]
