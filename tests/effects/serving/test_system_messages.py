"""No API loses a system message, whatever the model's chat template does with them.

With a folder of public templates in MINFER_CHAT_TEMPLATES, these are tried, too, and

    python -m tests.effects.serving.test_system_messages FOLDER

prints what becomes of the texts of each template in each API.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.input_processing.prompts import render_conversation
from minfer.effects.serving.anthropic.create_message import ENDPOINT as MESSAGES
from minfer.effects.serving.openai.chat_completions import ENDPOINT as CHAT
from minfer.effects.serving.openai.responses import ENDPOINT as RESPONSES
from minfer.effects.serving.protocol import Endpoint
from minfer.effects.serving.tokens.tokenize import QUERY_ENDPOINT as TOKENIZE
from minfer.effects.text.chat_templates import ChatOptions, ChatTemplateError
from minfer.effects.text.tools.formats import Parsers
from tests.effects.scripted import write_talker
from tests.effects.text.system_templates import SHORT, public_templates

Turns = list[tuple[str, str]]  # roles and texts
SHAPES: Final[Mapping[str, Turns]] = {
    "one": [("system", "Aa"), ("user", "Bb")],
    "two": [("system", "Aa"), ("developer", "Bb"), ("user", "Cc")],
    "three": [("system", "Aa"), ("system", "Bb"), ("developer", "Cc"), ("user", "Dd")],
    "late": [("system", "Aa"), ("user", "Bb"), ("system", "Cc")],
    "several late": [
        ("system", "Aa"),
        ("user", "Bb"),
        ("system", "Cc"),
        ("assistant", "Dd"),
        ("user", "Ee"),
        ("developer", "Ff"),
        ("assistant", "Gg"),
        ("system", "Hh"),
        ("user", "Ii"),
    ],
}


TEXT: Final = {"type": "string", "description": "A."}
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"a": TEXT}}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": SCHEMA},
}


def long_text(text: str) -> str:
    """A text that no template has by itself."""
    return f"the text of {text * 3}"


def messages_of(turns: Turns) -> list[dict[str, Any]]:
    return [{"role": role, "content": long_text(text)} for role, text in turns]


def prompt(llm: AsyncLLM, endpoint: Endpoint, body: dict[str, Any]) -> str:
    """The prompt that a body becomes."""
    parsed = endpoint.read(json.dumps(body).encode())
    assert llm.tokenizer is not None
    ids = parsed.generation(llm).prompts[0].ids
    return llm.tokenizer.decode(ids, skip_special_tokens=False)


def with_tools(name: str, tools: bool, tool: dict[str, Any]) -> dict[str, Any]:
    return {name: [tool]} if tools else {}


def chat(llm: AsyncLLM, turns: Turns, tools: bool) -> str:
    body = {"messages": messages_of(turns), **with_tools("tools", tools, TOOL)}
    return prompt(llm, CHAT, body)


def responses(llm: AsyncLLM, turns: Turns, tools: bool) -> str:
    (_, first), *later_turns = turns
    tool = {"type": "function", **TOOL["function"]}
    body = {"instructions": long_text(first), "input": messages_of(later_turns)}
    return prompt(llm, RESPONSES, {**body, **with_tools("tools", tools, tool)})


def messages(llm: AsyncLLM, turns: Turns, tools: bool) -> str:
    (_, first), *later_turns = [
        ("system" if role == "developer" else role, text) for role, text in turns
    ]
    tool = {"name": "f", "description": "F.", "input_schema": SCHEMA}
    body = {
        "system": [{"type": "text", "text": long_text(first)}],
        "messages": messages_of(later_turns),
        "max_tokens": 1,
        **with_tools("tools", tools, tool),
    }
    return prompt(llm, MESSAGES, body)


def python(llm: AsyncLLM, turns: Turns, tools: bool) -> str:
    options: ChatOptions = {"tools": [TOOL] if tools else None}
    return render_conversation(llm.tokenizer, messages_of(turns), options).text or ""


def tokenize(llm: AsyncLLM, turns: Turns, tools: bool) -> str:
    body = {"messages": messages_of(turns), **with_tools("tools", tools, TOOL)}
    assert llm.tokenizer is not None
    ids: Any = TOKENIZE.read(json.dumps(body).encode()).answer(llm)["tokens"]
    return llm.tokenizer.decode(ids, skip_special_tokens=False)


APIS: Final[Mapping[str, Callable[[AsyncLLM, Turns, bool], str]]] = {
    "chat": chat,
    "Responses": responses,
    "Messages": messages,
    "LLM.chat": python,
    "tokenize": tokenize,
}


def missing(text: str, turns: Turns) -> list[str]:
    """The texts of turns that are not in a prompt, or not in their order. Where leading
    ones are is up to the template: Mistral's put them into the last user turn.
    """
    end = 0
    lost = []
    leading = True
    for role, text_part in turns:
        leading = leading and role in ("system", "developer")
        start = text.find(long_text(text_part), 0 if leading else end)
        if start < 0:
            lost.append(text_part)
        elif not leading:
            end = start
    return lost


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = write_talker(tmp_path_factory.mktemp("talker"), context=100_000)
    with contextlib.closing(AsyncLLM(path, executor="dry")) as llm:
        llm.set_parsers(Parsers("hermes", "none"))
        assert llm.tokenizer is not None
        llm.tokenizer.special_tokens = {"bos_token": "", "eos_token": ""}
        yield llm


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("template", SHORT)
def test_every_text_is_in_the_prompt(
    llm: AsyncLLM, template: str, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", SHORT[template])
    for turns in SHAPES.values():
        assert missing(APIS[api](llm, turns, False), turns) == []


@pytest.mark.long
@pytest.mark.parametrize("template", public_templates() or [""])
def test_with_public_templates(
    llm: AsyncLLM, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not template:
        pytest.skip("MINFER_CHAT_TEMPLATES names no folder of templates")
    monkeypatch.setattr(llm.tokenizer, "chat_template", public_templates()[template])
    if not any(renders(llm, tools=tools) for tools in (False, True)):
        pytest.skip("the template needs variables of its own")
    assert report(llm) == {}


def renders(llm: AsyncLLM, *, tools: bool) -> bool:
    """Whether the template takes a conversation without system messages."""
    try:
        python(llm, [("user", "Aa")], tools)
    except ChatTemplateError:
        return False
    return True


def report(llm: AsyncLLM) -> dict[str, str]:
    """What is wrong with the prompts of the model's template, by API and shape."""
    wrong = {}
    tools = not renders(llm, tools=False)  # some are for tools alone
    for (api, make), (shape, turns) in (
        (api_item, shape_item)
        for api_item in APIS.items()
        for shape_item in SHAPES.items()
    ):
        try:
            lost = missing(make(llm, turns, tools), turns)
        except Exception as error:  # what a template raises is reported
            wrong[f"{api}, {shape}"] = str(error)
        else:
            if lost:
                wrong[f"{api}, {shape}"] = f"lost {', '.join(lost)}"
    return wrong


def main(folder: str) -> None:
    """Report about all templates of a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        path = write_talker(Path(temporary) / "talker", context=100_000)
        with contextlib.closing(AsyncLLM(path, executor="dry")) as llm:
            assert llm.tokenizer is not None
            llm.tokenizer.special_tokens = {"bos_token": "", "eos_token": ""}
            for template in sorted(Path(folder).glob("*.jinja")):
                llm.tokenizer.chat_template = template.read_text()
                llm.set_parsers(Parsers("hermes", "none"))
                wrong = report(llm)
                print(f"{template.stem:50} {len(APIS) * len(SHAPES) - len(wrong)} right")
                for place, error in wrong.items():
                    print(f"    {place}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
