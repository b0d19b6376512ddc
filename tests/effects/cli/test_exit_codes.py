"""Each error that a user can mend is one line and a code; a fault of ours is raised."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from minfer.effects.cli.exit_codes import guarded
from minfer.effects.live.errors import OverloadedError, RequestError
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.memory import NotEnoughMemoryError
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.journal.format import JournalError
from minfer.journal.turns import EngineRaisedError
from minfer.records.request import ParameterError
from minfer.values.checks import ConfigError


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize("code", [0, 70])
def test_a_code_is_passed_on(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: code) == code
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x: mend it"),
        RequestError("x: mend it"),
        OverloadedError("x: mend it"),
        CheckpointError("x: mend it"),
        NotEnoughMemoryError("x: mend it"),
        ChatTemplateError("x: mend it"),
        JournalError("x: mend it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_user_can_mend_is_one_line(
    error: ValueError, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error)) == 2
    assert capsys.readouterr() == ("", "minfer: x: mend it\n")


def test_a_parameter_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(ParameterError("seed", "must be whole"))) == 2
    assert capsys.readouterr().err == "minfer: seed: must be whole\n"


def test_an_engine_that_raises_and_an_interrupt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match="x") as raised:
        raising(ValueError("x"))()
    assert guarded(raising(EngineRaisedError(7, 1.0, raised.value))) == 3
    assert capsys.readouterr().err.startswith("minfer: ")


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x")])
def test_a_fault_of_ours_is_raised_on(error: Exception) -> None:
    with pytest.raises(type(error)):
        guarded(raising(error))


@pytest.mark.long
def test_a_reader_that_has_left() -> None:
    code = """
import sys
from minfer.effects.cli.exit_codes import guarded
def run():
    sys.stdin.read()  # until the reader of our output has gone
    print("this is not read")
    return 0
sys.exit(guarded(run))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert (process.wait(30), process.stderr.read()) == (141, b"")
