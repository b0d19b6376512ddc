"""Which formats are chosen for a chat template: its calls are read back, or it has none.

With a folder of public templates in MINFER_CHAT_TEMPLATES, these are tried, too, and

    python -m tests.effects.text.tools.test_choice FOLDER

prints what is chosen for each.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from minfer.effects.text.template_messages import message_forms, read_message
from minfer.effects.text.template_rendering import ChatTemplateError, render_template
from minfer.effects.text.tools.formats import UNKNOWN, Parsers
from minfer.effects.text.tools.table import TOOLS
from minfer.effects.text.tools.thinking import REASONING
from tests.effects.text.system_templates import public_templates
from tests.effects.text.tools.cuts import Found, fed, reported

TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS: Final[dict[str, Any]] = {
    "city": 'Zürich, <b> & "c"\n  [d]',
    "days": 3,
    "hours": 2.5,
    "sure": False,
    "places": ["x, y", {"z": [1]}],
}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A."},
        "days": {"type": "integer", "description": "B."},
        "hours": {"type": "number", "description": "C."},
        "sure": {"type": "boolean", "description": "D."},
        "places": {
            "type": "array",
            "description": "E.",
            "items": {
                "type": "object",
                "description": "F.",
                "properties": {"z": {"type": "array", "items": {"type": "integer"}}},
            },
        },
    },
    "required": [*ARGUMENTS],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {"name": "get_it", "description": "Gets it.", "parameters": SCHEMA},
}
QUESTION: Final = "What is it?"
# Formats that public templates do not render, or not in a way that is known here.
NONE_KNOWN: Final = frozenset(
    {
        "Apertus-8B-Instruct",  # calls as {name: arguments}
        "HuggingFaceTB-SmolLM3-3B",  # without tools
        "LFM2.5-Instruct",  # renders no calls, and has no marker
        "google-gemma-2-2b-it",  # without tools
        "llama-cpp-rwkv-world",  # without tools
        "microsoft-Phi-3.5-mini-instruct",  # without tools
        "muse-glimmer",  # a message to each function, with tags in it
        "openbmb-MiniCPM5-1B",  # values in CDATA
    }
)


def call(index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": "get_it", "arguments": arguments}
    return {"id": f"call0000{index}", "type": "function", "function": function}


def rendered(template: str, *calls: Mapping[str, Any]) -> str | None:
    """What comes after a question: the calls, as the template has them."""
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    chat = [
        read_message(turn) for turn in ({"role": "user", "content": QUESTION}, message)
    ]
    values = {"tools": [TOOL], "add_generation_prompt": False}
    for form in message_forms(chat):
        for variables in ({}, {"functions": json.dumps([TOOL])}):
            try:
                text = render_template(template, form, TOKENS, {**values, **variables})
            except ChatTemplateError:
                continue
            return text.rpartition(QUESTION)[2]
    return None


def read(parsers: Parsers, answer: str) -> Found:
    """What is read of an answer, which may have the header of a message before it."""
    parsing = parsers.parsing({"get_it": SCHEMA}, "")
    assert parsing is not None
    first = fed(parsing.parser(), [answer])
    assert fed(parsing.parser(), list(answer)) == first
    return reported(first)


def begins(answer: str, parsers: Parsers) -> str:
    """An answer without the header of its message, if its calls have no marker."""
    form = TOOLS[parsers.tools]
    if form.begins_with_marker or form.written is None:
        return answer
    start = answer.find("get_it")
    first = form.written.begins or form.written.call.partition("{name}")[0]
    return answer[answer.rfind(first[:1], 0, start) if first else start :]


@pytest.mark.long
@pytest.mark.parametrize("name", public_templates())
def test_what_a_public_template_renders_is_read_back(name: str) -> None:
    template = public_templates()[name]
    parsers = Parsers().resolve(template, tokens=TOKENS)
    assert parsers.unknown_tools is (name in NONE_KNOWN)
    answer = rendered(template, call(0, ARGUMENTS))
    if parsers.unknown_tools or answer is None or "get_it" not in answer:
        return
    parsed = read(Parsers(parsers.tools, "none"), begins(answer, parsers))
    assert parsed.parsed == [("get_it", ARGUMENTS)]


CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OBJECT: Final = (
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}'
)


@pytest.mark.parametrize(
    ("call", "tools"),
    [
        (f"<tool_call>{OBJECT}</tool_call>", "hermes"),
        (f"<TOOLCALL>[{OBJECT}]</TOOLCALL>", "nemotron_v2"),
        (OBJECT + "{{ tools }}", "json"),
        # Signs of formats that read something else, or nothing, of what is rendered.
        ("<tool_call>{{ c.function.name }}</tool_call>", UNKNOWN),
        ('<tool_call>{"name": "{{ c.function.name }}"}</tool_call>', UNKNOWN),
        ("<function={{ c.function.name }}><parameter=a>", UNKNOWN),
        ("[TOOL_CALLS]{{ c.function.name }}()", UNKNOWN),
        ("{{ tools }}", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_a_sign_counts_if_the_rendered_call_is_read(call: str, tools: str) -> None:
    template = CHATML.replace("CALL", call)
    assert Parsers().resolve(template, tokens=TOKENS).tools == tools


def test_a_template_of_its_own_for_conversations_with_tools() -> None:
    with_tools = CHATML.replace("CALL", f"<tool_call>{OBJECT}</tool_call>")
    parsers = Parsers().resolve("x", tokens=TOKENS, with_tools=with_tools)
    assert parsers.tools == "hermes"


def test_names_are_those_of_vllm() -> None:
    names = (
        *("glm45", "glm47", "kimi_k2", "minimax_m2", "deepseek_v32", "gemma4", "lfm2"),
        *("seed_oss", "step3", "step3p5", "hunyuan_a13b", "ernie45", "xlam", "granite"),
        *("granite4", "granite-20b-fc", "phi4_mini_json", "llama4_pythonic", "jamba"),
        *("llama4_json", "pythonic", "qwen3_xml", "cohere_command3", "longcat", "mimo"),
    )
    assert TOOLS.keys() >= {*names}
    assert {
        "qwen3",
        "deepseek_r1",
        "glm45",
        "kimi_k2",
        "seed_oss",
        "granite",
        "step3",
    } <= (REASONING.keys())


def main(folder: str) -> None:
    """Print what is chosen for the templates of a folder."""
    for path in sorted(Path(folder).glob("*.jinja")):
        parsers = Parsers().resolve(path.read_text("utf-8"), tokens=TOKENS)
        print(f"{path.stem}: {parsers.tools}, {parsers.reasoning}")


if __name__ == "__main__":
    main(sys.argv[1])
