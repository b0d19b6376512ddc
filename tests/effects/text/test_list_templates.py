"""Templates of multimodal models, which loop over parts of a message's content."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from minfer.effects.text.chat_templates import render_chat
from minfer.effects.text.tokenizer import Tokenizer
from tests.effects.text.trained import save

# In the styles of LLaVA's (images before texts, by filters) and SmolVLM's (the first part
# decides what follows the role): of a text they show nothing, without an error.
FILTERS = """{% for m in messages %}{{ m['role'] | upper }}:
{%- for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}
{%- for p in m['content'] | selectattr('type', 'equalto', 'text') %} {{ p['text'] }}
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
FIRST_PART = """{% for m in messages %}{{ m['role'] | capitalize }}
{%- if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}
{%- for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}
{%- elif p['type'] == 'image' %}<image>{% endif %}{% endfor %}<end>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
BOTH = """{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}
{{- m['content'] }}{% else %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}
{%- endif %}
{% endfor %}"""
OF_USERS = """{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'user' %}
{%- for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}
{%- endfor %}{% else %}{{ m['content'] }}{% endif %}
{% endfor %}"""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a cat?"},
    {"role": "assistant", "content": "An animal."},
    {"role": "user", "content": "And a dog?"},
]


def in_lists(chat: list[dict[str, Any]], *roles: str) -> list[dict[str, Any]]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in roles
        else message
        for message in chat
    ]


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (FILTERS, ("system", "user", "assistant")),
        (FIRST_PART, ("system", "user", "assistant")),
        (BOTH, ()),
        (OF_USERS, ("user",)),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_texts_are_lists_where_the_template_shows_no_others(
    tmp_path: Path, template: str, roles: tuple[str, ...], goes_on: bool
) -> None:
    save(tmp_path, chat_template=template)
    chat = CHAT[:3] if goes_on else CHAT
    options: Any = {
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
    }
    rendered = render_chat(Tokenizer(tmp_path), chat, options)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered == reference.apply_chat_template(
        in_lists(chat, *roles), tokenize=False, **options
    )
    assert all(message["content"] in rendered for message in chat)
