"""Which format a model has: what its template shows, or what it is told."""

import pytest

from minfer.effects.text.tools.deltas import CallStart, ContentDelta
from minfer.effects.text.tools.formats import (
    NONE,
    UNKNOWN,
    Parsers,
    Parsing,
    UnknownFormatError,
)

CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, UNKNOWN, NONE),
        ("{{ messages }}", UNKNOWN, NONE),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", NONE),
        ("{% if tools %}<tool_call>{% endif %}.split('</think>')", "hermes", "think"),
        ("{{ tools }}<|python_tag|>", "llama3_json", NONE),
        (
            '{{ tools }} {"name": function name, "parameters": dictionary',
            "llama3_json",
            NONE,
        ),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral", NONE),
        ("[THINK]{{ tools }}[TOOL_CALLS]", "mistral", "mistral"),
        ("<|start|>{{ tools }}<|channel|></think>", "openai", NONE),
        ("{{ tools | tojson }}", UNKNOWN, NONE),
        ("{{ tools }}<tool_call><function=f><parameter=a>", "qwen3_coder", NONE),
        ("{{ tools }}tool▁calls▁begin```json</think>", "deepseek_v3", "think"),
        ("{{ tools }}tool▁calls▁begin", "deepseek_v31", NONE),
    ],
)
def test_what_a_template_shows(template: str | None, tools: str, reasoning: str) -> None:
    assert Parsers().resolve(template) == Parsers(tools, reasoning)


def test_its_metrics() -> None:
    reported = Parsers("mistral", "none").resolve("<tool_call></think>")
    assert reported == Parsers("mistral", NONE)
    assert Parsers(reasoning="think").resolve(None) == Parsers(UNKNOWN, "think")
    with pytest.raises(
        UnknownFormatError, match="no tool parser 'x'; use one of auto, n"
    ):
        Parsers("x")
    with pytest.raises(UnknownFormatError, match="no reasoning parser 'x'"):
        Parsers(reasoning="x")


def test_none_is_what_the_user_chose_and_unknown_is_not() -> None:
    unknown = Parsers().resolve("{{ messages }}")
    chosen = Parsers(NONE).resolve("{{ messages }}")
    assert unknown.unknown_tools
    assert not chosen.unknown_tools
    assert unknown.resolve("<tool_call>") == unknown
    assert Parsers(unknown.tools, unknown.reasoning) == unknown  # as workers get it
    assert unknown.parsing({"f": None}, "") is None


def test_what_is_looked_for() -> None:
    assert Parsers("hermes", NONE).parsing({}, "") is None
    assert Parsers(NONE, NONE).parsing({"f": None}, "") is None
    parsing = Parsers("hermes", "think").parsing({}, "<think>\n")
    assert parsing == Parsing(reasoning="think", opened=True)
    parsing = Parsers("hermes", "think").parsing({"f": None}, "\n", parallel=False)
    assert parsing == Parsing(
        tools="hermes", reasoning="think", names=("f",), parallel=False
    )
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    parsing = Parsers("qwen3_coder", NONE).parsing({"f": schema, "g": None}, "")
    assert parsing == Parsing(tools="qwen3_coder", names=("f", "g"), typed=(("f", "a"),))
    assert Parsers("openai", NONE).parsing({}, "") == Parsing(tools="openai")


def test_what_a_parser_has_to_see() -> None:
    assert Parsing(reasoning="mistral").markers == ("[THINK]", "[/THINK]")
    markers = Parsing(tools="mistral", reasoning="think").markers
    assert {"[TOOL_CALLS]", "[ARGS]", "<think>"} < set(markers)
    assert "<|channel|>" in Parsing(tools="openai").markers


def test_calls_are_looked_for_where_there_are_tools() -> None:
    first = Parsing(tools="hermes", names=("f",)).parser().push(CALL, final=True)[0]
    assert isinstance(first, CallStart)
    assert Parsing(reasoning="think").parser().push(CALL, final=True) == [
        ContentDelta(CALL)
    ]
