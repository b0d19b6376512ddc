"""What an API hands out, it takes back: answers cut anywhere, in a conversation."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.live.input_processing.prompts import ChatRenderer
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.serving.anthropic.create_message import ENDPOINT as MESSAGES
from minfer.effects.serving.openai.chat_completions import ENDPOINT as CHAT
from minfer.effects.serving.openai.responses import ENDPOINT as RESPONSES
from minfer.effects.serving.protocol import Endpoint, PromptUsage
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.text.outputs import CompletionOutput, RequestMetrics
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import NONE, Parsers
from minfer.records.request import SamplingParams
from tests.circles import long
from tests.effects.text.grammars.bundled import FOLDER

ADD = '{"a": [1, {"b": "é🙂\\n"}], "c": null}'
_DEEP_ONE = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ADD}\n```"
_DEEP = f"{_DEEP_ONE}<｜tool▁call▁end｜>"
# A format, and an answer in it.
ANSWERS: list[tuple[str, str]] = [
    (NONE, "It is 42."),
    (NONE, ""),
    (NONE, "né 中文 🙂\n\n\ttabs"),
    (NONE, "<think>Hm, 7.</think>\n\nIt is 7."),
    (NONE, "<think>\nHm, and hm again."),
    ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>'),
    ("hermes", '<think>Add.</think>I add.<tool_call>{"name": "now"}</tool_call>Done.'),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call>\n' * 2,
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": nul}}</tool_call> no'),
    ("llama3_json", f'{{"name": "add", "parameters": {ADD}}}'),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "add", "parameters": {ADD}}}; {{"name": "now"}}',
    ),
    ("mistral", f'Well. [TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}]'),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]now[ARGS]{{}}"),
    (
        "qwen3_coder",
        (
            "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n[1, 2]\n</parameter>\n"
            "<parameter=c>\né x\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{_DEEP}\n{_DEEP}<｜tool▁calls▁end｜>"),
    (
        "deepseek_v31",
        (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}"
            f"<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    ("openai", f"<|channel|>analysis<|message|>Hm.<|end|>{'<|start|>assistant'}"),
    (
        "openai",
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
            f"commentary to=functions.add <|constrain|>json<|message|>{ADD}<|call|>"
        ),
    ),
    (
        "json",
        f'[{{"name": "add", "arguments": {ADD}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    ("json", 'no call: {"name": "add"}'),
]
_HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
)
_TEXT = "{% if m.content %}{{ m.content }}{% endif %}"
_CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} "
_TAIL = "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
_ARGUMENTS = "call.function.arguments"
TEMPLATES = {
    "as JSON": _HEAD + _TEXT + _CALLS + f"{{{{ {_ARGUMENTS} | tojson }}}}" + _TAIL,
    "one by one": _HEAD
    + _TEXT
    + "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    + _CALLS
    + f"{{{{ {_ARGUMENTS} | tojson(indent=1) }}}}"
    + _TAIL,
    "in tags": _HEAD
    + "{{ '' + m.content }}"
    + _CALLS
    + f"{{% for k, v in {_ARGUMENTS} | items %}}<{{{{ k }}}}>{{{{ v }}}}{{% endfor %}}"
    + _TAIL,
    "as text": _HEAD
    + "{% if m.content is not none %}{{ '' + m.content }}{% endif %}"
    + _CALLS
    + f"{{{{ '```' + {_ARGUMENTS} }}}}"
    + _TAIL,
}
TOOLS_OFFERED = ("add", "now")
HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "go on"}


class Ground(ChatRenderer):
    """A model with no engine: its tokenizer, and a chat template."""

    reasoning_key = bytes(32)
    refuses_hosted_tools = False
    template_settings = TemplateSettings()

    def __init__(self, template: str, form: str) -> None:
        self.tokenizer = tokenizer()
        self.tokenizer.chat_template = template
        tools = "hermes" if form == NONE else form
        self.parsers = Parsers(tools, "think") if tools else Parsers(NONE, NONE)
        config = SimpleNamespace(max_model_len=512)
        self.setup: Any = SimpleNamespace(
            default_sampling_params=SamplingParams, config=config
        )


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


def streamed(
    endpoint: Endpoint,
    fields: dict[str, Any],
    form: str,
    text: str,
    *,
    stream: bool = True,
) -> list[Any]:
    """The events of an answer that says this, and ends there; without `stream`, the
    answer.
    """
    ground: Any = Ground(TEMPLATES["as JSON"], form)
    body = endpoint.read(json.dumps({**fields, "stream": stream}).encode())
    request = body.generation(ground)
    writer = endpoint.writer(Stamp("chatcmpl-1", "m", 5), request, ground.tokenizer)
    half = len(text) // 2 if stream else len(text)
    events = []
    pieces = ((text[:half], None), (text[half:], "length"))
    for piece, end in pieces if stream else ((text, "length"),):
        delta = CompletionOutput(index=0, text=piece, token_ids=[], finish_reason=end)
        events += writer.write(0, delta)
    metrics = RequestMetrics(arrival_time=0.0, output_tokens=1)
    events += writer.end([PromptUsage(1, 0, metrics)])
    return [json.loads(event.data) for event in events if event.data != "[DONE]"]


def in_chat(form: str, text: str) -> Iterator[dict[str, Any]]:
    """The bodies in which an answer goes back."""
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS_OFFERED]
    fields = {"messages": [HI], "tools": tools}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for event in streamed(CHAT, fields, form, text):
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] = message.get(name, "") + delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    calls.append(call)
                else:
                    fragment = call["function"]["arguments"]
                    calls[call["index"]]["function"]["arguments"] += fragment
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        for call in message.get("tool_calls", ())
    ]
    solo = message["reasoning_content"] or "tool_calls" in message
    nulled = {**message, "content": message["content"] or (None if solo else "")}
    yield {**fields, "messages": [HI, nulled, *results, ON]}
    yield {**fields, "messages": [HI, message]}


def in_responses(form: str, text: str) -> Iterator[dict[str, Any]]:
    tools = [{"type": "function", "name": name} for name in TOOLS_OFFERED]
    fields = {"input": "hi", "tools": tools}
    items = streamed(RESPONSES, fields, form, text)[-1]["response"]["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
        for item in items
        if item["type"] == "function_call"
    ]
    yield {**fields, "input": [HI, *items, *results, ON]}
    yield {**fields, "input": [HI, *items]}


def whole_in_chat(form: str, text: str) -> Iterator[dict[str, Any]]:
    """Likewise, of an answer in one piece."""
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS_OFFERED]
    fields = {"messages": [HI], "tools": tools}
    (answer,) = streamed(CHAT, fields, form, text, stream=False)
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        for call in message.get("tool_calls", ())
    ]
    yield {**fields, "messages": [HI, message, *results, ON]}
    dropped = {k: v for k, v in message.items() if not k.startswith("reasoning")}
    yield {**fields, "messages": [HI, dropped, *results, ON]}


def whole_in_responses(form: str, text: str) -> Iterator[dict[str, Any]]:
    tools = [{"type": "function", "name": name} for name in TOOLS_OFFERED]
    fields = {"input": "hi", "tools": tools, "include": ["reasoning.encrypted_content"]}
    (answer,) = streamed(RESPONSES, fields, form, text, stream=False)
    items = answer["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
        for item in items
        if item["type"] == "function_call"
    ]
    yield {**fields, "input": [HI, *items, *results, ON]}


def in_messages(form: str, text: str) -> Iterator[dict[str, Any]]:
    tools = [{"name": n, "input_schema": {"type": "object"}} for n in TOOLS_OFFERED]
    fields = {"messages": [HI], "tools": tools, "max_tokens": 5}
    blocks: list[dict[str, Any]] = []
    for event in streamed(MESSAGES, fields, form, text):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        if event["type"] == "content_block_delta":
            kind = {"text_delta": "text", "thinking_delta": "thinking"}
            name = kind.get(event["delta"]["type"], "input")
            fragment = (
                event["delta"].get("partial_json") or event["delta"].get(name) or ""
            )
            blocks[-1][name] = (blocks[-1][name] or "") + fragment
    yield from answered(fields, blocks)


def in_whole_messages(form: str, text: str) -> Iterator[dict[str, Any]]:
    tools = [{"name": n, "input_schema": {"type": "object"}} for n in TOOLS_OFFERED]
    fields = {"messages": [HI], "tools": tools, "max_tokens": 5}
    (message,) = streamed(MESSAGES, fields, form, text, stream=False)
    yield from answered(fields, message["content"])


def answered(
    fields: dict[str, Any], blocks: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The bodies in which blocks go back: with results, and to be continued."""
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "5"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    message = {"role": "assistant", "content": blocks}
    results = [*results, {"type": "text", "text": "go on"}]
    yield {**fields, "messages": [HI, message, {"role": "user", "content": results}]}
    yield {**fields, "messages": [HI, message]}


Back = Callable[[str, str], Iterator[dict[str, Any]]]
APIS: dict[str, tuple[Endpoint, Back]] = {
    "chat": (CHAT, in_chat),
    "chat, whole": (CHAT, whole_in_chat),
    "responses": (RESPONSES, in_responses),
    "responses, whole": (RESPONSES, whole_in_responses),
    "messages": (MESSAGES, in_messages),
    "messages, whole": (MESSAGES, in_whole_messages),
}


def words(body: Any) -> Iterator[str]:
    """What an assistant said in a body: its text, reasoning and arguments."""
    if isinstance(body, list):
        for item in body:
            yield from words(item)
    elif isinstance(body, dict):
        for name, value in body.items():
            if isinstance(value, str):
                spoken = ("content", "text", "reasoning_content", "thinking", "name")
                if name in (*spoken, "arguments", "input"):
                    yield value
            elif name != "tools":
                yield from words(value)


def read_back(template: str, text: str) -> str:
    """A text as a template writes it: as it is, or arguments as values of an object."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, dict) or "as" not in template:
        return ""
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("number", [6, *long(n for n in range(len(ANSWERS)) if n != 6)])
def test_an_answer_that_is_cut_anywhere_is_taken_back(api: str, number: int) -> None:
    endpoint, back = APIS[api]
    form, answer = ANSWERS[number]
    tokens = tokenizer().encode(answer, add_special_tokens=False)
    for num_tokens in range(len(tokens) + 1):
        cut = tokenizer().decode(tokens[:num_tokens], skip_special_tokens=False)
        template = [*TEMPLATES][num_tokens % len(TEMPLATES)]
        ground: Any = Ground(TEMPLATES[template], form)
        for request in back(form, cut):
            body = endpoint.read(json.dumps(request).encode())
            prompt = body.generation(ground).prompts[0].ids
            shown = tokenizer().decode(prompt, skip_special_tokens=False)
            for drawn in words(request):
                assert read_back(template, drawn) in shown, (cut, drawn, shown)
