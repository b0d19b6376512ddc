"""Which conversations are read, and what a template is given of them."""

import json
from typing import Any

import pytest

from minfer.effects.serving.anthropic.documents import MAX_ITEMS
from minfer.effects.serving.request_parsing.ignored_hints import collect_ignored
from minfer.effects.text.tools.formats import Parsers
from tests.effects.serving.anthropic.helpers import HI, body, refused


class Listener:
    """A model that keeps what it is asked to render."""

    parsers = Parsers("hermes", "none")
    tokenizer = None

    def render(self, turns: list[Any], **options: Any) -> list[int]:
        self.turns = turns
        self.how = options
        return [1, 2, 3]


def rendered(**fields: Any) -> Listener:
    model = Listener()
    edited = body(**fields).render_edited(model)  # type: ignore[arg-type]  # all it needs
    assert edited.ids == [1, 2, 3]
    return model


def block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def test_a_system_prompt_is_the_first_turn() -> None:
    hi = {"role": "user", "content": "hi"}
    assert rendered().turns == [hi]
    first = {"role": "system", "content": [block("a"), block("b")]}
    cached = block("b", cache_control={"type": "ephemeral"})
    assert rendered(system=[block("a"), cached]).turns == [first, hi]
    assert rendered(system="ab").turns == [{"role": "system", "content": "ab"}, hi]


def test_turns_of_one_role_are_one() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [block("b"), block("c", citations=None)]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert rendered(messages=messages).turns == [
        {"role": "user", "content": [block("a"), block("b"), block("c")]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]


def test_a_request_may_begin_its_answer() -> None:
    continued = rendered(messages=[*HI, {"role": "assistant", "content": "def"}])
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert continued.how == {"tools": None, "chat_template_kwargs": {}, **options}
    assert rendered().how["add_generation_prompt"] is True


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        (5, "", "must be a list"),
        ([5], "[0]", "must be an object"),
        ([{"text": "x"}], "[0].type", "is missing"),
        (
            [block("a"), {"type": "image", "source": {}}],
            "[1].type",
            '"image" is not supported: models read text here, multimodal ones too',
        ),
        (
            [{"type": "tool_use", "id": "x", "name": "f", "input": {}}],
            "[0].type",
            '"tool_use" cannot be',
        ),
        ([{"type": "thinking", "thinking": "x"}], "[0].type", "cannot be in"),
        ([block("x", colour="red")], "[0].colour", "is not a field here"),
        ([{"type": "text", "text": 5}], "[0].text", "must be a string, not 5"),
    ],
)
def test_what_is_no_text_is_refused_by_name(content: Any, param: str, words: str) -> None:
    error = refused(messages=[{"role": "user", "content": content}])
    assert error.param == f"messages[0].content{param}"
    assert words in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HI * (MAX_ITEMS + 1)}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    assert refused(**fields).param == param


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {"tools": [], "tool_choice": {"type": "auto"}, "service_tier": "auto"}
    assert body(**neutral, thinking={"type": "disabled"}).messages


# --- as Claude Code sends them ------------------------------------------------------

USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}
CALLED = [*HI, {"role": "assistant", "content": [USE]}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("nonce", ["a", "b"])
def test_the_block_about_billing_is_left_out(nonce: str) -> None:
    billing = block(f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};")
    first = {"role": "system", "content": [block("a"), block("b")]}
    assert rendered(system=[billing, block("a"), block("b")]).turns[0] == first
    assert rendered(system=[billing]).turns == HI
    assert rendered(system=[block("a"), billing]).turns[0]["content"][1] == billing


def test_a_late_system_message_stays_where_it_is() -> None:
    messages = [*HI, {"role": "system", "content": [block("x")]}, *CALLED[1:]]
    roles = [turn["role"] for turn in rendered(messages=messages).turns]
    assert roles == ["user", "system", "assistant"]


def test_the_form_of_one_text_changes_nothing() -> None:
    conversations = (
        [*CALLED, {"role": role, "content": content}]
        for role, text in (("system", "x"), ("user", "y"))
        for content in (text, [block(text, cache_control={"type": "ephemeral"})])
    )
    first, second, third, fourth = (
        rendered(messages=messages).turns for messages in conversations
    )
    assert first == second
    assert third == fourth


def test_a_system_message_may_be_for_one_turn() -> None:
    once = {"role": "system", "content": "x", "clear_at": "next_user_message"}
    assert rendered(messages=[*HI, once]).turns[1]["content"] == "x"
    answered = [*HI, once, {"role": "assistant", "content": "a"}]
    assert len(rendered(messages=answered).turns) == 3
    assert len(rendered(messages=[*answered, *HI]).turns) == 3


def test_tools_change_at_their_place() -> None:
    changes = [
        {"type": kind, "tool": {"type": "tool_reference", "name": "f"}}
        for kind in ("tool_addition", "tool_removal")
    ]
    messages = [*HI, {"role": "system", "content": changes}]
    deferred = {**TOOL, "defer_loading": True}
    model = rendered(messages=messages, tools=[deferred])
    assert model.how["tools"] is None
    added, removed = (block["text"] for block in model.turns[1]["content"])
    assert '<function>{"name": "f"' in added
    assert removed == "The tool f is no longer available."


def test_a_found_tool_is_described_where_it_was_found() -> None:
    result = {**RESULT, "content": [{"type": "tool_reference", "tool_name": "g"}]}
    schema = {"type": "object", "properties": {"ü": {}}}
    deferred = {
        "name": "g",
        "input_schema": schema,
        "description": "G.",
        "defer_loading": True,
    }
    messages = [*CALLED, {"role": "user", "content": [result]}]
    model = rendered(messages=messages, tools=[TOOL, deferred])
    assert [tool["function"]["name"] for tool in model.how["tools"]] == ["f"]
    function = '{"name": "g", "description": "G.", "parameters": '
    text = f"<functions>\n<function>{function}{json.dumps(schema, ensure_ascii=False)}}}"
    assert model.turns[-1]["content"] == f"{text}</function>\n</functions>"


def test_encrypted_reasoning_is_left_out_and_named() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    messages = [*HI, {"role": "assistant", "content": [redacted, USE]}]
    with collect_ignored() as hints:
        (_, turn) = rendered(messages=messages, betas=["x-2026-01-01"]).turns
    assert "reasoning_content" not in turn
    assert hints.names == ("betas", "redacted_thinking")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [RESULT]}],
        [
            *CALLED,
            *HI,
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": [RESULT]},
        ],
        [*CALLED, {"role": "user", "content": [{**RESULT, "tool_use_id": "t2"}]}],
    ],
)
def test_a_result_without_its_call_is_refused(messages: list[Any]) -> None:
    error = refused(messages=messages)
    assert error.param == f"messages[{len(messages) - 1}].content[0].tool_use_id"
    assert "unexpected `tool_use_id` found in `tool_result` blocks: t" in str(error)


def test_system_messages_may_be_between_a_call_and_its_result() -> None:
    late = {"role": "system", "content": "x"}
    result = {"role": "user", "content": [RESULT]}
    assert body(messages=[*CALLED, late, result, late, result]).messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"betas": "x"}, "betas"),
        ({"betas": [5]}, "betas[0]"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
        ({"context_management": []}, "context_management"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        (
            {"messages": [{**HI[0], "clear_at": "never"}]},
            "messages[0].clear_at",
        ),
        (
            {"messages": [{"role": "system", "content": [RESULT]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "redacted_thinking", "data": 5}],
                    }
                ]
            },
            "messages[0].content[0].data",
        ),
    ],
)
def test_a_wrong_type_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_hints_of_the_api_are_accepted() -> None:
    with collect_ignored() as hints:
        assert body(
            metadata={"user_id": "x" * 512},
            speed="fast",
            service_tier="standard_only",
            diagnostics={"previous_message_id": None},
        )
    assert hints.names == ("speed", "diagnostics")
