"""What is read of adapters' files, and what is refused, by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from minfer.effects.models.adapters.peft_config import (
    MAX_PATTERN_CHARS,
    PATTERN_SECONDS,
    AdapterError,
    read_peft_config,
)
from minfer.effects.models.adapters.peft_files import read_adapter
from minfer.effects.models.adapters.place_adapter import place_adapter
from minfer.effects.models.adapters.slot_layout import SlotLayout, slot_bytes
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.config_reader import CheckpointError
from tests.effects.small_adapters import MODULE, WEIGHTS, write_adapter
from tests.effects.tiny_model import CONFIG

SPEC = parse_spec(CONFIG)
LONG = "x" * 9999
LAYER = f"base_model.model.model.layers.0.{MODULE}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return write_adapter(tmp_path / "adapter", tmp_path)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, **values: Any) -> None:
    """Change tensors of the first layer: lora_A, lora_B, or others by their names."""
    tensors = load_file(folder / WEIGHTS)
    for name, value in values.items():
        full = f"{LAYER}.{name}.weight" if name.startswith("lora") else name
        if value is None:
            del tensors[full]
        else:
            tensors[full] = value(tensors.get(full))
    save_file(tensors, folder / WEIGHTS)


def refusal(folder: Path, spec: ModelSpec = SPEC, max_rank: int = 16) -> str:
    with pytest.raises(CheckpointError) as raised:
        read_adapter(folder, spec, max_rank)
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"trainable_token_indices": [1]}, "embeddings of tokens"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"layer_replication": [[0, 1]]}, "copies of layers"),
        ({"new_in_peft": 3}, "new_in_peft is 3"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, "r must be a positive integer, found 0"),
        ({"r": True}, "r must be"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
        ({"use_rslora": 1.5}, "use_rslora must be true or false"),
        ({"rank_pattern": {"a": -1}}, "rank_pattern must be"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"target_modules": 3}, "target_modules must be a list of names"),
        ({"target_modules": "(", "layers_to_transform": None}, "regular expression"),
        ({"layers_to_transform": [-1]}, "layers_to_transform must be"),
        ({"target_modules": ["q_proj"]}, "does not target"),
        ({"exclude_modules": ["gate_proj"]}, "does not target"),
        ({"layers_to_transform": [1]}, "does not target"),
        ({"r": 5}, "for model.layers.0.mlp.gate_proj of the model and rank 5"),
    ],
    ids=str,
)
def test_configs_that_are_refused(
    folder: Path, values: dict[str, Any], named: str
) -> None:
    change_config(folder, **values)
    message = refusal(folder)
    assert named in message
    assert str(folder) in message


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"lora_A": None}, "has no lora_A"),
        ({"lora_B": lambda b: b * torch.nan}, "NaN or infinite"),
        ({"lora_A": lambda a: a[:, 1:].contiguous()}, "must be [4, 32]"),
        ({"lora_A": lambda a: a.flatten()}, "must be a matrix"),
        ({"lora_B": lambda b: b.to(torch.int32)}, "of type I32"),
        ({"base_model.model.lm_head.lora_A.weight": lambda _: torch.ones(4, 64)}, "lm_h"),
        ({f"{LAYER}.lora_magnitude_vector": lambda _: torch.ones(3, 3)}, "magnitude"),
        ({"base_model.model.lm_head.weight": lambda _: torch.ones(3, 3)}, "lm_head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_are_refused(
    folder: Path, values: dict[str, Any], named: str
) -> None:
    change_tensors(folder, **values)
    assert named in refusal(folder)


def test_modules_that_no_adapter_can_change(folder: Path) -> None:
    for name in ("model.layers.9.mlp.gate_proj", "model.embed_tokens", "lm_head"):
        tensors = load_file(folder / WEIGHTS)
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.ones(4, 64)
        tensors[f"{prefix}.lora_B.weight"] = torch.ones(96, 4)
        other = folder.parent / name
        other.mkdir()
        save_file(tensors, other / WEIGHTS)
        (other / "adapter_config.json").write_bytes(
            (folder / "adapter_config.json").read_bytes()
        )
        message = refusal(other)
        assert f"has no matrix {name} that an adapter can change" in message


def test_other_files_are_refused(folder: Path) -> None:
    assert "rank 4, and at most 3" in refusal(folder, max_rank=3)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-8])
    assert "truncated or corrupt" in refusal(folder)
    (folder / WEIGHTS).unlink()
    assert "not found" in refusal(folder)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert "pickled weights can execute code" in refusal(folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "JSON object" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in refusal(folder)


def test_a_model_of_transformers_is_refused(folder: Path) -> None:
    assert "transformers' own model" in refusal(folder, evolve(SPEC, parameters=1))


def test_infinite_products_are_refused(folder: Path) -> None:
    spec = evolve(SPEC, dtype="float16")
    change_config(folder, lora_alpha=1e6)
    adapter = read_adapter(folder, SPEC, 16)
    with pytest.raises(AdapterError, match="infinite in float16"):
        place_adapter(adapter, spec, spec, SlotLayout.of(spec, 16))


def test_a_digest_is_of_what_is_computed(folder: Path) -> None:
    first = read_adapter(folder, SPEC, 16)
    assert first.rank == 4
    assert first.bytes == (folder / WEIGHTS).stat().st_size - header_bytes(folder)
    change_config(folder, lora_dropout=0.5, base_model_name_or_path="org/base")
    again = read_adapter(folder, SPEC, 16)
    assert again.digest == first.digest
    assert again.base_model == "org/base"
    change_config(folder, lora_alpha=9)
    assert read_adapter(folder, SPEC, 16).digest != first.digest
    change_config(folder, lora_alpha=8)
    change_tensors(folder, lora_A=lambda a: a + 1e-3)
    assert read_adapter(folder, SPEC, 16).digest != first.digest


def header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / WEIGHTS).read_bytes()[:8], "little")


@pytest.mark.parametrize(
    ("values", "scaling"),
    [
        ({}, 2.0),
        ({"lora_alpha": 16}, 4.0),
        ({"lora_alpha": 16, "use_rslora": True}, 8.0),
        ({"alpha_pattern": {"gate_proj": 2}}, 0.5),
        ({"alpha_pattern": {r"layers\.1\.mlp\.gate_proj": 2}}, 2.0),
        ({"alpha_pattern": {r"layers\.0\..*": 4, "gate_proj": 2}}, 1.0),
        ({"target_modules": "all-linear"}, 2.0),
        ({"target_modules": r".*\.layers\.\d+\.mlp\.(gate|up)_proj"}, 2.0),
        ({"r": 8, "rank_pattern": {"gate_proj": 4}}, 2.0),
    ],
    ids=str,
)
def test_factors_are_those_of_peft(
    folder: Path, values: dict[str, Any], scaling: float
) -> None:
    change_config(folder, **values)
    adapter = read_adapter(folder, SPEC, 16)
    assert adapter.matrices[f"model.layers.0.{MODULE}"].scaling == scaling


@pytest.mark.parametrize(
    ("values", "name", "is_target"),
    [
        ({"layers_to_transform": 3}, "model.layers.3.experts.0.gate_proj", True),
        ({"layers_to_transform": 0}, "model.layers.3.experts.0.gate_proj", False),
        (
            {"layers_to_transform": [3], "layers_pattern": "h"},
            "transformer.h.3.gate_proj",
            True,
        ),
        (
            {"layers_to_transform": [3], "layers_pattern": ["layers"]},
            "transformer.h.3.gate_proj",
            False,
        ),
        ({}, "gate_proj", True),
        ({}, "model.agate_proj", False),
        ({"exclude_modules": r".*layers\.3.*"}, "model.layers.3.gate_proj", False),
    ],
    ids=str,
)
def test_targets_are_those_of_peft(
    folder: Path, values: dict[str, Any], name: str, is_target: bool
) -> None:
    change_config(folder, **values)
    assert read_peft_config(folder).targets_module(name) is is_target


def test_a_pattern_without_end_is_refused_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PATTERN_SECONDS < 1
    monkeypatch.setattr(
        "minfer.effects.models.adapters.peft_config.PATTERN_SECONDS", 0.02
    )
    change_config(folder, target_modules=r"(.|.)*[^j]")
    assert "takes longer than" in refusal(folder)


def test_patterns_have_a_time_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "minfer.effects.models.adapters.peft_config"
    monkeypatch.setattr(f"{place}.MATCHING_SECONDS", 0.01)
    change_config(folder, rank_pattern={f"([a-z]+[0-9])*x{i}": 4 for i in range(1000)})
    assert "take longer than 0.01 s in all" in refusal(folder)
    change_config(folder, rank_pattern={}, target_modules="x" * (MAX_PATTERN_CHARS + 1))
    message = refusal(folder)
    assert f"has {MAX_PATTERN_CHARS + 1} characters" in message
    assert len(message) < 1000


def test_a_pattern_of_layers_must_find_a_number(folder: Path) -> None:
    change_config(folder, layers_to_transform=[0], layers_pattern=".*)|(?:x")
    assert "layers_pattern" in (message := refusal(folder))
    assert "does not find the number of a layer" in message


@pytest.mark.parametrize(
    "values",
    [
        {"peft_type": [LONG]},
        {LONG: 1},
        {"new": LONG},
        {"r": LONG},
    ],
    ids=["type", "name", "value", "number"],
)
def test_errors_are_short(folder: Path, values: dict[str, Any]) -> None:
    change_config(folder, **values)
    assert len(refusal(folder)) < 1000


@pytest.mark.parametrize(
    "name",
    [
        "layers." + "1" * 5000 + ".experts",  # more digits than Python converts
        ".layers.1." * 30_000,  # searched for a quarter of a minute
        "x" + ".base_layer" * 100_000,
    ],
    ids=["digits", "layers", "base_layer"],
)
def test_long_names_are_refused_at_once(folder: Path, name: str) -> None:
    halves = {f"{name}.lora_A.weight": (4, 8), f"{name}.lora_B.weight": (8, 4)}
    tensors = {half: torch.zeros(shape) for half, shape in halves.items()}
    save_file(tensors, folder / WEIGHTS)
    message = refusal(folder)
    assert "characters; at most 512 are read" in message
    assert len(message) < 1000


def test_more_tensors_than_the_model_takes_are_refused_unread(folder: Path) -> None:
    tensors = {f"x{i}.lora_A.weight": torch.zeros(1, 1) for i in range(2000)}
    save_file(tensors, folder / WEIGHTS)
    assert "has 2000 tensors, and this model takes at most" in refusal(folder)


def test_a_tensor_of_many_dimensions_is_refused(folder: Path) -> None:
    tensors = {f"{LAYER}.lora_A.weight": torch.ones([1] * 64)}
    save_file(tensors, folder / WEIGHTS)
    weights = (folder / WEIGHTS).read_bytes()[8:]
    ones = b"[" + b",".join([b"1"] * 500) + b"]"  # more than torch can have
    start, end = weights.index(b"[1"), weights.index(b"]") + 1
    header_end = weights.index(b"}}") + 2
    header = weights[:start] + ones + weights[end:header_end]
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / WEIGHTS).write_bytes(data)
    assert "must be a matrix" in (message := refusal(folder))
    assert len(message) < 1000


def test_a_slot_takes_what_is_planned() -> None:
    layout = SlotLayout.of(SPEC, 16)
    assert slot_bytes(SPEC, 16) == layout.elements * 4 + layout.parts * 4
    assert SlotLayout.of(SPEC, 17).rank == 32
