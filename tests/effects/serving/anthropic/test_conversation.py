"""Which conversations are read, and what a template is given of them."""

from typing import Any

import pytest

from minfer.effects.serving.anthropic.documents import MAX_ITEMS
from minfer.effects.text.tools.formats import Parsers
from tests.effects.serving.anthropic.helpers import HI, body, refused


class Listener:
    """A model that keeps what it is asked to render."""

    parsers = Parsers("hermes", "none")
    tokenizer = None

    def render(self, turns: list[Any], **how: Any) -> list[int]:
        self.turns = turns
        self.how = how
        return [1, 2, 3]


def rendered(**fields: Any) -> Listener:
    model = Listener()
    edited = body(**fields).edited(model)  # type: ignore[arg-type]  # all it needs
    assert edited.ids == [1, 2, 3]
    return model


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


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
    begun = rendered(messages=[*HI, {"role": "assistant", "content": "def"}])
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert begun.how == {"tools": None, "chat_template_kwargs": {}, **how}
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
            '"image" is not supp',
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
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
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
