"""The draft model that settings ask for, and that it goes with its target."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.models.layout.shapes import kv_bytes_per_token, weight_bytes
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.memory import describe
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError

DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The bundled draft, to be changed."""
    folder = tmp_path / "draft"
    shutil.copytree(bundled_folder("draft"), folder)
    return folder


def settings(**changes: Any) -> EngineArgs:
    return EngineArgs(speculative_config={**DRAFT_MODEL, **changes})


def test_the_bundled_model_has_a_draft_that_counts_among_what_memory_holds() -> None:
    plain, drafting = prepare(EngineArgs(), limit=10**9), prepare(settings(), limit=10**9)
    assert plain.draft is None
    assert drafting.draft is not None
    draft = drafting.draft.spec
    assert drafting.draft.folder == bundled_folder("draft")
    added_bytes = drafting.memory.weights - plain.memory.weights
    assert added_bytes == drafting.memory.draft_weights == weight_bytes(draft, cuda=False)
    added_bytes = drafting.memory.block_bytes - plain.memory.block_bytes
    assert added_bytes == kv_bytes_per_token(draft) * drafting.config.block_size
    assert "draft model's" in describe(drafting.memory, "bundled")
    assert "draft model's" not in describe(plain.memory, "bundled")


def test_another_draft_has_the_targets_type(copied: Path) -> None:
    args = evolve(settings(model=str(copied)), dtype="float32")
    draft = prepare(args, limit=10**9).draft
    assert draft is not None
    assert (draft.folder, draft.spec.dtype) == (copied, "float32")


def test_padding_may_differ(copied: Path) -> None:
    config = copied / "config.json"
    record = json.loads(config.read_text())
    record["vocab_size"] += 64
    config.write_text(json.dumps(record))
    # Another spelling of the same tokenizer.
    tokenizer = copied / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=1))
    assert prepare(settings(model=str(copied)), limit=10**9).draft is not None


@pytest.mark.parametrize("changed_part", ["model", "added"])
def test_another_tokenizer_is_reported_with_the_token_that_differs(
    copied: Path, changed_part: str
) -> None:
    tokenizer = copied / "tokenizer.json"
    record = json.loads(tokenizer.read_text())
    if changed_part == "model":
        vocab = record["model"]["vocab"]
        first, second = list(vocab)[300:302]
        vocab[first], vocab[second] = vocab[second], vocab[first]
    else:
        record["added_tokens"][0]["content"] += "x"
    tokenizer.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*token \d+ is"):
        prepare(settings(model=str(copied)), limit=10**9)


def test_a_tokenizer_may_leave_out_that_it_has_no_added_tokens(copied: Path) -> None:
    target = copied.parent / "target"
    shutil.copytree(bundled_folder(), target)
    record = json.loads((copied / "tokenizer.json").read_text())
    record["added_tokens"] = []
    (target / "tokenizer.json").write_text(json.dumps(record))
    del record["added_tokens"]
    (copied / "tokenizer.json").write_text(json.dumps(record))
    args = evolve(settings(model=str(copied)), model=str(target))
    assert prepare(args, limit=10**9).draft is not None


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"model": {"vocab": 7}}', "[]", "[" * 100_000]
)
def test_a_tokenizer_that_cannot_be_read_is_reported(copied: Path, text: str) -> None:
    (copied / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer.json: no tokenizer can be read"):
        prepare(settings(model=str(copied)), limit=10**9)


def test_a_draft_without_a_tokenizer_goes_with_a_target_without(
    copied: Path, tmp_path: Path
) -> None:
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"one of them has no tokenizer.json"):
        prepare(settings(model=str(copied)), limit=10**9)
    target = tmp_path / "target"
    shutil.copytree(bundled_folder(), target)
    (target / "tokenizer.json").unlink()
    args = evolve(settings(model=str(copied)), model=str(target))
    assert prepare(args, limit=10**9).draft is not None


def test_a_draft_of_a_shorter_context_is_reported(copied: Path) -> None:
    config = copied / "config.json"
    record = json.loads(config.read_text())
    record["max_position_embeddings"] = 100
    config.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"was made for 100 tokens.*--max-model-len"):
        prepare(settings(model=str(copied)), limit=10**9)
    fits = evolve(settings(model=str(copied)), max_model_len=100)
    assert prepare(fits, limit=10**9).draft is not None


def test_a_draft_of_a_family_that_is_not_here_is_reported(copied: Path) -> None:
    config = copied / "config.json"
    record = json.loads(config.read_text())
    record["architectures"] = ["MambaForCausalLM"]
    record["model_type"] = "mamba"
    config.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="speculative_config: as a draft model"):
        prepare(settings(model=str(copied)), limit=10**9)


@pytest.mark.parametrize("config", [None, "{", '{"vocab_size": -1}'])
def test_a_draft_that_cannot_be_read_is_reported_from_its_target(
    copied: Path, config: str | None
) -> None:
    (copied / "config.json").unlink()
    if config is not None:
        (copied / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"config: as a draft model: .*config.json"):
        prepare(settings(model=str(copied)), limit=10**9)


@pytest.mark.parametrize("name", ["no/such/draft", "x" * 5000])
def test_a_draft_that_is_nowhere_is_reported_from_its_target(name: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config: as a draft model: model"):
        prepare(settings(model=f"./{name}"), limit=10**9)


def test_another_target_needs_a_draft_by_name(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(bundled_folder(), target)
    args = evolve(settings(), model=str(target))
    with pytest.raises(ConfigError, match="draft_model needs a model: the path"):
        prepare(args, limit=10**9)


def test_a_window_of_the_draft_is_within_the_targets(copied: Path) -> None:
    config = copied / "config.json"
    record = json.loads(config.read_text())
    size = {"sliding_window": 100, "use_sliding_window": True}
    kinds = ["sliding_attention"] + ["full_attention"] * (record["num_hidden_layers"] - 1)
    config.write_text(json.dumps({**record, **size, "layer_types": kinds}))
    args = settings(model=str(copied))
    draft = prepare(evolve(args, attention_window=128), limit=10**9).draft
    assert draft is not None
    assert set(draft.spec.windows) <= {100, 128}
    with pytest.raises(
        ConfigError, match=r"draft model .* last 100 .*attention_window 64"
    ):
        prepare(evolve(args, attention_window=64), limit=10**9)
