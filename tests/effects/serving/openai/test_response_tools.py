"""Tools of a response: what the model sees of them, and what its calls become."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.application import Application
from minfer.effects.serving.openai.responses import ResponsesBody
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.effects.serving.request_parsing.omitted_images import OMITTED_IMAGE
from minfer.effects.serving.request_receiver import LONG_BODY_BYTES
from tests.effects.scripted import TEMPLATE, hermes
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import refused
from tests.effects.serving.scripted_model import agent_server, script
from tests.effects.text.grammars.test_lark_terminals import PATCH

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "run",
    "description": "Run it.",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patch."}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**FUNCTION, "name": "spawn"}, {**CUSTOM, "name": "send"}],
}
HOSTED: dict[str, Any] = {"type": "web_search", "external_web_access": True}
TOOLS = [FUNCTION, CUSTOM, SPACE, HOSTED]
HI: dict[str, Any] = {"type": "message", "role": "user", "content": "hi"}
ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def body(**fields: Any) -> ResponsesBody:
    return read_body(ResponsesBody, json.dumps({"input": "hi", **fields}).encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("agents") / "m"
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    with agent_server(folder, template) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def answer(server: Serving, text: str, **fields: Any) -> dict[str, Any]:
    """The response of a model that writes this text."""
    request = {"model": "tiny", "input": [HI], "tools": TOOLS, **fields}
    with script(server, [text]):
        response = server.post("responses", **request)
    assert response.status_code == 200, response.text
    answer_json: dict[str, Any] = response.json()
    Response.model_validate(answer_json)
    return answer_json


def prompt_of(server: Serving, **fields: Any) -> str:
    """The text of the prompt for a body."""
    (prompt,) = body(**fields).generation(server.llm).prompts
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(prompt.ids, skip_special_tokens=False)


def test_the_model_sees_functions() -> None:
    names = [tool.name for tool in body(tools=TOOLS).offered]
    assert names == ["run", "patch", "agents__spawn", "agents__send"]
    _, patch, spawn, send = (
        tool.to_json()["function"] for tool in body(tools=TOOLS).offered
    )
    assert patch["parameters"]["properties"] == {"input": {"type": "string"}}
    assert spawn["description"] == "Other agents.\n\nRun it."
    assert send["description"] == "Patch."
    odd = {**SPACE, "name": "mcp__x__"}
    assert body(tools=[odd]).offered[0].name == "mcp__x__spawn"


def test_a_grammar_is_shown_to_the_model() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    (tool,) = body(tools=[{**CUSTOM, "format": grammar}]).offered
    text = tool.to_json()["function"]["parameters"]["properties"]["input"]
    assert text["description"] == 'A text of this lark grammar:\nstart: "x"'


def test_calls_become_what_was_offered(server: Serving) -> None:
    text = hermes(
        ("run", {"cmd": "ls"}),
        ("agents__spawn", {"cmd": "a"}),
        ("patch", {"input": 'a\n"é"'}),
        ("agents__send", {"input": ""}),
    )
    calls = answer(server, text)["output"]
    names_compared = ("type", "name", "namespace", "arguments", "input")
    assert [{k: v for k, v in call.items() if k in names_compared} for call in calls] == [
        {"type": "function_call", "name": "run", "arguments": '{"cmd": "ls"}'},
        {
            "type": "function_call",
            "name": "spawn",
            "namespace": "agents",
            "arguments": '{"cmd": "a"}',
        },
        {"type": "custom_tool_call", "name": "patch", "input": 'a\n"é"'},
        {"type": "custom_tool_call", "name": "send", "namespace": "agents", "input": ""},
    ]


def test_a_stream_of_custom_calls_is_the_sdks(server: Serving, client: OpenAI) -> None:
    text = "I patch." + hermes(("patch", {"input": "a\nb"}), ("agents__spawn", {}))
    fields: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": TOOLS}
    with script(server, [text, text]):
        events = list(client.responses.create(**fields, stream=True))
        response = client.responses.create(**fields)
    for event in events:
        ANY_EVENT.validate_python(event.model_dump(exclude_none=True, by_alias=True))
    deltas = [
        e.delta for e in events if e.type == "response.custom_tool_call_input.delta"
    ]
    assert deltas == ["a\nb"]
    last = events[-1]
    assert last.type == "response.completed"
    kinds = ["message", "custom_tool_call", "function_call"]
    assert [item.type for item in last.response.output] == kinds
    assert [item.type for item in response.output] == kinds


def test_calls_are_taken_back(server: Serving) -> None:
    text = hermes(("patch", {"input": "é\n"}), ("agents__spawn", {"cmd": "a"}))
    items = answer(server, text)["output"]
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
    ]
    shown = prompt_of(server, tools=TOOLS, input=[HI, *items, *outputs])
    assert '"patch", "arguments": {"input": "é\\n"}' in shown
    assert '"agents__spawn", "arguments": {"cmd": "a"}' in shown
    assert shown.count("<tool>ok") == 2


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_a_custom_call_that_breaks_off_is_taken_back(server: Serving, cut: int) -> None:
    text = hermes(("patch", {"input": 'a\n"b" and so on'}))[:cut]
    items = answer(server, text + "x", max_output_tokens=max(1, cut))["output"]
    prompt_of(server, tools=TOOLS, input=[HI, *items])


def test_additional_tools_are_offered_too(server: Serving) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [SPACE, HOSTED]}
    changed = {**added, "tools": [{**FUNCTION, "description": "Now."}]}
    offered = body(tools=[FUNCTION], input=[added, HI, changed]).offered
    assert [tool.name for tool in offered] == ["run", "agents__spawn", "agents__send"]
    assert offered[0].field_path == "input[2].tools[0]"
    assert offered[0].tool.description == "Now."
    shown = prompt_of(server, tools=[FUNCTION], input=[added, HI])
    assert "agents__send" in shown


def test_hosted_tools_are_left_out(server: Serving) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "action": {"query": "x"}}
    shown = prompt_of(server, tools=[HOSTED, FUNCTION], input=[search, HI])
    assert "web_search" not in shown
    response = answer(server, "yes", tools=[HOSTED], input=[search, HI])
    assert response["tools"] == []


def test_an_option_refuses_hosted_tools(server: Serving) -> None:
    app: Any = Application(server.llm, ("tiny",), bounds=ServerBounds())
    assert not server.llm.refuses_hosted_tools
    Application(server.llm, ("tiny",), bounds=ServerBounds(refuse_hosted_tools=True))
    try:
        response = server.post("responses", input="hi", tools=[FUNCTION, HOSTED])
    finally:
        server.llm.refuses_hosted_tools = False
        server.llm.reasoning_key = server.service.state.bounds.reasoning_key
        app.close()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[1].type"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "patch"}, {"patch"}),
        ({"type": "function", "name": "spawn"}, {"agents__spawn"}),
        ({"type": "function", "name": "agents__spawn"}, {"agents__spawn"}),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            {"agents__spawn"},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "web_search"}, {"type": "custom", "name": "send"}],
            },
            {"agents__send"},
        ),
    ],
)
def test_a_tool_choice_names_what_the_client_offered(
    server: Serving, choice: dict[str, Any], names: set[str]
) -> None:
    request = body(tools=TOOLS, tool_choice=choice).generation(server.llm)
    assert {constraint_part.field for constraint_part in request.parts} <= {
        "tools[1].format",
        "tools[2].tools[0].parameters",
        "tools[2].tools[1].format",
    }
    assert request.constraint_field == "tool_choice"
    text = request.params.structured_outputs
    assert text is not None
    for name in ("run", "patch", "agents__spawn", "agents__send"):
        assert (f'\\"{name}\\"' in text.text) is (name in names)


def custom(definition: str, syntax: str = "lark") -> dict[str, Any]:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {**CUSTOM, "format": grammar}


RECURSIVE = 'start: "(" (start | /[^)]/)? ")"'
NAMED = {"type": "custom", "name": "patch"}
NAMELESS = {"type": "function", "name": 5}
TWICE = [f"r{i}: r{i + 1} r{i + 1}" for i in range(60)]
DOUBLED = [f"A{i}: A{i + 1} A{i + 1}" for i in range(30)]
WRITTEN = (  # a format, an input that it allows, and how one begins that it does not
    (custom("ab+", "regex"), "abbb", "xab"),
    (custom('"[^"]+"\\n', "regex"), '"a b"\n', 'a"'),
    (custom('start: "(" start* ")"'), "(()())", ")"),
    (custom(PATCH), '*** Begin Patch\n*** Delete File: "a"\n*** End Patch', "a"),
)


@pytest.mark.long
@pytest.mark.parametrize(("tool", "right", "wrong"), WRITTEN)
@pytest.mark.parametrize(
    "choice", ["required", "auto", {"type": "custom", "name": "patch"}]
)
def test_a_custom_tool_keeps_to_its_grammar(
    server: Serving, tool: dict[str, Any], right: str, wrong: str, choice: Any
) -> None:
    fields: dict[str, Any] = {
        "tools": [tool, FUNCTION],
        "tool_choice": choice,
        "max_output_tokens": 400,
        "model": "tiny",
        "input": "hi",
    }
    with script(server, [hermes(("patch", {"input": right}))]):
        response = server.post("responses", **fields)
    assert "tools.format" not in response.headers.get("x-minfer-ignored", "")
    (call,) = response.json()["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", right)
    with script(server, [hermes(("patch", {"input": wrong}))]):
        response = server.post("responses", **fields).json()
    custom_calls = [
        item for item in response["output"] if item["type"] == "custom_tool_call"
    ]
    assert not any(call["input"].startswith(wrong) for call in custom_calls)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"include": ["nonsense"]}, "include"),
        ({"include": ["reasoning.encrypted_content", "web_search_call"]}, "include"),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"tools": [{**SPACE, "tools": []}]}, "tools.description"),
        ({"tools": [{**SPACE, "tools": [], "description": None}]}, None),
    ],
)
def test_the_header_names_what_adds_nothing(
    server: Serving, fields: dict[str, Any], name: str | None
) -> None:
    with script(server, ["Yes."]):
        response = server.post("responses", model="tiny", input="hi", **fields)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-minfer-ignored") == name


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_an_image_in_an_output_is_left_out(server: Serving, kind: str) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,eHh4"}
    fields = {"arguments": "{}"} if kind == "function_call" else {"input": ""}
    items = [
        {"type": kind, "call_id": "c", "name": "run", **fields},
        {"type": f"{kind}_output", "call_id": "c", "output": [image]},
        HI,
    ]
    assert OMITTED_IMAGE in prompt_of(server, input=items)
    with script(server, ["Yes."]):
        response = server.post("responses", model="tiny", input=items)
    assert response.headers["x-minfer-ignored"] == "output.input_image"
    data = json.dumps({"input": [{**HI, "content": [image]}]}).encode()
    assert refused(ResponsesBody, data).param == "input[0].content[0].type"


def test_text_before_a_call_is_free(server: Serving) -> None:
    text = "I patch." + hermes(("patch", {"input": "abb"}))
    items = answer(server, text, tools=[custom("ab+", "regex"), SPACE])["output"]
    assert [item["type"] for item in items] == ["message", "custom_tool_call"]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (custom(RECURSIVE), "'start' contains itself"),
        (custom("start: <tool_call>"), "'<'"),
        (custom('start: "a'), "cannot be enforced"),
        (custom("begin: X"), "has no rule 'start'"),
        (custom("(?<=a)b", "regex"), "look-behind"),
    ],
)
def test_a_grammar_that_cannot_be_enforced(
    server: Serving, tool: dict[str, Any], message: str
) -> None:
    """It is refused where a call is required, and named in the header where none is."""
    fields: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [tool, SPACE]}
    response = server.post("responses", **fields, tool_choice="required")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[0].format.definition"
    assert message in error["message"]
    with script(server, [hermes(("patch", {"input": "any"}))]):
        response = server.post("responses", **fields)
    assert response.json()["output"][0]["input"] == "any"
    assert response.headers["x-minfer-ignored"] == "tools.format"


@pytest.mark.parametrize(
    "tool",
    [
        custom("\n".join(["start: A0", *DOUBLED, 'A30: "a" | "b"'])),
        custom('start: "a"' + "\n// note" * 9000),
        custom("a" * 70_000, "regex"),
        custom("start: start"),
        custom('start: "a" start'),
        custom("\n".join(["start: r0", *TWICE, 'r60: "a"'])),
        custom(r"[^\x00-\U0010ffff]", "regex"),
        custom(r"start: /a[^\x00-\ud7ff\ue000-\U0010ffff]/"),
    ],
    ids=["lark", "long lark", "long regex", "loop", "endless", "twice", "none", "no end"],
)
def test_a_grammar_that_is_too_large_or_allows_no_text(
    server: Serving, tool: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "input": "hi",
        "tools": [tool],
        "max_output_tokens": 400,
    }
    response = server.post("responses", **fields, tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].format.definition"
    with script(server, [hermes(("patch", {"input": "any"}))]):
        response = server.post("responses", **fields)
    assert response.json()["output"][0]["input"] == "any"
    assert response.headers["x-minfer-ignored"] == "tools.format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": ["web_search"]}, "tools[0]"),
        ({"tools": [{**CUSTOM, "name": 5}]}, "tools[0].name"),
        ({"tools": [{**CUSTOM, "format": "lark"}]}, "tools[0].format"),
        ({"tools": [{**CUSTOM, "format": {"type": "x"}}]}, "tools[0].format.type"),
        (
            {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
        (
            {"tools": [custom("a)|(?:b", "regex")]},
            "tools[0].format.definition",
        ),
        ({"tools": [custom("(a", "regex")]}, "tools[0].format.definition"),
        ({"tools": [{**SPACE, "tools": [HOSTED]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**SPACE, "tools": [SPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**SPACE, "tools": {}}]}, "tools[0].tools"),
        ({"tools": [SPACE, {**FUNCTION, "name": "agents__spawn"}]}, "tools"),
        (
            {"input": [{"type": "additional_tools", "role": "user", "tools": []}]},
            "input[0].role",
        ),
        (
            {
                "input": [
                    {"type": "additional_tools", "role": "developer", "tools": [5]},
                ]
            },
            "input[0].tools[0]",
        ),
        ({"client_metadata": []}, "client_metadata"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"reasoning": {"context": 5}}, "reasoning.context"),
        (
            {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]},
            "input[0].input",
        ),
        ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice.type"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [HOSTED, {"type": "function", "name": "run"}, NAMELESS],
                },
            },
            "tool_choice.tools[2].name",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [HOSTED],
                },
            },
            "tool_choice.tools",
        ),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    data = json.dumps({"input": "hi", **fields}).encode()
    assert refused(ResponsesBody, data).param == param


# --- reasoning that the client keeps ----------------------------------------------------

THINKS = "<think>\nSo it is.\n</think>\n\nYes."
KEEPS = {"include": ["reasoning.encrypted_content"]}


def test_reasoning_comes_encrypted_and_is_taken_back(server: Serving) -> None:
    items = answer(server, THINKS, **KEEPS)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[0]["encrypted_content"]
    readable = prompt_of(server, input=[HI, {**items[0], "encrypted_content": None}])
    hidden = {k: v for k, v in items[0].items() if k != "content"}
    assert prompt_of(server, input=[HI, hidden]) == readable
    assert prompt_of(server, input=[HI, items[0]]) == readable
    assert "<think>So it is.</think>" in readable
    assert "encrypted_content" not in answer(server, THINKS)["output"][0]


def test_changed_reasoning_is_refused(server: Serving) -> None:
    item = answer(server, THINKS, **KEEPS)["output"][0]
    text = item["encrypted_content"]
    changed = {**item, "encrypted_content": text[:-8] + "AAAA" + text[-4:]}
    other_text = {**item, "content": [{"type": "reasoning_text", "text": "No."}]}
    for wrong, field in ((changed, "encrypted_content"), (other_text, "content")):
        response = server.post("responses", input=[HI, wrong], model="tiny")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"input[1].{field}"


def test_another_server_refuses_it(server: Serving) -> None:
    item = answer(server, THINKS, **KEEPS)["output"][0]
    old = server.llm.reasoning_key
    server.llm.reasoning_key = evolve(server.service.state.bounds).reasoning_key[::-1]
    try:
        response = server.post("responses", input=[HI, item], model="tiny")
    finally:
        server.llm.reasoning_key = old
    assert response.status_code == 400
    assert "--cache-secret" in response.json()["error"]["message"]


def test_processes_that_prepare_large_bodies_have_the_key(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    bounds = ServerBounds(workers=1)
    with agent_server(tmp_path / "m", template, bounds=bounds) as pooled:
        item = answer(pooled, THINKS, **KEEPS)["output"][0]
        long = {**HI, "content": "x" * LONG_BODY_BYTES}
        with script(pooled, [THINKS]):
            fields = {"input": [HI, item, long], "tools": TOOLS, **KEEPS}
            response = pooled.post("responses", model="tiny", **fields)
    assert response.status_code == 200, response.text
    assert response.json()["output"][0]["encrypted_content"]
    assert "tools.web_search" in response.headers["x-minfer-ignored"]
