"""A template that the settings give: a file, or text."""

import os
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.setup.custom_template import CustomTemplate, read_custom_template
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError

TEXT = "{{ messages[0].content }}\n"


def test_a_file_is_read_and_other_text_is_the_template(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(TEXT, "utf-8")
    for value in (str(path), path):
        assert read_custom_template(value) == CustomTemplate(TEXT, str(path))
    template = read_custom_template(TEXT)
    assert template is not None
    assert template.text == TEXT
    assert read_custom_template(template) is template
    assert read_custom_template(None) is None
    long = "{# " + "x" * 10_000 + " #}"  # too long for the name of a file
    assert read_custom_template(long) == CustomTemplate(long, template.source)


def test_a_file_whose_name_looks_like_a_template(tmp_path: Path) -> None:
    path = tmp_path / "{{ a }}"
    path.write_text("no mark", "utf-8")
    assert read_custom_template(str(path)) == CustomTemplate("no mark", str(path))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "must be the path of a file, or a template's text, not a int"),
        (["{{ a }}"], "not a list"),
        ("", "'.' is not a file"),
        ("missing.jinja", "there is no file 'missing.jinja', and it is no template"),
        (Path("{{ a }}"), "there is no file"),
        ("a\0b", "there is no file"),
        ("x" * 10_000, "there is no file 'x{200}',"),
    ],
)
def test_what_is_neither_is_reported(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^chat_template.* {message}"):
        read_custom_template(value)


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"{{ a }}\xff\x00")
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**22 + 1)
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("binary", "is not text in UTF-8"),
        ("empty", "is empty"),
        ("large", "more than 4194304 bytes"),
        ("pipe", "is not a file"),
        (".", "is not a file"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read_custom_template(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


def test_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(TEXT)

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_custom_template(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": 5}, "chat_template must be the path of a file"),
        ({"default_chat_template_kwargs": [1]}, "kwargs must be a mapping"),
        ({"default_chat_template_kwargs": '{"a": 1}'}, "kwargs must be a mapping"),
        ({"tool_call_parser": 5}, "tool_call_parser must be a word"),
        ({"reasoning_parser": 3}, "reasoning_parser must be a word"),
    ],
)
def test_settings_of_wrong_types(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**settings)
