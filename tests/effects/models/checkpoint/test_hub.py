"""Checkpoints by name: from a folder, from the hub's local cache, or a clear refusal."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils._paths import filter_repo_objects

from minfer.effects.cli.main import main
from minfer.effects.models.checkpoint.hub import HubError, is_id, snapshot
from minfer.effects.setup.folders import model_folder
from tests.effects.tiny_model import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, name: str = "org/tiny", revision: str = "main") -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text(COMMIT)
    return write_checkpoint(repository / "snapshots" / COMMIT)


def test_the_local_cache_serves_without_a_network(cache: Path) -> None:
    folder = put(cache)
    assert model_folder("org/tiny") == folder
    assert model_folder(f"org/tiny@{COMMIT}") == folder
    put(cache, "alone", "v1.0")
    assert model_folder("alone@v1.0").parent.parent.name == "models--alone"


def test_a_folder_here_comes_first(cache: Path, tmp_path: Path) -> None:
    put(cache)
    local = write_checkpoint(tmp_path / "org" / "tiny")
    assert model_folder("org/tiny").resolve() == local


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@v2", "tiny"])
def test_without_network_and_cache_the_remedy_is_named(name: str, cache: Path) -> None:
    del cache
    with pytest.raises(
        HubError, match=f"^model '{name}' .* connect to the network .* folder$"
    ):
        model_folder(name)


@pytest.mark.parametrize(
    "name",
    [
        "./tiny",
        "/tiny",
        "~/tiny",
        "a/b/c",
        "org/",
        "org/ti ny",
        "a@b@c d/",
        "a@",
        "a@../b",
    ],
)
def test_what_is_no_name_is_not_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert not is_id(name)
    with pytest.raises(ValueError, match="is not a folder; give the path"):
        model_folder(name)


class Response:
    """The least of an HTTP response that the errors want."""

    headers: dict[str, str] = {}  # noqa: RUF012 - read only
    status_code = 403
    request = None
    url = "nowhere"
    text = content = ""


def http(kind: Any) -> Exception:
    try:
        error: Exception = kind("refused", response=Response())
    except TypeError:
        error = kind("refused", Response())
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http(errors.GatedRepoError),
            r"is gated: ask for access at \S+/org/tiny, .*hf auth login",
        ),
        (
            http(errors.RepositoryNotFoundError),
            "neither a folder here nor a model on the hub",
        ),
        (http(errors.RevisionNotFoundError), "no revision 'v2' on the hub"),
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached: connect"),
        (errors.HFValidationError("two\nlines"), "nor a name of the hub: two lines"),
        (http(errors.HfHubHTTPError), r"cannot be downloaded \(.*refused.*\); try again"),
        (
            OSError(28, "No space left on device"),
            r"cannot be downloaded \(.*No space left",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_refusal_of_the_hub_is_one_line_with_a_remedy(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(HubError, match=message) as caught:
        snapshot("org/tiny@v2")
    assert "\n" not in str(caught.value)
    assert main(["plan", "--model", "org/tiny@v2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_only_data_is_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        arguments.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert snapshot("org/tiny@v2") == tmp_path
    assert (arguments["name"], arguments["revision"]) == ("org/tiny", "v2")
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "additional_chat_templates/tool_use.jinja",
        "modeling_own.py",
        "pytorch_model.bin",
        "model.pt",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "onnx/model.safetensors",
        "weights.pkl",
        "README.md",
    ]
    patterns = {key: arguments[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:7]
