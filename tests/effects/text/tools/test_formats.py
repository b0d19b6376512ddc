"""Which format a model has: what its template shows, or what it is told."""

from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.text.tools.formats import (
    REASONING,
    TOOLS,
    Style,
    UnknownFormatError,
    style_of,
)


def model(template: str | None) -> Any:
    return SimpleNamespace(chat_template=template)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, None, None),
        ("{{ messages }}", None, None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}...split('</think>')", "hermes", "think"),
        ("{{ tools }}<|python_tag|>", "llama3_json", None),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral", None),
        ("[THINK]{{ tools }}[TOOL_CALLS]", "mistral", "mistral"),
        ("<|start|>{{ tools }}<|channel|></think>", "openai", None),
        ("{{ tools | tojson }}", "json", None),
    ],
)
def test_what_a_template_shows(
    template: str | None, tools: str | None, reasoning: str | None
) -> None:
    style = style_of(model(template))
    assert style.tools is (TOOLS[tools] if tools else None)
    assert style.thinking is (REASONING[reasoning] if reasoning else None)


def test_what_it_is_told() -> None:
    style = style_of(model("<tool_call></think>"), "mistral", "none")
    assert style == Style(TOOLS["mistral"], None)
    assert style_of(None, reasoning="think") == Style(None, REASONING["think"])
    with pytest.raises(
        UnknownFormatError, match="no tool parser 'x'; use one of auto, n"
    ):
        style_of(None, "x")
    with pytest.raises(UnknownFormatError, match="no reasoning parser 'x'"):
        style_of(None, reasoning="x")


def test_what_a_parser_has_to_see() -> None:
    style = style_of(model("[THINK][TOOL_CALLS]"))
    assert style.markers(calls=False) == ("[THINK]", "[/THINK]")
    assert "[TOOL_CALLS]" in style.markers(calls=True)
    assert "<|channel|>" in style_of(model("<|channel|>")).markers(calls=False)


def test_calls_are_looked_for_where_there_are_tools() -> None:
    style = style_of(model("<tool_call>"))
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert len(style.parser(None, opened=False).push(text, final=True)) == 1
    assert len(style.parser(frozenset({"f"}), opened=False).push(text, final=True)) == 3
