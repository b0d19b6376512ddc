"""Where minfer differs on purpose, `verify` says so, and else it says nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.cli.verify.known_differences import DIFFERENCES, list_differences
from tests.effects.tiny_model import CONFIG, write_checkpoint


def differences(folder: Path) -> list[str]:
    checks = [*list_differences(folder)]
    assert {(check.name, check.state) for check in checks} <= {("on purpose", "note")}
    return [check.figures for check in checks]


def test_a_plain_checkpoint_differs_in_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    assert differences(folder) == []
    advice = {"do_sample": True, "eos_token_id": CONFIG["eos_token_id"], "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    assert differences(folder) == []


@pytest.mark.parametrize(
    ("file", "change", "begins"),
    [
        (
            "generation_config.json",
            {"do_sample": True, "no_repeat_ngram_size": 3, "num_beams": 1},
            "no_repeat_ngram_size: are not applied",
        ),
        (
            "generation_config.json",
            {"do_sample": True, "top_p": 0.0, "top_k": 50.0},
            "top_p: are out of range",
        ),
        ("generation_config.json", {"top_k": 3}, "do_sample: is absent"),
        (
            "generation_config.json",
            {"do_sample": False, "eos_token_id": [3.0]},
            "256: end a sequence too",
        ),
        ("config.json", {**CONFIG, "hidden_size": 32.0}, "hidden_size: are floats"),
        (
            "tokenizer_config.json",
            {"fix_mistral_regex": True, "eos_token": "<|end|>"},
            "fix_mistral_regex: is",
        ),
        (
            "tokenizer_config.json",
            {"eos_token": "a"},
            "64: end a sequence too",
        ),
    ],
)
def test_what_a_file_has_is_named(
    tmp_path: Path, file: str, change: dict[str, Any], begins: str
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / file).write_text(json.dumps(change))
    (difference,) = differences(folder)
    assert difference.startswith(begins)


def test_spaces_that_are_not_cleaned_up(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    name = "clean_up_tokenization_spaces"
    config = {name: True, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert differences(folder) == []  # it does nothing to byte-pair encoding
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    state["added_tokens"] = []
    path.write_text(json.dumps(state))
    assert name in [text.partition(":")[0] for text in differences(folder)]


def test_every_row_has_a_reason() -> None:
    assert all(row.what and row.reason for row in DIFFERENCES)
