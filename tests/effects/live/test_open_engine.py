"""What the settings open: an executor, and a journal that says what it was made with."""

import platform
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.execution.device.device_rows import SamplingNeeds
from minfer.effects.execution.dry_executor import DryExecutor
from minfer.effects.execution.warming.start_progress import WEIGHTS, StartProgress
from minfer.effects.execution.warming.warm_up import Readiness
from minfer.effects.live.engine.open_engine import open_executor, open_journal
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import NotEnoughMemoryError
from minfer.effects.setup.prepare import Setup, prepare
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.state import initial
from minfer.simulation.oracle import Oracle
from minfer.values.checks import ConfigError


def prepared(folder: str, **settings: Any) -> Setup:
    small: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 8}
    return prepare(EngineArgs(model=folder, **small, **settings))


def test_the_executor_that_was_requested(folder: str) -> None:
    kinds = {"oracle": "Oracle", "dry": "DryExecutor", "torch": "TorchExecutor"}
    for name, kind in kinds.items():
        executor = open_executor(prepared(folder, executor=name), None)
        assert type(executor).__name__ == kind
        executor.close()


def test_what_computes_nothing_knows_the_models_sizes(folder: str) -> None:
    setup = prepared(folder, executor="oracle")
    oracle = open_executor(setup, None)
    assert isinstance(oracle, Oracle)
    assert oracle.vocab == setup.spec.vocab_size
    dry = open_executor(prepared(folder, executor="dry"), Tokenizer(Path(folder)))
    assert isinstance(dry, DryExecutor)


def test_weights_that_are_missing_are_named_unless_they_are_made_up(
    folder: str, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(Path(folder, name).read_bytes())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        open_executor(prepared(str(tmp_path)), None)
    open_executor(prepared(str(tmp_path), load_format="dummy"), None).close()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "minfer.effects.models.checkpoint.checkpoint.load_weights",
            "weights of .* do not fit",
        ),
        (
            "minfer.effects.execution.torch_executor.TorchExecutor",
            "64 KV blocks .* cannot be had: no room; ask for a smaller KV cache",
        ),
    ],
)
def test_memory_that_there_is_not_is_reported(
    folder: str, monkeypatch: pytest.MonkeyPatch, target: str, says: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(target, full)
    with pytest.raises(NotEnoughMemoryError, match=says):
        open_executor(prepared(folder), None)


def test_its_progress_is_reported(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[StartProgress]()
    open_executor(prepared(folder), None, reported.append).close()
    assert reported == [StartProgress(WEIGHTS, 0, 1), StartProgress(WEIGHTS, 1, 1)]
    readied = list[Readiness]()

    def executor(*_: object, readiness: Readiness, **__: object) -> None:
        readied.append(readiness)

    target = "minfer.effects.execution.torch_executor.TorchExecutor"
    monkeypatch.setattr(target, executor)
    setup = prepared(folder)
    for advice, filtered in (({}, False), ({"temperature": 0.7, "top_p": 0.8}, True)):
        open_executor(evolve(setup, default_params=advice), None, reported.append)
        assert readied[-1].likely == SamplingNeeds(filtered=filtered, scored=False)
        assert readied[-1].report == reported.append


@pytest.mark.parametrize(
    ("config", "has_fewer"),
    [
        (None, False),
        ({"method": "ngram", "adaptive": False}, True),
        ({"method": "draft_model", "adaptive": False}, False),
        ({"method": "draft_model"}, True),
    ],
)
def test_an_executor_foresees_that_rows_have_fewer_drafts(
    folder: str, monkeypatch: pytest.MonkeyPatch, config: Any, has_fewer: bool
) -> None:
    """It is opened before costs are known, when the engine's own settings do not say yet
    that rows have as many as pay.
    """
    readied = list[Readiness]()

    def executor(*_: object, readiness: Readiness, **__: object) -> None:
        readied.append(readiness)

    target = "minfer.effects.execution.torch_executor.TorchExecutor"
    monkeypatch.setattr(target, executor)
    if config and config["method"] == "draft_model":
        config = {**config, "model": folder}
    open_executor(prepared(folder, speculative_config=config), None)
    assert readied[-1].fewer_drafts == has_fewer


def test_without_a_folder_there_is_no_journal(folder: str) -> None:
    setup = prepared(folder, executor="oracle")
    assert open_journal(setup, open_executor(setup, None)) is None


@pytest.mark.parametrize("executor", ["oracle", "torch"])
def test_a_journal_says_what_it_was_made_with(
    folder: str, tmp_path: Path, executor: str
) -> None:
    setup = prepared(folder, executor=executor, journal=tmp_path, seed=3)
    opened = open_executor(setup, None)
    writer = open_journal(setup, opened)
    assert writer is not None
    writer.close(initial(setup.config))
    opened.close()
    details = read_journal(tmp_path).about
    assert details["model"] == folder
    assert details["executor"] == executor
    assert (details["dtype"], details["seed"], details["eager"]) == ("float32", 3, False)
    assert details["fingerprint"] == setup.fingerprint.hex()
    versions = details["versions"]
    assert versions["python"] == platform.python_version()
    assert ("torch" in versions) == (executor == "torch")
    assert details["kernels"] == {}  # there are none on the CPU


def test_a_folder_that_cannot_be_written_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    setup = prepared(folder, executor="oracle", journal=tmp_path / "file")
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        open_journal(setup, open_executor(setup, None))
