"""Commands are imported when they are meant."""

import argparse
import re
import sys
from importlib import import_module
from types import ModuleType

import pytest

from minfer import LLM, SamplingParams
from minfer.effects.cli.commands import CommandLineParser, Entry, add_commands
from minfer.effects.cli.main import COMMANDS, main


def command_module(name: str, calls: list[str]) -> ModuleType:
    """A module of a command."""
    module = ModuleType(name)

    def run(options: argparse.Namespace) -> int:
        calls.append(f"{name} {options.word}")
        return 7

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--word", default="nothing")

    module.__dict__.update(DESCRIPTION=f"About {name}.", add_options=add_options, run=run)
    return module


def test_the_command_that_is_meant_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "inner_module", command_module("inner", calls))

    def parser() -> CommandLineParser:
        parser = CommandLineParser(prog="it")
        add_commands(
            parser, [Entry("inner", "", "inner_module"), Entry("x", "", "nowhere")]
        )
        return parser

    options = parser().parse_args(["inner", "--word", "hello"])
    assert options.run(options) == 7
    assert calls == ["inner hello"]
    with pytest.raises(SystemExit):
        parser().parse_args(["inner", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: it inner ")
    assert "About inner." in out
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["nonsense"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("minfer: ")


def test_without_a_command_the_help_says_which_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = CommandLineParser(prog="it")
    add_commands(parser, [Entry("inner", "does something", "inner_module")])
    options = parser.parse_args([])
    assert options.run(options) == 2  # as argparse has it where something lacks
    out, err = capsys.readouterr()
    assert out == ""
    assert all(words in err for words in ("usage: it ", "inner", "does something"))


MAX_SHOWN_OPTIONS = 25
OPTION = re.compile(r"^  (?:-\w(?: \w+)?, )?(--[\w-]+)", re.MULTILINE)


@pytest.mark.parametrize("name", [entry.name for entry in COMMANDS])
def test_help_is_short_and_says_how_to_see_all(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shown, everything = helps(capsys, name, "--help"), helps(capsys, name, "--help-all")
    last = f"minfer {name} --help-all shows all {len(options(everything))}"
    assert shown.splitlines()[-1] == f"{last} options"
    assert "--help-all shows all" not in everything
    assert len(options(shown)) <= MAX_SHOWN_OPTIONS
    assert set(options(shown)) < set(options(everything))
    assert "--policies" in everything


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_options_that_help_shows_are_there(
    capsys: pytest.CaptureFixture[str], entry: Entry
) -> None:
    common = getattr(import_module(entry.module), "COMMON", ())
    shown = options(helps(capsys, entry.name, "--help"))
    assert set(common) <= set(shown)
    assert not common or len(shown) == len(common) + len(["--help", "--help-all"])


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_the_bundled_model_is_introduced_as_a_toy(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    message = " ".join(helps(capsys, name, "--help").split())
    assert "a toy of 6 million parameters that shows that the engine works." in message
    assert "It gets 128 * 3 and 100 * 100 wrong." in message


@pytest.mark.long
def test_what_is_reported_as_wrong_is_wrong_and_what_is_right_is_right() -> None:
    sums = {"128 * 3": "384", "100 * 100": "10000", "17 + 25": "42"}
    with LLM() as llm:
        chats = [
            [{"role": "user", "content": f"What is {question}?"}] for question in sums
        ]
        params = SamplingParams(temperature=0, max_tokens=32)
        answers = [
            output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)
        ]
    correct = [
        expected in text for expected, text in zip(sums.values(), answers, strict=True)
    ]
    assert correct == [False, False, True]


def helps(capsys: pytest.CaptureFixture[str], name: str, which: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([name, which])
    assert caught.value.code == 0
    return capsys.readouterr().out


def options(text: str) -> list[str]:
    return OPTION.findall(text)
