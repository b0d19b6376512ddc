"""`minfer generate`: what it writes, and where to."""

import subprocess
import sys
from pathlib import Path

import pytest

from minfer.effects.cli import generate as cli
from minfer.effects.cli.main import main
from minfer.effects.live.engine import open_engine as opening
from minfer.records.messages import Failed
from minfer.simulation.oracle import Oracle
from tests.effects.tiny_model import write_checkpoint

SMALL = ["--block-size", "8", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]
MINFER = [sys.executable, "-m", "minfer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def generate(folder: Path, *options: str) -> int:
    return main(["generate", "--model", str(folder), *SMALL, *options])


def test_generate_writes_text_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "abc", "--max-tokens", "8", "--ignore-eos") == 0
    first = capsys.readouterr()
    assert first.err == ""
    assert len(first.out) > 1
    assert generate(folder, "abc", "--max-tokens", "8", "--ignore-eos") == 0
    assert capsys.readouterr().out == first.out  # the same seed
    assert (
        generate(folder, "abc", "--max-tokens", "8", "--ignore-eos", "--seed", "1") == 0
    )
    assert capsys.readouterr().out != first.out


def test_the_prompt_is_echoed_or_read_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: "xyz", raising=False)
    assert generate(folder, "-", "--max-tokens", "1", "--echo") == 0
    assert capsys.readouterr().out.startswith("xyz")


def test_a_terminal_is_reported_that_it_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.read", lambda: "xyz", raising=False)
    assert main(["generate", "-", "--dry-run", "--max-tokens", "1"]) == 0
    assert "reads the prompt from here; Ctrl-D" in capsys.readouterr().err


def test_nothing_from_standard_input_is_reported_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(opening, "open_executor", loaded)
    monkeypatch.setattr("sys.stdin.read", lambda: "", raising=False)
    assert main(["generate", "-"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing came from standard input; pipe a text into" in err
    assert err.count("\n") == 1


def test_the_prompt_is_echoed_before_each_sample(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = ("--dry-run", "--temperature", "0", "--max-tokens", "5", "--ignore-eos")
    assert generate(folder, "abc", "--n", "2", "--echo", *dry) == 0
    first, second = capsys.readouterr().out.split("--- sample 1 ---\n")
    assert first == "--- sample 0 ---\nabc This\n"
    assert second == "abc This\n"


def test_stop_strings_and_stop_ids(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "generate",
                "x",
                "--dry-run",
                "--model",
                str(folder),
                *SMALL,
                "--temperature",
                "0",
                "--max-tokens",
                "100",
                "--stop",
                "model",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == " This text was not written by a \n"
    stop_options = [word for i in range(256) for word in ("--stop-token-ids", str(i))]
    assert generate(folder, "x", *stop_options, "--ignore-eos") == 0


def test_max_tokens_of_zero_writes_all_that_fits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        generate(folder, "x", "--dry-run", "--max-tokens", "0", "--ignore-eos", "--stats")
        == 0
    )
    assert "output        255 tokens" in capsys.readouterr().err


def test_stats_go_to_standard_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "abc", "--max-tokens", "9", "--ignore-eos", "--stats") == 0
    err = capsys.readouterr().err
    for words in (
        "loading",
        "3 tokens, 0 of them cached",
        "9 tokens",
        "first token",
        "tokens/s",
    ):
        assert words in err


def test_a_failed_request_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Oracle):
        def collect(self) -> Failed:
            return self.fail("device error", halfway=False)

    monkeypatch.setattr(opening, "open_executor", lambda *_: Broken(8, 260))
    assert generate(folder, "abc") == 1
    assert (
        "minfer: the request failed: its step failed 3 times" in capsys.readouterr().err
    )


@pytest.mark.long
def test_the_bundled_model_writes() -> None:
    completed = subprocess.run(
        [*MINFER, "generate", "--num-gpu-blocks-override", "64"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.startswith(cli.PROMPT)  # which is echoed if none was given
    assert len(completed.stdout) > len(cli.PROMPT) + 1
    written = [line.strip() for line in completed.stdout.splitlines() if line.strip()]
    assert all(written.count(line) < 3 for line in written)  # it does not loop


def test_a_beam_search_writes_the_best(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "abc", "--max-tokens", "6", "--beams", "3") == 0
    best = capsys.readouterr().out
    two_samples = ("--max-tokens", "6", "--beams", "3", "--n", "2")
    assert generate(folder, "abc", *two_samples) == 0
    first, second = capsys.readouterr().out.split("\n--- sample 1 ---\n")
    assert first == "--- sample 0 ---\n" + best.removesuffix("\n")
    assert second.removesuffix("\n") != best.removesuffix("\n")


@pytest.mark.parametrize(
    "option",
    [
        "--temperature",
        "--top-k",
        "--repetition-penalty",
        "--stop-token-ids",
        "--min-tokens",
        "--allowed-token-ids",
        "--bad-words",
        "--regex",
    ],
)
def test_a_beam_search_draws_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert generate(folder, "abc", "--beams", "3", option, "1") != 0
    name = option.removeprefix("--").replace("-", "_")
    assert f"{name}: does not go with --beams" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--beams", "0"), "beam_width: must be from 1"),
        (("--length-penalty", "2"), "length_penalty: needs --beams"),
    ],
)
def test_what_makes_no_beam_search_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert generate(folder, "abc", *options) != 0
    assert message in capsys.readouterr().err


def test_a_dry_search_reads_out_the_passage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A beam goes on where its parent was, though each round is a request of its own."""
    options = ("--dry-run", "--beams", "2", "--max-tokens", "5", "--ignore-eos")
    assert generate(folder, "abc", *options) == 0
    assert capsys.readouterr().out == " This\n", "a byte a token, one after the other"
