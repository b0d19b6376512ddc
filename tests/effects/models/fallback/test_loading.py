"""Loading is strict: damage is named, and nothing is executed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.checkpoint.checkpoint import (
    CorruptFileError,
    TensorMismatchError,
    read_config,
)
from minfer.effects.models.config_reader import (
    CheckpointError,
    ModelConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.fallback import fallback_spec, load_fallback, loading


def copied(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def load(folder: Path) -> Model:
    config = read_config(folder)
    return load_fallback(folder, config, fallback_spec(config), make_cache)


NORM = "gpt_neox.final_layer_norm.weight"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda t: t.pop(NORM), TensorMismatchError, f"missing tensor {NORM}"),
        (
            lambda t: t.update(extra=t[NORM].clone()),
            TensorMismatchError,
            "unexpected tensor extra",
        ),
        (
            lambda t: t.update({NORM: t[NORM][:-1].clone()}),
            TensorMismatchError,
            "do not fit",
        ),
        (lambda t: t[NORM].fill_(torch.nan), CheckpointError, "not finite"),
    ],
)
def test_damaged_weights_are_named(
    change: Any, kind: type[Exception], message: str, neox: Path, tmp_path: Path
) -> None:
    folder = copied(neox, tmp_path, change)
    with pytest.raises(kind, match=message):
        load(folder)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_config_of_which_no_model_can_be_made_is_named(
    neox: Path, seed: int | None
) -> None:
    config = {**read_config(neox), "hidden_act": "nothing"}
    spec = fallback_spec(read_config(neox))
    with pytest.raises(ModelConfigError, match=r"cannot be made .*KeyError\('nothing'\)"):
        load_fallback(neox, config, spec, make_cache, seed)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, OSError])
def test_a_shortage_of_the_machine_is_not_blamed_on_the_config(
    neox: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("no room")

    monkeypatch.setattr(loading, "_from_files", fail)
    with pytest.raises(error, match="no room"):
        load(neox)


def test_an_adapter_that_transformers_would_use_is_named(
    neox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(neox, tmp_path, lambda _: None)
    (folder / "adapter_config.json").write_text("{}")
    load(folder)
    monkeypatch.setattr(loading, "is_peft_available", lambda: True)
    with pytest.raises(UnsupportedModelError, match=r"\(adapter_config.json\) beside"):
        load(folder)


@pytest.mark.long
def test_truncated_and_pickled_weights_are_refused(neox: Path, tmp_path: Path) -> None:
    folder = copied(neox, tmp_path, lambda _: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(CorruptFileError, match="truncated or corrupt"):
        load(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickled weights can execute code"):
        load(folder)


def test_code_beside_a_checkpoint_is_not_executed(neox: Path, tmp_path: Path) -> None:
    folder, proof = copied(neox, tmp_path, lambda _: None), tmp_path / "executed"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(proof)!r}, 'w')\n")
    load(folder)
    assert not proof.exists()


@pytest.mark.long
def test_random_weights_come_only_from_the_seed(neox: Path) -> None:
    spec, state = fallback_spec(read_config(neox)), torch.random.get_rng_state()
    batch = make_batch([BatchRow([5, 6, 7], 0, [0])], 4)
    models = [
        load_fallback(neox, read_config(neox), spec, make_cache, seed)
        for seed in (1, 1, 2)
    ]
    logits = [model(batch, make_cache(spec, 1, 4)) for model in models]
    assert logits[0].equal(logits[1])
    assert not logits[0].equal(logits[2])
    assert torch.random.get_rng_state().equal(state)
