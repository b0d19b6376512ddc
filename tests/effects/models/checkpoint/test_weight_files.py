"""Which tensor comes from which file under which name: as transformers reads them, or
refused by name.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from minfer.effects.models.architecture.spec import EMBED, LM_HEAD
from minfer.effects.models.checkpoint.checkpoint import (
    CorruptFileError,
    TensorMismatchError,
    load_weights,
)
from minfer.effects.models.checkpoint.weight_files import INDEX_NAME, SINGLE_NAME
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from tests.effects.models.checkpoint.test_checkpoint import (
    check_equal,
    edit,
    edit_tensors,
    save,
)
from tests.effects.tiny_model import expected_tensors, read_spec

Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "weight_map"),
        ('{"metadata": {"total_size": 8}}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "tensor a"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "not the name of a file"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the name of a file"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: not found"),
        ('{"weight_map": {"a": "weights.bin"}}', "no safetensors"),
        (
            '{"weight_map": {"model.norm.weight": "one.safetensors"}}',
            r"one.safetensors: lacks model.norm.weight, .*download it again",
        ),
    ],
)
def test_bad_index(tmp_path: Path, index: str, says: str) -> None:
    save(tmp_path)
    edit_tensors(tmp_path, without("model.norm.weight"))
    single, path = (tmp_path / name for name in (SINGLE_NAME, INDEX_NAME))
    single.rename(tmp_path / "one.safetensors")
    path.write_text(index)
    with pytest.raises(CheckpointError, match=says):
        load_weights(tmp_path, read_spec(tmp_path))


@pytest.mark.parametrize(
    "index", ["{", "{}", '{"weight_map": {"a": "gone.safetensors"}}']
)
def test_one_file_beside_an_index_that_cannot_be_used_is_read_as_by_transformers(
    tmp_path: Path, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(tmp_path)
    (tmp_path / INDEX_NAME).write_text(index)
    check_equal(tmp_path, model, "float32")
    (emitted,) = caplog.messages
    assert SINGLE_NAME in emitted
    assert INDEX_NAME in emitted


def test_one_file_beside_a_whole_set_of_others_is_refused(tmp_path: Path) -> None:
    save(tmp_path, shard="8KB")
    tensors = {
        name: torch.zeros(shape)
        for name, shape in expected_tensors(read_spec(tmp_path)).items()
    }
    save_file(tensors, tmp_path / SINGLE_NAME)
    says = rf"both {SINGLE_NAME} and {INDEX_NAME} .*model-00001-of-.*remove one"
    with pytest.raises(CheckpointError, match=says):
        load_weights(tmp_path, read_spec(tmp_path))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            ["model.fp16.safetensors"],
            "rename model.fp16.safetensors to model.safetensors",
        ),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "download model.safetensors.index.json as well",
        ),
    ],
)
def test_weights_under_other_names(tmp_path: Path, files: list[str], says: str) -> None:
    save(tmp_path)
    content = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).unlink()
    for name in files:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptFileError, match=says):
        load_weights(tmp_path, read_spec(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "adapter_model.safetensors",
            "give its base model, and name it with --enable-lora",
        ),
        ("consolidated.safetensors", "Mistral's own form"),
        ("consolidated-00001-of-00002.safetensors", "Mistral's own form"),
    ],
)
def test_weights_of_no_model_here_are_named(tmp_path: Path, name: str, says: str) -> None:
    save(tmp_path)
    spec = read_spec(tmp_path)
    (tmp_path / SINGLE_NAME).rename(tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{says}"):
        load_weights(tmp_path, spec)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{says}"):
        read_spec(tmp_path)


def test_an_adapter_beside_the_weights_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path)
    prepare(EngineArgs(model=str(tmp_path), executor="dry"))
    assert not caplog.text
    (tmp_path / "adapter_config.json").write_text("{}")
    prepare(EngineArgs(model=str(tmp_path), executor="dry"))
    assert "adapter_config.json: the adapter beside the weights is not" in caplog.text


def test_shards_that_differ_from_their_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(tmp_path, shard="8KB")
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    files = sorted(set(index["weight_map"].values()))
    shards = [load_file(tmp_path / file) for file in files[:2]]
    (name, tensor), *_ = shards[0].items()
    save_file({**shards[1], "more": torch.ones(1)}, tmp_path / files[1])
    check_equal(tmp_path, model, "float32")
    assert f"{files[1]}: more not in {INDEX_NAME} and not read" in caplog.text
    save_file({**shards[1], **shards[0]}, tmp_path / files[1])
    check_equal(tmp_path, model, "float32")
    says = f"{files[1]}: tensor {name} differs from {name} of {files[0]}.*remove"
    for changed in (tensor + 1, tensor.double()):
        save_file({**shards[1], name: changed}, tmp_path / files[1])
        with pytest.raises(CheckpointError, match=says):
            load_weights(tmp_path, read_spec(tmp_path))


def bare(tensors: Tensors) -> Tensors:
    """Names without `model.`, as a model without an output head writes them."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def head_only(tensors: Tensors) -> Tensors:
    """The output head without the embedding, as `safetensors.torch.save_model` does."""
    return {name.replace(EMBED, LM_HEAD): tensor for name, tensor in tensors.items()}


def doubled(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", [bare, doubled, head_only])
def test_names_that_transformers_takes(
    tmp_path: Path, *, tied: bool, change: Callable[[Tensors], Tensors]
) -> None:
    save(tmp_path, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / SINGLE_NAME)
    save_file(change(tensors), tmp_path / SINGLE_NAME, {"format": "pt"})
    if change is head_only and not tied:
        with pytest.raises(TensorMismatchError, match="missing tensor model"):
            load_weights(tmp_path, read_spec(tmp_path))
        return
    hf_model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    check_equal(tmp_path, hf_model, "float32")
    assert torch.equal(hf_model.model.embed_tokens.weight, tensors[EMBED])


def test_a_missing_output_head_says_what_helps(tmp_path: Path) -> None:
    save(tmp_path)
    edit_tensors(tmp_path, without(LM_HEAD))
    with pytest.raises(TensorMismatchError, match="set tie_word_embeddings to true"):
        load_weights(tmp_path, read_spec(tmp_path))


def test_an_index_that_the_config_names(tmp_path: Path) -> None:
    model = save(tmp_path, shard="8KB")
    (tmp_path / INDEX_NAME).rename(tmp_path / "own.safetensors.index.json")
    edit(tmp_path, transformers_weights="own.safetensors.index.json")
    assert Qwen2ForCausalLM.from_pretrained(tmp_path) is not None
    check_equal(tmp_path, model, "float32")


def test_a_file_that_the_config_names(tmp_path: Path) -> None:
    model = save(tmp_path)
    (tmp_path / SINGLE_NAME).rename(tmp_path / "own.safetensors")
    edit(tmp_path, transformers_weights="own.safetensors")
    assert Qwen2ForCausalLM.from_pretrained(tmp_path) is not None
    check_equal(tmp_path, model, "float32")
    edit(tmp_path, transformers_weights="../own.safetensors")
    with pytest.raises(CorruptFileError, match="not the name of a file in this folder"):
        load_weights(tmp_path, read_spec(tmp_path))
