"""What a terminal is shown."""

import pytest

from minfer.effects.cli.standard_streams import write

RUDE = "\x1b[31mred\x07 \x9b2J\x7f\r\n\ttab é"


def test_control_characters_do_not_reach_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(RUDE)
    assert capsys.readouterr().out == RUDE
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write(RUDE)
    assert capsys.readouterr().out == "␛[31mred␇ �2J␡␍\n\ttab é"
