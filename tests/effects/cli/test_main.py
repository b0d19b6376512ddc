"""The command line: text on standard output, one clear line on standard error, exit
codes.
"""

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import minfer
from minfer.effects.cli.commands import Entry
from minfer.effects.cli.main import COMMANDS, main
from minfer.effects.live.engine import open_engine as opening
from tests.effects.cli.test_generate import MINFER, SMALL, generate
from tests.effects.cli.test_generate import folder as folder
from tests.effects.tiny_model import write_checkpoint

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "starlette",
    "uvicorn",
    "pydantic",
}
ROOT = Path(__file__).resolve().parents[3]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; returns the only line on standard error."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minfer: ")
    assert err.count("\n") == 1
    return err


# --- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--target", "sm_90"], ["--help"]])
def test_commands_that_were_removed_are_refused_by_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "compile", *arguments)
    assert message.startswith("minfer: compile was removed: serve compiles what it needs")


@pytest.mark.parametrize("arguments", [[], ["serve", "--seed", "x"], ["--help"]])
def test_bench_names_other_programs_with_the_commands_that_the_readme_has(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minfer: bench was removed: use GuideLLM, aiperf or vLLM's ")
    commands = [" ".join(paragraph.split()) for paragraph in err.split("\n\n")[1:]]
    readme = (ROOT / "effects" / "cli" / "README.md").read_text("utf-8")
    words = " ".join(readme.split())
    programs = ("guidellm run ", "aiperf profile ", "vllm bench serve ")
    for program, command in zip(programs, commands, strict=True):
        assert command.startswith(program)
        assert command in words


@pytest.mark.parametrize(
    "before", [["--policies", "mine"], ["--policies=mine"], ["--pol", "compile"]]
)
def test_they_are_known_behind_options_of_all_commands(
    before: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *before, "compile").startswith("minfer: compile was removed:")


def test_a_module_may_be_named_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--policies", "compile", "plan"])
    assert "compile cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--max-tokens", "many"],
        ["plan", "--memory", "lots"],
        ["generate", "--load-format", "pickle"],
        ["plan", "--unknown"],
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("minfer: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([""], "the prompt is empty; give at least one token"),
        (
            ["a" * 300],
            "the prompt has 300 tokens; this model's maximum context length is 256",
        ),
        (["a", "--temperature", "nan"], "temperature: must be from 0 to 100, not nan"),
        (["a", "--top-p", "2"], "top_p: must be from 0 to 1"),
        (["a", "--n", "0"], "n: must be from 1"),
        (["a", "--max-tokens", "-1"], "max_tokens: must be from 1"),
        (
            ["a", "--stop-token-ids", "999"],
            "stop_token_ids: 999 is outside the vocabulary",
        ),
        (["a", "--dtype", "int3"], "dtype must be one of auto"),
        (["a", "--block-size", "0"], "block_size must be a whole number from 1"),
        (["a", "--max-model-len", "1000"], "longer than the 256 tokens"),
        (["a", "--num-gpu-blocks-override", "2"], "use --max-model-len 17"),
        (
            ["a", "--gpu-memory-utilization", "nan"],
            "gpu_memory_utilization must be above 0",
        ),
    ],
)
def test_bad_requests_and_settings_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    err = refused(capsys, "generate", "--model", str(folder), *SMALL, *options)
    assert message in err


def damaged(folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "extra":
        tensors["model.surprise.weight"] = torch.ones(2)
    elif damage == "misshapen":
        tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, weights)
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "corrupt":
        weights.write_bytes(b"\xff" * 500)
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "bad tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "bad config":
        (folder / "config.json").write_text("{")
    elif damage == "architecture":
        text = (folder / "config.json").read_text().replace("Qwen2For", "MambaFor")
        (folder / "config.json").write_text(text.replace('"qwen2"', '"mamba"'))


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        ("missing", ["missing tensor model.norm.weight", "incomplete"]),
        ("extra", ["unexpected tensor model.surprise.weight", "model.safetensors"]),
        ("misshapen", ["model.norm.weight has shape [5], expected [32]", "config.json"]),
        ("truncated", ["model.safetensors", "download it again"]),
        ("corrupt", ["model.safetensors", "download it again"]),
        ("no weights", ["model.safetensors: not found", "--load-format dummy"]),
        ("no tokenizer", ["tokenizer.json: not found", "save_pretrained"]),
        ("bad tokenizer", ["tokenizer.json", "corrupt"]),
        ("no config", ["config.json: not found"]),
        ("bad config", ["config.json", "download it again"]),
        ("architecture", ["MambaForCausalLM", "not supported"]),
    ],
)
def test_a_damaged_checkpoint_is_named_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, names: list[str]
) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    damaged(folder, damage)
    err = refused(capsys, "generate", "a", "--model", str(folder), *SMALL)
    for name in names:
        assert name in err


def test_a_model_that_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "plan", "--model", "./Qwen/Qwen2.5-0.5B")
    assert "'./Qwen/Qwen2.5-0.5B' is not a folder; give the path" in err


def test_an_interrupt_while_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "open_executor", interrupted)
    assert generate(folder, "a") == 130


# --- as a process -----------------------------------------------------------------------


def endless(folder: Path) -> list[str]:
    write_checkpoint(folder, max_position_embeddings=100_000)
    options = [
        "--num-gpu-blocks-override",
        "2000",
        "--max-num-seqs",
        "1",
        "--temperature",
        "1",
    ]
    return [
        *MINFER,
        "generate",
        "a",
        "--model",
        str(folder),
        "--max-tokens",
        "0",
        "--ignore-eos",
        *options,
    ]


@pytest.mark.long
def test_ctrl_c_ends_it_quietly_with_130(tmp_path: Path) -> None:
    with subprocess.Popen(
        endless(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(50)  # it has started to write
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b""


@pytest.mark.long
def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    with subprocess.Popen(
        endless(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.wait(timeout=30)
    assert process.returncode == 141


@pytest.mark.long
def test_version_and_help_are_complete() -> None:
    completed = subprocess.run(
        [*MINFER, "--version"], capture_output=True, text=True, check=True
    )
    assert completed.stdout == f"minfer {minfer.__version__}\n"
    for command in ("generate", "plan"):
        shown = helped(command)
        for option in (
            "--model",
            "--dtype",
            "--max-model-len",
            "--kv-cache-memory-bytes",
        ):
            assert option in shown


def helped(*command: str) -> str:
    """What `minfer COMMAND --help-all` says, where nothing heavy may be imported."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(HEAVY)}))\n"
        "from minfer.effects.cli.main import main\n"
        f"main([*{command!r}, '--help-all'])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return completed.stdout


@pytest.mark.long
@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_command_says_what_it_does_without_anything_heavy(entry: Entry) -> None:
    command: Any = import_module(entry.module)
    shown = " ".join(helped(entry.name).split())
    assert shown.startswith(f"usage: minfer {entry.name} ")
    assert " ".join(command.DESCRIPTION.split()) in shown
    assert "--policies MODULE" in shown


@pytest.mark.long
def test_commands_are_imported_only_when_they_are_meant() -> None:
    code = (
        "import sys\nfrom minfer.effects.cli.main import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in sys.modules if name.startswith('minfer.effects.cli.')))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(completed.stdout.splitlines()[-1].split())
    assert {entry.module for entry in COMMANDS} & loaded == {"minfer.effects.cli.plan"}
