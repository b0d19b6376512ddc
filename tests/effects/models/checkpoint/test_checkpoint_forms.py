"""Names and forms in which the same weights are stored in checkpoints."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer.effects.models.architecture.weights import Weights, named_parts
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.config_reader import CheckpointError
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec

Tensors = dict[str, Tensor]
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def stacked(tensors: Tensors) -> Tensors:
    """As transformers 5 holds them: the matrices of all experts of a layer are one."""
    experts_by_matrix: dict[tuple[str, str], dict[int, Tensor]] = {}
    result = {}
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            result[name] = tensor
        else:
            by_expert = experts_by_matrix.setdefault((match[1], match[3]), {})
            by_expert[int(match[2])] = tensor
    by_name = {
        key: torch.stack([by_expert[i] for i in range(len(by_expert))])
        for key, by_expert in experts_by_matrix.items()
    }
    for experts in {experts for experts, _ in by_name}:
        names = ("w1", "w3", "w2")
        if (experts, "w1") not in by_name:
            names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (by_name[experts, name] for name in names)
        result[f"{experts}.gate_up_proj"] = torch.cat((gate, up), 1)
        result[f"{experts}.down_proj"] = down
    return result


def renamed(pattern: str, replacement: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {
            re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()
        }

    return change


def with_vision(tensors: Tensors) -> Tensors:
    vision = {
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": torch.ones(2, 2),
        "model.multi_modal_projector.mm_input_projection_weight": torch.ones(2),
    }
    return tensors | vision


def with_one_more_layer(tensors: Tensors) -> Tensors:
    """A layer that predicts further tokens, behind the last, with names of its own."""
    further = {
        name.replace(".layers.2.", ".layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    return tensors | further | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}


def both(*changes: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        for apply in changes:
            tensors = apply(tensors)
        return tensors

    return change


MTP = {"num_nextn_predict_layers": 1}
NEW_MIXTRAL = renamed(r"\.block_sparse_moe\.", ".mlp.")
PUBLISHED = renamed("^model|^lm_head", r"language_model.\g<0>")
# A config, the form, and what it changes in config.json.
FORMS: list[tuple[tuple[str, str], Callable[[Tensors], Tensors], dict[str, Any]]] = [
    (("Qwen2Moe", "dense layers"), stacked, {}),
    (("Qwen3Moe", "dense layers"), stacked, {}),
    (("Glm4Moe", "experts"), stacked, {}),
    (("DeepseekV2", "greedy"), stacked, {}),
    (("DeepseekV3", "groups"), stacked, {}),
    (("Mixtral", "experts"), stacked, {}),
    (("Mixtral", "experts"), both(stacked, NEW_MIXTRAL), {}),
    (("Mixtral", "experts"), NEW_MIXTRAL, {}),
    (("DeepseekV3", "groups"), with_one_more_layer, MTP),
    (("Glm4Moe", "experts"), both(with_one_more_layer, stacked), MTP),
    (("Qwen3Moe", "experts"), renamed(r"^model\.", ""), {}),
    (("Gemma3", "pattern"), both(PUBLISHED, with_vision), {}),
    (("Gemma3", "ropes"), both(PUBLISHED, with_vision), {}),
    (
        ("Gemma3", "ropes"),
        both(renamed(r"^model\.", "model.language_model."), with_vision),
        {},
    ),
]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({k: t.contiguous() for k, t in tensors.items()}, file, {"format": "pt"})


def same(spec: Any, weights: Weights, expected: Weights) -> bool:
    pairs = zip(named_parts(spec, weights), named_parts(spec, expected), strict=True)
    return all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


@pytest.mark.parametrize(("key", "change", "config"), FORMS)
def test_the_same_weights_are_read_of_every_form(
    tmp_path: Path,
    key: tuple[str, str],
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
) -> None:
    save(str(tmp_path), key[0], VARIANTS[key] | {"num_nextn_predict_layers": 0})
    spec = read_spec(tmp_path)
    expected = load_weights(tmp_path, spec, "float32")
    before = {*load_file(tmp_path / "model.safetensors")}
    rewrite(tmp_path, change)
    assert before != {*load_file(tmp_path / "model.safetensors")}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    new_spec = read_spec(tmp_path)
    assert new_spec.layers == spec.layers
    assert same(spec, load_weights(tmp_path, new_spec, "float32"), expected)


def test_a_nested_text_config_is_read_with_its_defaults(tmp_path: Path) -> None:
    """Of Gemma 3's published checkpoints."""
    hf_model = save(str(tmp_path), "Gemma3", VARIANTS["Gemma3", "pattern"])
    spec, file = read_spec(tmp_path), tmp_path / "config.json"
    text = json.loads(file.read_text())
    dtype = text.pop("dtype")
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [1, 106],
        "torch_dtype": dtype,
    }
    file.write_text(json.dumps(outer))
    new_spec = read_spec(tmp_path)
    assert (new_spec.layers, new_spec.dtype) == (spec.layers, spec.dtype)
    assert new_spec.eos_ids == (1, 106)
    rewrite(tmp_path, both(PUBLISHED, with_vision))
    weights = load_weights(tmp_path, new_spec, "float32")
    assert torch.equal(weights.embed, hf_model.model.embed_tokens.weight)


def test_further_layers_that_no_config_tells_of_are_refused(tmp_path: Path) -> None:
    save(str(tmp_path), "Glm4Moe", VARIANTS["Glm4Moe", "experts"])
    rewrite(tmp_path, with_one_more_layer)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"num_nextn_predict_layers": 0}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.3"):
        load_weights(tmp_path, read_spec(tmp_path))
