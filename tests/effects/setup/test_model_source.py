"""Settings that say where a model's files are, and that change what they say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minfer import LLM, ConfigError, RequestError, SamplingParams
from minfer.effects.models.checkpoint import hub
from minfer.effects.setup import folders, model_source
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.model_source import with_overrides
from minfer.effects.setup.prepare import prepare
from tests.effects.tiny_model import write_checkpoint

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 20, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    advice = {"temperature": 0.25, "top_k": 7}
    (path / "generation_config.json").write_text(json.dumps(advice))
    return path


def test_changes_of_a_config_are_merged(folder: Path) -> None:
    config = {"a": 1, "nested": {"b": 2, "c": 3}, "list": [1]}
    merged = with_overrides(config, {"a": 5, "nested": {"c": 4}, "list": [2], "new": 6})
    assert merged == {"a": 5, "nested": {"b": 2, "c": 4}, "list": [2], "new": 6}
    plain = prepare(EngineArgs(model=str(folder), **SMALL))
    overrides = {"max_position_embeddings": 77}
    other = prepare(EngineArgs(model=str(folder), hf_overrides=overrides, **SMALL))
    assert other.spec.max_position_embeddings == 77
    assert other.config.max_model_len == 77
    assert other.fingerprint != plain.fingerprint
    with pytest.raises(ConfigError, match="hf_overrides must be a mapping"):
        EngineArgs(hf_overrides="x")  # type: ignore[arg-type]  # the fault


def test_recommended_parameters_may_be_others(folder: Path, tmp_path: Path) -> None:
    def params(**settings: Any) -> dict[str, float]:
        args = EngineArgs(model=str(folder), **SMALL, **settings)
        return dict(prepare(args).default_params)

    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    assert params() == {"temperature": 0.25, "top_k": 7}
    assert params(generation_config="vllm") == {}
    assert params(generation_config=str(tmp_path)) == {"top_p": 0.5}
    own = {"temperature": 0.5, "min_p": 0.125}
    assert params(override_generation_config=own) == {**own, "top_k": 7}
    for settings, message in (
        ({"generation_config": str(tmp_path / "none")}, "there is no file"),
        ({"override_generation_config": {"x": 1}}, "'x' is not supported; it may set"),
        ({"override_generation_config": {"top_p": 5}}, "top_p: must be from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            params(**settings)


def test_a_tokenizer_may_be_another_folders(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with LLM(str(bare), tokenizer=str(folder), **SMALL) as llm:
        assert llm.get_tokenizer().encode("abc")
        assert llm.setup.tokenizer_folder == folder
    with pytest.raises(ConfigError, match="tokenizer_revision is of another tokenizer"):
        prepare(EngineArgs(model=str(folder), tokenizer_revision="x", **SMALL))


def test_a_revision_is_a_hub_checkpoints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[tuple[str, Any]] = []

    def snapshot(model: str, cache_dir: Any = None) -> Path:
        downloads.append((model, cache_dir))
        return folder

    monkeypatch.setattr(hub, "snapshot", snapshot)
    args = EngineArgs(
        model="org/name",
        revision="v2",
        tokenizer="org/other",
        tokenizer_revision="v3",
        download_dir=tmp_path,
        **SMALL,
    )
    prepare(args)
    assert downloads == [("org/name@v2", tmp_path), ("org/other@v3", tmp_path)]
    for model in (str(folder), None, "org/name@v1"):
        with pytest.raises(ConfigError, match="revision 'v2' is of a checkpoint on the"):
            prepare(EngineArgs(model=model, revision="v2", **SMALL))
    assert folders.model_folder(str(folder), tmp_path) == folder
    assert model_source.checkpoint_folder(EngineArgs(model=str(folder))) == folder


def test_a_request_has_at_most_so_many_log_probabilities(folder: Path) -> None:
    with LLM(str(folder), max_logprobs=2, **SMALL) as llm:
        (output,) = llm.generate("abc", SamplingParams(logprobs=2, max_tokens=1))
        assert output.outputs[0].logprobs is not None
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(RequestError, match=f"^{name}: must be at most 2 here"):
                llm.generate("abc", SamplingParams(max_tokens=1, **{name: 3}))  # type: ignore[arg-type]  # mypy takes it for any field
    with pytest.raises(ConfigError, match="max_logprobs must be a whole number from 0"):
        EngineArgs(max_logprobs=-1)
