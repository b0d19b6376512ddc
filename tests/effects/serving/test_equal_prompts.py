"""One conversation is read in one way: over HTTP, in Python, and as transformers does."""

import json
from itertools import product
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from minfer.effects.live.input_processing.prompts import render_conversation
from minfer.effects.serving.anthropic.count_tokens import CountBody
from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.responses import ResponsesBody
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.effects.serving.tokens.tokenize import TokenizeBody
from minfer.effects.text.tools.formats import NONE
from tests.effects.serving.test_round_trips import HI, Ground, tokenizer
from tests.effects.text.grammars.bundled import FOLDER

EACH = "{% for p in m.content %}{{ p.text }}{% endfor %}"
TEXT = "{% if m.content is string %}{{ m.content }}"
NO_TEXT = "{% if m.content is none %}{% elif m.content is string %}{{ m.content }}"
TRIMMED = "{% if m.content is string %}{{ m.content | trim }}"
TRIMMED_EACH = "{% for p in m.content %}{{ p['text'] | trim }}{% endfor %}"
JOINED = "{{ m.content | map(attribute='text') | join('|') }}"
MACRO = "{% macro show(c) %}{% if c is string %}{{ c }}{% elif c is iterable %}"
LOOP = "{% for p in c %}{% if p.type == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
TEXT_OF_USERS = "{% if m.content is string or m.role != 'user' %}{{ m.content }}"
# How templates read content, and the roles in which they take lists.
ALL, NEVER = frozenset({"system", "user", "assistant"}), frozenset[str]()
READS: dict[str, tuple[str, frozenset[str]]] = {
    "either": (f"{TEXT}{{% else %}}{EACH}{{% endif %}}", ALL),
    "or null": (f"{NO_TEXT}{{% else %}}{EACH}{{% endif %}}", ALL),
    "trimmed": (f"{TRIMMED}{{% else %}}{TRIMMED_EACH}{{% endif %}}", ALL),
    "joined": (f"{TEXT}{{% else %}}{JOINED}{{% endif %}}", ALL),
    "by a macro": (
        f"{MACRO}{LOOP}{{% endif %}}{{% endmacro %}}{{{{ show(m.content) }}}}",
        ALL,
    ),
    "of users": (f"{TEXT_OF_USERS}{{% else %}}{EACH}{{% endif %}}", frozenset({"user"})),
    "as it is": ("{{ m.content }}", NEVER),
    "added": ("{{ '' + m.content }}", NEVER),
    "stripped": ("{{ m.content.strip() }}", NEVER),
    "text alone": (f"{TEXT}{{% endif %}}", NEVER),
    "as JSON": ("{{ m.content | tojson }}", NEVER),
}
INST = "{% if m.role == 'user' %}[INST] @ [/INST]{% else %} @{{ eos_token }}{% endif %}"
AROUND = {
    "chatml": "<|im_start|>{{ m.role }}\n@<|im_end|>\n",
    "headers": "{% if loop.first %}{{ bos_token }}{% endif %}<h>{{ m.role }}</h>\n\n@<e>",
    "inst": INST,
    "of roles": "{{ m.role | upper }}: @\n",
}
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    f"{form}, {around}": "{% for m in messages %}" + text.replace("@", read) + TAIL
    for (form, (read, _)), (around, text) in product(READS.items(), AROUND.items())
}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CONTENTS: list[Any] = [
    "What is 170 + 2?",
    " é\n🙂 ",
    [part("What is 17"), part("0 + 2?")],
    [part(" a ")],
    [part(""), part("b\n"), part(" c")],
    [part("")],
    [],
]
ROLES = ("system", "user", "assistant")


def conversations() -> list[list[dict[str, Any]]]:
    """Each content in each place, and all of them at once."""
    single = [
        [{"role": role, "content": content}, *([HI] if role != "user" else [])]
        for role, content in product(ROLES, CONTENTS)
    ]
    mixed = zip(ROLES[1:] * 4, CONTENTS, strict=False)
    return [*single, [{"role": role, "content": content} for role, content in mixed]]


def lines(message: dict[str, Any], takes: frozenset[str]) -> dict[str, Any]:
    """A message as templates get it that take lists in these roles."""
    content = message["content"]
    if isinstance(content, list) and message["role"] not in takes:
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, reference: Any) -> None:
    template, takes = TEMPLATES[name], READS[name.split(", ")[0]][1]
    ground: Any = Ground(template, NONE)
    reference.chat_template = template
    for messages in conversations():
        meant = [lines(message, takes) for message in messages]
        text = reference.apply_chat_template(
            meant, tokenize=False, add_generation_prompt=True
        )
        prompt = render_conversation(tokenizer(), messages, {})
        assert prompt.text == text
        answer = read(TokenizeBody, messages=messages).answer(ground)
        assert answer["tokens"] == prompt.ids


@pytest.mark.parametrize("name", [one for one in TEMPLATES if "chatml" in one])
def test_all_protocols_read_a_conversation_alike(name: str) -> None:
    ground: Any = Ground(TEMPLATES[name], NONE)
    for content in CONTENTS[:-1]:  # a turn without any block is left out
        messages = [{"role": role, "content": content} for role in ROLES]
        ids = render_conversation(tokenizer(), [*messages, HI], {}).ids
        chat = read(ChatBody, messages=[*messages, HI]).generation(ground)
        assert chat.prompts[0].ids == ids
        turns = {"system": content, "messages": [*messages[1:], HI]}
        assert read(CountBody, **turns).answer(ground) == {"input_tokens": len(ids)}
        if isinstance(content, list):
            content = [{**part, "type": "input_text"} for part in content]
        items = [{"role": role, "content": content} for role in ROLES]
        response = read(ResponsesBody, input=[*items, HI]).generation(ground)
        assert response.prompts[0].ids == ids


@pytest.mark.parametrize("name", [one for one in TEMPLATES if "JSON" not in one])
def test_the_last_message_is_continued_in_either_form(name: str, reference: Any) -> None:
    tokenizer().chat_template = reference.chat_template = TEMPLATES[name]
    takes = READS[name.split(", ")[0]][1]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    for content in ("What is", [part("What "), part("is")]):
        last = {"role": "assistant", "content": content}
        text = reference.apply_chat_template(
            [HI, lines(last, takes)], tokenize=False, **options
        )
        assert render_conversation(tokenizer(), [HI, last], options).text == text


Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body], **fields: Any) -> Body:
    return read_body(kind, json.dumps(fields).encode())
