"""What generation_config.json advises: it never stops a model, and users come first."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.models.json_files import CorruptFileError
from minfer.effects.setup.advice import NOT_APPLIED, recommended_params, unapplied_fields
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare, prepare_as_decided
from minfer.sampling.params import ADVISED
from tests.effects.tiny_model import write_checkpoint


def write(folder: Path, **advice: Any) -> Path:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(advice))
    return path


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ({}, {}),
        ({"do_sample": False}, {"temperature": 0}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.8},
            {"temperature": 0, "repetition_penalty": 1.8},
        ),
        ({"do_sample": False, "top_k": 20}, {"temperature": 0, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"top_k": 50.0, "top_p": 1, "min_p": None}, {"top_k": 50, "top_p": 1}),
        ({"top_k": 0, "temperature": 0.0}, {"top_k": 0, "temperature": 0.0}),
        ({"max_new_tokens": 9, "transformers_version": "4.1"}, {}),
    ],
)
def test_what_is_taken(
    tmp_path: Path,
    advice: dict[str, Any],
    expected: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = recommended_params(write(tmp_path, **advice))
    assert params == expected
    assert {n: type(v) for n, v in params.items()} == {
        n: type(v) for n, v in expected.items()
    }
    assert not caplog.messages


NUMBERS = (50.5, -9, 1e30, float("nan"), float("inf"), 10**400)
ODD: tuple[Any, ...] = (*NUMBERS, "0.9", "inf", True, [], {})


@pytest.mark.parametrize("value", ODD, ids=lambda value: f"{value!r:.9}")
@pytest.mark.parametrize("name", ADVISED)
def test_what_cannot_be_used_is_left_out_with_one_warning(
    tmp_path: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fits = name == "temperature" and value == 50.5
    path = write(tmp_path, **{name: value, "do_sample": True})
    assert recommended_params(path) == ({name: value} if fits else {})
    assert len(caplog.messages) == (not fits)
    for message in caplog.messages:
        assert f"{path}: left out what cannot be used: {name}: must be" in message


def test_one_warning_names_all_and_comes_once_for_a_deployment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    write(folder, top_p=0.0, repetition_penalty=7, top_k=50.0, temperature=0.5)
    args = EngineArgs(model=str(folder), device="cpu")
    setup = prepare(args)
    prepare_as_decided(args, "cpu", setup.memory.num_blocks)
    (emitted,) = caplog.messages
    assert "top_p: must be above 0" in emitted
    assert "repetition_penalty: must be from 0 to 2, not 7" in emitted
    assert caplog.records[0].levelno == logging.WARNING
    assert setup.default_params == {"top_k": 50, "temperature": 0.5}
    requested = setup.default_sampling_params(top_p=0.4, top_k=3)
    assert (requested.top_p, requested.top_k, requested.temperature) == (0.4, 3, 0.5)


def test_a_file_that_is_not_json_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert recommended_params(path) == {}
    path.write_text("{")
    with pytest.raises(CorruptFileError, match="JSON"):
        recommended_params(path)


def test_fields_that_change_texts_elsewhere_are_named(tmp_path: Path) -> None:
    idle = {name: values[0] for name, values in NOT_APPLIED.items() if values}
    assert unapplied_fields(write(tmp_path, **idle, top_k=3)) == []
    assert unapplied_fields(write(tmp_path, no_repeat_ngram_size=3)) == [
        "no_repeat_ngram_size"
    ]
