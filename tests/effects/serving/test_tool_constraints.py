"""Calls that must be made, or must fit: asked of every protocol, and made by a model."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from pydantic_core import PydanticCustomError

from minfer.effects.serving.request_parsing import tool_constraints as calling
from minfer.effects.text.tools.formats import NONE, Parsers
from minfer.sampling import structured
from tests.effects.served import Serving, events, serving
from tests.quick import at_most

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "Bern"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Final = {"name": "weather", "parameters": SCHEMA}
NOW: Final = {"name": "now"}
REQUESTED: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "max_tokens": 300,
    "seed": 3,
}
NAMED: Final = {"type": "function", "function": {"name": "weather"}}
# A format of each notation; the grammars of all are tested by themselves.
FORMATS: Final = (
    *("hermes", "llama3_json", "openai", "json", "qwen3_coder", "deepseek_v32"),
    *("lfm2", "gemma4"),
)


def tools(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


@pytest.fixture(scope="module")
def bundled() -> Iterator[Serving]:
    """The bundled model, in Hermes' format."""
    settings: dict[str, Any] = {"tool_call_parser": "hermes", "dtype": "float32"}
    with serving(num_gpu_blocks_override=256, **settings) as server:
        yield server


@pytest.fixture(params=FORMATS)
def formatted(request: pytest.FixtureRequest, bundled: Serving) -> Iterator[Serving]:
    """It, in every format."""
    bundled.llm.set_parsers(Parsers(request.param, NONE))
    yield bundled
    bundled.llm.set_parsers(Parsers("hermes"))


def chat(served: Serving, **fields: Any) -> dict[str, Any]:
    answer = served.post("chat/completions", **{**REQUESTED, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def refusal(
    served: Serving, path: str = "chat/completions", **fields: Any
) -> dict[str, Any]:
    answer = served.post(path, **{**REQUESTED, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def fits(arguments: Any) -> bool:
    return (
        set(arguments) == {"city", "days"}
        and arguments["city"] in ("Zürich", "Bern")
        and arguments["days"] in range(1, 10)
    )


@pytest.mark.long
def test_a_call_is_made_that_fits(formatted: Serving) -> None:
    for choice in ("required", NAMED):
        answer = chat(
            formatted,
            tools=tools(WEATHER),
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert fits(json.loads(call["function"]["arguments"]))


@pytest.mark.long
def test_a_stream_of_one_adds_up(formatted: Serving) -> None:
    body = {**REQUESTED, "tools": tools(WEATHER), "tool_choice": NAMED, "stream": True}
    answer = formatted.post("chat/completions", **body)
    choices = [
        c for event in events(iter(answer.text.split("\n"))) for c in event["choices"]
    ]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather"
    assert fits(json.loads("".join(call["function"]["arguments"] for call in calls)))
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.long
def test_long_bodies_are_bound_as_well(bundled: Serving) -> None:
    """Those are prepared in a process of their own."""
    long = {**WEATHER, "description": "It tells the weather." + " " * 6600}
    request_fields = {"tools": tools(long), "tool_choice": NAMED}
    (call,) = chat(bundled, **request_fields)["message"]["tool_calls"]
    assert fits(json.loads(call["function"]["arguments"]))


@pytest.mark.long
def test_only_what_is_named_or_allowed_is_called(bundled: Serving) -> None:
    only_now = {"mode": "required", "tools": tools({"name": "now"})}
    for choice, name in (
        (NAMED, "weather"),
        ({"type": "allowed_tools", "allowed_tools": only_now}, "now"),
    ):
        answer = chat(
            bundled,
            tools=tools(NOW, WEATHER),
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == name


@pytest.mark.long
def test_strict_tools_leave_text_free_until_they_are_called(bundled: Serving) -> None:
    strict = {**WEATHER, "strict": True}
    assert chat(bundled, tools=tools(strict), max_tokens=8)["message"]["content"]
    bundled.llm.set_parsers(Parsers("json", NONE))
    try:
        assert bundled.llm.tokenizer is not None
        (brace,) = bundled.llm.tokenizer.encode("{")
        begins = {"logit_bias": {str(brace): 100}, "max_tokens": 60}
        call = chat(bundled, tools=tools(strict), **begins)["message"]["tool_calls"][0]
        assert fits(json.loads(call["function"]["arguments"]))
        loose = chat(bundled, tools=tools(WEATHER), **begins)
        assert not loose["message"].get("tool_calls")
    finally:
        bundled.llm.set_parsers(Parsers("hermes"))


@pytest.mark.long
def test_an_answer_is_calls_or_as_its_schema_says(bundled: Serving) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    answer = chat(bundled, tools=tools(WEATHER), response_format=form)
    content = answer["message"]["content"]
    calls = answer["message"].get("tool_calls")
    assert calls or fits(json.loads(content))


@pytest.mark.long
def test_responses_call_as_chats_do(bundled: Serving) -> None:
    tool = {"type": "function", **WEATHER}
    request_fields = {"input": "Hi.", "tools": [tool], "parallel_tool_calls": False}
    named = {"type": "function", "name": "weather"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in ("required", named, allowed):
        record = bundled.post("responses", **request_fields, tool_choice=choice).json()
        (item,) = record["output"]
        assert (item["type"], item["name"]) == ("function_call", "weather")
        assert fits(json.loads(item["arguments"]))
        assert record["tool_choice"] == choice


@pytest.mark.long
def test_messages_call_as_chats_do(bundled: Serving) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    request_fields = {
        "messages": REQUESTED["messages"],
        "max_tokens": 300,
        "tools": [tool],
    }
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ):
        record = bundled.post("messages", **request_fields, tool_choice=choice).json()
        assert record["stop_reason"] == "tool_use"
        (block,) = record["content"]
        assert (block["type"], block["name"]) == ("tool_use", "weather")
        assert fits(block["input"])


def function(**fields: Any) -> list[dict[str, Any]]:
    return tools({"name": "now"}, {"name": "f", **fields})


REQUIRED: Final = {"tool_choice": "required"}
ODD: Final[dict[str, Any]] = {"properties": {"a": {"not": {"const": 1}}}}
STRANGE: Final = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}
WHERE: Final = "tools[1].function"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"tools": function(parameters=ODD, strict=True), **REQUIRED},
            f"{WHERE}.parameters",
            "'not' cannot be enforced",
        ),
        (
            {"tools": function(parameters=ODD, strict=True)},
            f"{WHERE}.parameters",
            "(at /properties/a)",
        ),
        (
            {"tools": function(parameters={"type": "array"}, strict=True)},
            f"{WHERE}.parameters",
            'of the type "object"',
        ),
        (
            {"tools": function(parameters=STRANGE, strict=True), **REQUIRED},
            f"{WHERE}.parameters",
            "does not exist",
        ),
        (
            {
                "tools": function(),
                "use_beam_search": True,
                "n": 2,
                "seed": None,
                **REQUIRED,
            },
            "tool_choice",
            "does not go with use_beam_search",
        ),
        (
            {"tools": function(strict=True), "guided_regex": "a"},
            "guided_regex",
            f"cannot be combined with {WHERE}.strict",
        ),
        (
            {"tools": function(), "guided_choice": ["a", "b"], **REQUIRED},
            "guided_choice",
            "cannot be combined with tool_choice",
        ),
        (
            {
                "tools": function(strict=True),
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {"not": {"const": 1}},
                        "strict": True,
                    },
                },
            },
            "response_format.json_schema.schema",
            "'not' cannot be enforced",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_field(
    bundled: Serving, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(bundled, **fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]


def test_a_schema_that_is_too_long_is_refused(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as is allowed, it would be more than fits into this model's context.
    monkeypatch.setattr(structured, "MAX_CONSTRAINT", 2000)
    enum = {"properties": {"a": {"enum": ["x" * 2000]}}}
    error = refusal(bundled, tools=function(parameters=enum, strict=True))
    assert error["param"] == f"{WHERE}.parameters"
    assert error["message"].endswith("of at most 2000; make it smaller")


UNTOLD: Final[tuple[dict[str, Any], ...]] = (
    ODD,
    STRANGE,
    {"type": "array"},
    {"type": "strin"},
    {"properties": 3},
    {"properties": {"a": False}, "required": ["a"]},
    {"properties": {"a": {"enum": []}}, "required": ["a"]},
    {"properties": {"a": {"pattern": "(?<=a)b"}}},
    {"properties": {"a": {"const": 2**64}}},
    {"properties": {"a": {}}, "maxProperties": 0},
)


@pytest.mark.parametrize("parameters", UNTOLD)
def test_a_tool_that_is_not_strict_is_not_refused_for_its_schema(
    bundled: Serving, parameters: dict[str, Any]
) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("auto", "required", named):
        single_tool = tools({"name": "f", "parameters": parameters})
        two_tools = tools(WEATHER, {"name": "f", "parameters": parameters})
        for offered in (single_tool, two_tools):
            assert chat(bundled, tools=offered, tool_choice=choice, max_tokens=1)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


NO_SCHEMA: Final[tuple[dict[str, Any], ...]] = (
    {"type": {"a": 1}},
    {"type": "strin"},
    {"required": "a"},
    {"enum": 3},
    {"properties": {"a": 3}},
    {"patternProperties": [1]},
    {"allOf": 1, "not": {}},
    {"allOf": 1, "format": "date", "pattern": "a"},
    {"minimum": "a", "type": "integer"},
    {"format": 3, "type": "string"},
    {"pattern": 3, "type": "string"},
    {"nullable": "yes"},
    {"$ref": 3},
    {"$ref": "#/$defs/none"},
    {"$ref": "#/properties/a"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    | {"$ref": "#/$defs/a"},
    {"$defs": 3, "propertyNames": {"enum": ["a"]}, "additionalProperties": {"enum": [1]}},
    nested(101),
)


@pytest.mark.parametrize("schema", NO_SCHEMA)
def test_what_is_no_schema_is_refused_by_its_field(
    bundled: Serving, schema: dict[str, Any]
) -> None:
    defs = {key: schema.pop(key) for key in ("$defs",) if key in schema}
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        **defs,
    }
    schema |= defs
    error = refusal(bundled, tools=function(parameters=parameters, strict=True))
    assert error["param"] == f"{WHERE}.parameters"
    assert error["message"].startswith(f"{WHERE}.parameters: ")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": parameters}}
    error = refusal(bundled, response_format=form)
    assert error["param"] == "response_format.json_schema.schema"


def test_schemas_that_are_too_long_together_are_not_enforced(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_CONSTRAINT", 1400)
    monkeypatch.setattr(calling, "MAX_CONSTRAINT", 1400)
    enum = {"properties": {"a": {"enum": ["x" * 400]}}, "required": ["a"]}
    fields = {**REQUIRED, "parallel_tool_calls": False}
    functions = [{"name": f"f{i}", "parameters": enum} for i in range(3)]
    long = {"name": "f", "parameters": {"properties": {"a": {"enum": ["x" * 1400]}}}}
    assert chat(bundled, tools=tools(*functions), max_tokens=1, **fields)
    assert chat(bundled, tools=tools(long), max_tokens=1, **fields)


@pytest.mark.long
def test_of_a_tool_that_is_not_strict_all_is_enforced_that_can_be(
    formatted: Serving,
) -> None:
    answer = chat(
        formatted,
        tools=tools({"name": "weather", "parameters": {**SCHEMA, "if": {}}}, NOW),
        tool_choice=NAMED,
    )
    (call,) = answer["message"]["tool_calls"]
    assert fits(json.loads(call["function"]["arguments"]))


def test_each_protocol_names_its_own_fields(bundled: Serving) -> None:
    tool = {"type": "function", "name": "f", "parameters": ODD, "strict": True}
    answer = bundled.post("responses", input="x", tools=[tool], **REQUIRED)
    assert answer.json()["error"]["param"] == "tools[0].parameters"
    tool = {"name": "f", "input_schema": ODD, "strict": True}
    request_fields = {"messages": REQUESTED["messages"], "max_tokens": 5, "tools": [tool]}
    answer = bundled.post("messages", **request_fields, tool_choice={"type": "any"})
    assert answer.status_code == 400
    assert "tools[0].input_schema: " in answer.json()["error"]["message"]


def test_formats_of_which_there_is_no_grammar(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "FORMS", {})
    bundled.llm.set_parsers(Parsers("json"))
    try:
        error = refusal(bundled, tools=tools(NOW), **REQUIRED)
        assert (error["param"], "'json'" in error["message"]) == ("tool_choice", True)
        error = refusal(bundled, tools=tools({**NOW, "strict": True}))
        assert error["param"] == "tools[0].function.strict"
        only_now = {"mode": "auto", "tools": tools({"name": "now"})}
        choice = {"type": "allowed_tools", "allowed_tools": only_now}
        error = refusal(bundled, tools=tools(NOW, WEATHER), tool_choice=choice)
        assert error["param"] == "tool_choice"
        assert chat(bundled, tools=tools(NOW), max_tokens=1)
    finally:
        bundled.llm.set_parsers(Parsers("hermes"))


def test_a_name_of_many_that_comes_twice_is_refused_soon() -> None:
    names = [f"a_name_{number}" for number in range(50_000)]
    with at_most(1), pytest.raises(PydanticCustomError, match='two "a_name_49999"'):
        calling.check_names([*names, names[-1]])
