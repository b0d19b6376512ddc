"""`minfer chat` through pipes; test_keyboard.py has it at a terminal."""

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minfer import LLM
from minfer.effects.cli.main import main
from minfer.effects.live.engine import open_engine as opening
from minfer.records.messages import Failed
from minfer.simulation.oracle import Oracle
from tests.effects.tiny_model import write_checkpoint

# One token a byte, so lengths can be counted: a turn adds "<role>" and its content.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHOOSY = (
    TEMPLATE
    + "{% if 'boo' in messages[-1].content %}{{ raise_exception('No!') }}{% endif %}"
)
DRY_TEXT = " This text was not written by a model. The engine"  # the dry executor's
DRY = ["chat", "--dry-run", "--temperature", "0", "--ignore-eos"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_checkpoint(
        tmp_path_factory.mktemp("tiny"), max_position_embeddings=100_000
    )
    (path / "chat_template.jinja").write_text(CHOOSY)
    return str(path)


def prompts(err: str) -> list[int]:
    """How many tokens each prompt had, from --stats."""
    return [int(number) for number in re.findall(r"prompt +(\d+) tokens", err)]


# --- through pipes ----------------------------------------------------------------------


@pytest.fixture
def piped(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Piped":
    return Piped(folder, monkeypatch, capsys)


class Piped:
    """Runs `minfer chat` on an input; returns exit code, output and errors."""

    def __init__(
        self,
        folder: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys

    def __call__(self, text: str | bytes, *options: str) -> tuple[int, str, str]:
        raw = text.encode() if isinstance(text, str) else text
        stdin = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")
        self.monkeypatch.setattr("sys.stdin", stdin)
        code = main([*DRY, "--model", self.folder, "--max-tokens", "5", *options])
        return code, *self.capsys.readouterr()


def test_each_line_is_a_message_and_the_conversation_grows(piped: Piped) -> None:
    code, out, err = piped("hi\n\n  \nyou\r\nlast line without end", "--stats")
    assert (code, out) == (0, f"{DRY_TEXT[:5]}\n" * 3)
    first = len("<user>hi")
    second = first + len("<assistant>") + 5 + len("<user>you")
    assert prompts(err) == [
        first,
        second,
        second + 11 + 5 + len("<user>last line without end"),
    ]
    assert "loading" not in err


def test_the_answer_is_all_that_is_written(piped: Piped) -> None:
    assert piped("hi\n") == (0, f"{DRY_TEXT[:5]}\n", "")
    assert piped("") == (0, "", "")


def test_a_system_message_comes_first_and_stays(piped: Piped) -> None:
    _, _, err = piped("a\n/clear\na\n", "--system", "Be brief.", "--stats")
    assert prompts(err) == [len("<system>Be brief.<user>a")] * 2


def test_commands(piped: Piped) -> None:
    text = (
        "aa\n/undo\nbb\nc\n/undo\n/undo\n/undo\ndd\n/help\n/what now\n "
        "/help\n/quit\nnever\n"
    )
    code, out, err = piped(text, "--stats")
    assert code == 0
    length = len("<user>aa")
    assert prompts(err)[:2] == [length, length]
    assert prompts(err)[3] == length
    assert prompts(err)[4] == length + 16 + len("<user> /help")
    assert out == f"{DRY_TEXT[:5]}\n" * 5
    assert "no command '/what'; /help lists them" in err
    for name in ("/clear", "/undo", "/quit"):
        assert f"\n{name} " in err


def test_a_message_that_fails_is_taken_back_and_the_rest_goes_on(piped: Piped) -> None:
    text = b"hi\nboo\n\xff\xfe\n" + b"x" * 9000 + b"\nyou\n"
    code, out, err = piped(text, "--max-model-len", "100", "--stats")
    assert code == 1
    assert out == f"{DRY_TEXT[:5]}\n" * 2
    messages = [line for line in err.splitlines() if line.startswith("minfer: ")]
    assert len(messages) == 3
    assert "the chat template failed: No!" in messages[0]
    assert "lone surrogate" in messages[1]
    assert "the text has 9030 characters; this model's maximum context" in messages[2]
    assert "/clear" not in messages[2]  # it has no room in a new conversation either
    assert prompts(err) == [8, 8 + 16 + len("<user>you")]


def test_a_first_message_that_is_too_long(piped: Piped) -> None:
    code, out, err = piped("x" * 9000, "--max-model-len", "100")
    assert (code, out) == (1, "")
    assert "the text has 9006 characters; this model's maximum context" in err
    assert "/undo" not in err


def test_a_full_context_is_reported_and_can_be_cleared(piped: Piped) -> None:
    text = "x" * 80 + "\n" + "y" * 10 + "\nz\n/clear\nhi\n"
    code, out, err = piped(text, "--max-model-len", "100", "--max-tokens", "0")
    full = (
        "minfer: the context is full; /undo takes the last exchange back, /clear starts "
        "anew"
    )
    assert err.splitlines()[:3] == [full] * 3  # by the answer, and for each message
    assert code == 1
    assert out.splitlines()[0] == DRY_TEXT[: 100 - 86]


def test_a_request_that_fails_is_an_error(
    piped: Piped, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Oracle):
        def collect(self) -> Failed:
            return self.fail("device error", halfway=False)

    monkeypatch.setattr(opening, "open_executor", lambda *_: Broken(64, 260))
    code, _, err = piped("hi\n/undo\nho\n")
    assert code == 1
    assert err.count("minfer: the request failed: its step failed 3 times") == 2


def test_a_model_without_a_template_is_reported_at_once(
    tmp_path: Path, piped: Piped
) -> None:
    piped.folder = str(write_checkpoint(tmp_path / "plain"))
    code, out, err = piped("hi\n")
    assert (code, out) == (2, "")
    assert "this model has no chat template" in err
    assert err.count("\n") == 1


def test_the_bundled_model_has_the_template_it_was_trained_with() -> None:
    with LLM(executor="dry") as llm:
        ids = llm.render([{"role": "user", "content": "Close it."}])
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nClose it.<|im_end|>\n<|im_start|>assistant\n"
        )
        end = llm.tokenizer.encode("<|im_end|>")
        assert len(end) == 1
        assert llm.setup.stop_ids >= set(end)


@pytest.mark.long
def test_ctrl_c_ends_a_program_that_reads_from_a_pipe(folder: str) -> None:
    options = [
        "--num-gpu-blocks-override",
        "2000",
        "--max-num-seqs",
        "4",
        "--max-tokens",
        "0",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "minfer", *DRY, "--model", folder, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(len(DRY_TEXT)) == DRY_TEXT.encode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")
