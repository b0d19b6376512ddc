"""Which chat template a conversation is rendered with, of the files that hold some: as
transformers chooses.
"""

from pathlib import Path
from typing import Any, Final

import pytest
from transformers import AutoTokenizer

from minfer.effects.models.json_files import CorruptFileError
from minfer.effects.text.chat_templates import ChatTemplateError, render_chat
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsers
from tests.effects.text.test_side_files import CONFIG, write

TALK: Final = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]
NAMED: Final = [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "tools"},
]
MORE: Final = "additional_chat_templates__tool_use.jinja"


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({CONFIG: {"chat_template": "one"}}, "one", "one"),
        ({CONFIG: {"chat_template": NAMED}}, "plain", "tools"),
        ({CONFIG: {"chat_template": NAMED[:1]}}, "plain", "plain"),
        ({CONFIG: {"chat_template": NAMED[1:]}}, None, "tools"),
        ({CONFIG: {"chat_template": []}}, None, None),
        ({"chat_template.jinja": "file"}, "file", "file"),
        (
            {"chat_template.jinja": "file", CONFIG: {"chat_template": NAMED}},
            "file",
            "file",
        ),
        ({"chat_template.jinja": "file", MORE: "more"}, "file", "more"),
        ({CONFIG: {"chat_template": NAMED}, MORE: "more"}, None, "more"),
        ({"additional_chat_templates__default.jinja": "more"}, "more", "more"),
        ({"chat_template.json": {"chat_template": "old"}}, None, None),
    ],
)
def test_chat_templates(
    tmp_path: Path, files: dict[str, Any], plain: str | None, with_tools: str | None
) -> None:
    write(tmp_path, files)
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools, expected in ((None, plain), (TOOLS, with_tools), ([], with_tools)):
        if expected is None:
            with pytest.raises(ChatTemplateError):
                render_chat(tokenizer, TALK, {"tools": tools})
            with pytest.raises(ValueError, match="template"):
                reference.apply_chat_template(TALK, tokenize=False, tools=tools)
            continue
        assert render_chat(tokenizer, TALK, {"tools": tools}) == expected
        rendered = reference.apply_chat_template(TALK, tokenize=False, tools=tools)
        assert rendered == expected


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_the_template_of_a_processor_is_read_last(tmp_path: Path, name: str) -> None:
    """As of multimodal models that were published before chat_template.jinja."""
    files: dict[str, Any] = {
        "chat_template.json": {"chat_template": "of a processor"},
        name: {},
    }
    write(tmp_path, files)
    assert render_chat(Tokenizer(tmp_path), TALK, {}) == "of a processor"
    write(tmp_path, files | {CONFIG: {"chat_template": "plain"}})
    assert render_chat(Tokenizer(tmp_path), TALK, {}) == "plain"


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    write(tmp_path, {CONFIG: {"chat_template": NAMED[1:]}})
    with pytest.raises(
        ChatTemplateError, match="named tool_use, and none is the default"
    ):
        render_chat(Tokenizer(tmp_path), TALK, {})


def test_templates_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, {CONFIG: {"chat_template": [{"name": "default"}]}})
    with pytest.raises(CorruptFileError, match=r"config\.json: chat_template must be"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CorruptFileError, match=r"jinja: cannot be read.*again"):
        Tokenizer(tmp_path)


def test_named_tokens_reach_the_template(tmp_path: Path) -> None:
    emitted = {
        "extra_special_tokens": {"image_token": "<image>"},
        "audio_token": "<audio>",
        "chat_template": "{{ image_token }}{{ audio_token }}",
    }
    write(tmp_path, {CONFIG: emitted})
    reference = AutoTokenizer.from_pretrained(tmp_path)
    rendered = render_chat(Tokenizer(tmp_path), TALK, {})
    assert (
        rendered
        == reference.apply_chat_template(TALK, tokenize=False)
        == "<image><audio>"
    )


def test_calls_are_looked_for_as_the_template_for_tools_writes_them(
    tmp_path: Path,
) -> None:
    named = [NAMED[0], {"name": "tool_use", "template": "<tool_call>{{ tools }}"}]
    write(tmp_path, {CONFIG: {"chat_template": named}})
    tokenizer = Tokenizer(tmp_path)
    assert Parsers().resolve(tokenizer.chat_template).unknown_tools
    assert Parsers().resolve(tokenizer.all_templates).tools == "hermes"
