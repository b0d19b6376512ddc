"""`minfer serve`: its options; what it serves is tested beside the server."""

import subprocess
import sys
from typing import Any

import pytest

import minfer
from minfer.effects.cli.main import main, parser
from minfer.effects.cli.serve import unused_options
from minfer.effects.live.input_processing.template_settings import parsers_of
from minfer.effects.serving.processes import server
from minfer.effects.text.tools.formats import Parsers
from minfer.values.checks import ConfigError


def test_serve_takes_its_model_as_vllm_does() -> None:
    options = parser().parse_args(["serve", "org/name", "--port", "0"])
    assert options.model == "org/name"
    assert parser().parse_args(["serve", "--model", "x"]).model == "x"
    assert parser().parse_args(["serve"]).model is None


def server_options(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Any]:
    """The options with which a server would start."""
    namespaces: list[Any] = []

    def read_options(namespace: Any) -> Any:
        namespaces.append(namespace)
        raise ConfigError("enough is known")

    monkeypatch.setattr(server, "read_options", read_options)
    assert main(["serve", *options]) == 2
    return namespaces


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("fair", 16 * 256, [""])),
        (["--max-num-seqs", "8"], ("fair", 16 * 8, [""])),
        (
            ["--max-waiting", "5", "--scheduling-policy", "fcfs", "--api-key", "k"],
            ("fcfs", 5, ["k"]),
        ),
        (["--api-key", "a", "--api-key", "b"], ("fair", 16 * 256, ["a", "b"])),
    ],
)
def test_a_servers_defaults_are_not_a_librarys(
    monkeypatch: pytest.MonkeyPatch, options: list[str], expected: tuple[Any, ...]
) -> None:
    monkeypatch.delenv("MINFER_API_KEY", raising=False)
    namespaces = server_options(monkeypatch, *options)
    (namespace,) = namespaces
    assert (
        namespace.scheduling_policy,
        namespace.max_waiting,
        namespace.api_key,
    ) == expected


def test_the_first_line_comes_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server_options(monkeypatch)
    toy, error = capsys.readouterr().err.splitlines()
    assert toy.startswith(
        f"minfer {minfer.__version__}: loading the bundled model, a toy"
    )
    assert error == "minfer: enough is known"
    server_options(monkeypatch, "org/name")
    assert capsys.readouterr().err.splitlines()[0].endswith(": loading org/name")


@pytest.mark.long
def test_the_first_line_waits_for_no_library() -> None:
    code = """
import sys
for name in ("uvicorn", "starlette", "torch", "tokenizers"):
    sys.modules[name] = None  # to import it is an error
from minfer.effects.cli.main import main
main(["serve"])
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert completed.stderr.splitlines()[0].startswith("minfer ")
    assert ": loading " in completed.stderr.splitlines()[0]
    assert "ModuleNotFoundError" in completed.stderr


def test_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_API_KEY", "secret")
    namespaces = server_options(monkeypatch)
    assert namespaces[0].api_key == ["secret"]


def test_parsers_are_named_or_found(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tool-parser", "mistral", "--dry-run", "--api-key", "k"]
    options = parser().parse_args(["serve", *words, "--max-waiting", "5"])
    args, _ = server.read_options(options)
    assert parsers_of(args) == Parsers("mistral", "auto")
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--reasoning-parser", "x"])
    assert "'think'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", ""),
        ("--uds /a --host 0.0.0.0", "--host and --port"),
        ("--uds /a --port 1", "--host and --port"),
        ("--host 0.0.0.0 --port 1", ""),
        ("--routing least_loaded", "--routing"),
        ("--routing least_loaded --replicas 2", ""),
        ("--routing least_loaded --prefill 1 --decode 1", ""),
    ],
)
def test_options_without_effect_are_named(options: str, named: str) -> None:
    notes = unused_options(parser().parse_args(["serve", *options.split()]))
    assert [note.partition(" ha")[0] for note in notes] == ([named] if named else [])


@pytest.mark.parametrize("option", ["--api-key", "--served-model-name"])
def test_what_is_empty_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", option, "x", f"{option}="]) == 2
    assert f"{option} is empty; give a text" in capsys.readouterr().err
