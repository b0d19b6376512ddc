"""Chat templates against transformers, and what they must not do."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from minfer.effects.text.chat_templates import ChatOptions, ChatTemplateError, render_chat
from minfer.effects.text.tokenizer import Tokenizer
from tests.effects.text.trained import save

TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + messages[0].content }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}
    {%- if m.extra is defined %}{{ m.extra | tojson }}{% endif %}
{%- endfor %}
{%- set ns = namespace(found=false) %}{% set ns.found = true %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if ns.found and add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
{%- for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}
{%- generation %}{{ eos_token }}{% endgeneration %}
{{- strftime_now('%Y') }} {{ flavour }}"""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <kind> & 'brief'."},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "oh ",
        "extra": {"é": [1, None, "<b>"]},
        "name": None,
    },
]


@pytest.mark.parametrize("mode", ["prompt", "plain", "continue"])
@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "f"}}]]
)
def test_chats_render_as_in_transformers(tmp_path: Path, mode: str, tools: Any) -> None:
    save(tmp_path, chat_template=TEMPLATE)
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == TEMPLATE
    options: dict[str, Any] = {
        "add_generation_prompt": mode == "prompt",
        "tools": tools,
        "continue_final_message": mode == "continue",
    }
    request_options: Any = {**options, "chat_template_kwargs": {"flavour": "sweet"}}
    rendered = render_chat(tokenizer, CHAT, request_options)
    assert rendered == reference.apply_chat_template(
        CHAT, tokenize=False, flavour="sweet", **options
    )
    # As the template.
    assert mode == "continue" or str(datetime.now().year) in rendered  # noqa: DTZ005


def test_a_value_comes_before_a_token_of_its_name_as_in_transformers(
    tmp_path: Path,
) -> None:
    save(tmp_path, chat_template="{{ eos_token }}{{ messages[0].content }}")
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    hi = [{"role": "user", "content": "hi"}]
    template_values: dict[str, Any] = {"eos_token": "x"}
    rendered = render_chat(tokenizer, hi, {"chat_template_kwargs": template_values})
    assert (
        rendered
        == reference.apply_chat_template(hi, tokenize=False, **template_values)
        == "xhi"
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    ("role", "content"),
    [("assistant", None), ("assistant", ""), ("assistant", "four"), ("user", "four")],
)
def test_reasoning_and_null_come_as_in_transformers(
    tmp_path: Path, name: str, role: str, content: str | None
) -> None:
    """Reasoning under all names, as gpt-oss reads `thinking`; what is null is absent."""
    template = (
        "{{ messages }}{% for m in messages %}<{{ m.thinking }}|"
        "{{ m.reasoning_content }}|{{ m.content is none }}"
        "{{ 'content' in m }}{{ m.content }}>{% endfor %}"
    )
    save(tmp_path, chat_template=template)
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    message = {"role": role, "content": content, name: "hmm", "tool_calls": None}
    chat: list[dict[str, Any]] = [message]
    rendered = render_chat(tokenizer, chat, {})
    assert rendered == reference.apply_chat_template(chat, tokenize=False)
    assert "<hmm|hmm|" in rendered


@pytest.mark.parametrize(
    ("first_text", "tools"),
    [
        ("", [{"default": None}]),  # which this template writes as Python does
        ("None of these: ", None),
        ("None: ", [{"default": None, "x": "None"}]),
    ],
)
def test_only_null_of_a_message_is_not_written(
    tmp_path: Path, first_text: str, tools: Any
) -> None:
    """Other words like it are the template's: here arguments must be text, and beside
    these an answer without content may be null.
    """
    template = (
        first_text + "{{ tools }}{% for m in messages %}<{{ m.role }}>"
        "{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    save(tmp_path, chat_template=template)
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "c", "type": "function", "function": function}
    for content in ("", None):
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        chat: Any = [{"role": "user", "content": "hi"}, called]
        rendered = render_chat(
            tokenizer, chat, {"tools": tools, "add_generation_prompt": False}
        )
        assert rendered == reference.apply_chat_template(
            chat, tools=tools, tokenize=False
        )


@pytest.mark.parametrize(
    "template",
    [
        "a {%- generation -%} x {{ flavour }} {%- endgeneration %}\n b",
        (
            "{% for m in messages %}\n  "
            "{% generation %}\n{% set q = m %}{{ q.content }}\n"
            "  {% endgeneration %}\n{{ q }}{{ loop.index }}{% endfor %}"
        ),
        "{% if true %}{%generation%}{{ 1 }}{%+ endgeneration -%}   z{% endif %}",
        "{% set k = 1 %}{% generation %}{% set k = 2 %}{{ k }}{% endgeneration %}{{ k }}",
    ],
)
def test_generation_blocks_render_as_in_transformers(
    tmp_path: Path, template: str
) -> None:
    """With their white space and their scope."""
    save(tmp_path, chat_template=template)
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    rendered = render_chat(
        tokenizer, CHAT, {"chat_template_kwargs": {"flavour": "sweet"}}
    )
    assert rendered == reference.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, flavour="sweet"
    )


def test_templates_in_the_config_are_found(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for stored in (
        "hello",
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "hello"}],
    ):
        path.write_text(json.dumps({**config, "chat_template": stored}))
        assert Tokenizer(tmp_path).chat_template == "hello"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert Tokenizer(tmp_path).chat_template == "newer"


def test_templates_that_take_arguments_as_text(tokenizer: Tokenizer) -> None:
    """They add them to texts, and content that is null is not left out."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    arguments = "message.tool_calls[0].function.arguments"
    for template, text in (
        ("{{ '<' + %s }}", '<{"a": "é"}'),
        ("{{ %s | tojson }}", '{"a": "é"}'),
        ("{{ 'x' if message.content is none else message.content + 'y' }}", "x"),
    ):
        loop = "{% for message in messages %}" + template + "{% endfor %}"
        tokenizer.chat_template = loop.replace("%s", arguments)
        assert render_chat(tokenizer, chat, {}) == text
    tokenizer.chat_template = "{{ 5 + messages[0].tool_calls[0].function.name }}"
    with pytest.raises(ChatTemplateError, match="TypeError"):
        render_chat(tokenizer, chat, {})


@pytest.mark.parametrize(
    ("template", "messages", "options", "says"),
    [
        (None, CHAT, {}, "no chat template"),
        (TEMPLATE, [], {}, "no messages"),
        (TEMPLATE, ["hi"], {}, "not a str"),
        (TEMPLATE, [{"role": "tool", "content": ""}], {}, "no tools"),
        ("{% if %}", CHAT, {}, "chat template failed"),
        ("{{ messages[9].content.x }}", CHAT, {}, "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHAT, {}, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, {}, "unsafe"),
        ("{{ dict.__class__.__init__ }}{{ dict.mro() }}", CHAT, {}, "failed"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", CHAT, {}, "failed"),
        ("{{ namespace(_x=1) }}", CHAT, {}, "cannot store"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", CHAT, {}, "recurses"),
        (
            "hi",
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": False},
            "does not show",
        ),
        ("hi", CHAT, {"continue_final_message": True}, "exclude"),
        (
            "hi",
            [{"role": "user"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "content: is missing",
        ),
    ],
)
def test_chats_that_fail(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Any,
    options: ChatOptions,
    says: str,
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(tokenizer, messages, options)
