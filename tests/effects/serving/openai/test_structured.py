"""What an answer must look like is asked for in many fields, and errors name each."""

import json
from typing import Any

import pytest
from openai import OpenAI

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.responses import ResponsesBody
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.sampling.structured import MAX_CONSTRAINT, StructuredOutputs
from tests.effects.live.stuck import stick_at_the_end
from tests.effects.served import Serving, events
from tests.effects.serving.openai.helpers import HI, chat, completion

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
NAMED = {"name": "it", "schema": SCHEMA, "strict": True}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}


def payload(body: Any) -> Any:
    return body.sampling().get("structured_outputs")


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            {"json": SCHEMA},
        ),
        ({"response_format": TAGS}, {"structural_tag": TAGS}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"regex": "a", "choice": None}}, {"regex": "a"}),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": None}},
            {"regex": "a"},
        ),
        ({"guided_json": True}, {"json": "true"}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "x"'}, {"grammar": 'start: "x"'}),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, {"regex": "a"}),
    ],
)
def test_each_field_asks_for_the_same(
    fields: dict[str, Any], right: dict[str, Any] | None
) -> None:
    expected = None if right is None else StructuredOutputs(**right)
    assert payload(chat(**fields)) == payload(completion(**fields)) == expected


def refused(**fields: Any) -> ApiError:
    """What is told of a chat's fields; a completion is told the same."""
    errors = list[ApiError]()
    for make in (chat, completion):
        with pytest.raises(ApiError) as caught:
            payload(make(**fields))
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert errors[0].status == 400
    assert str(errors[0]).startswith(f"{errors[0].param}: ")
    return errors[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {**NAMED, "strict": 1},
                }
            },
            "response_format.json_schema.strict",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {**NAMED, "shema": 1},
                }
            },
            "response_format.json_schema.shema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "abc"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * (MAX_CONSTRAINT + 1)}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
        ),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ],
)
def test_unsupported_constraints_are_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    assert refused(**fields).param == param


def response(form: Any) -> Any:
    data = {"input": "x", "text": {"format": form}}
    return read_body(ResponsesBody, json.dumps(data).encode())


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema"}, "text.format.name"),
        ({"type": "json_schema", "name": "a"}, "text.format.schema"),
        ({"type": "json_schema", "name": "a", "schema": 1}, "text.format.schema"),
        ({"type": "text", "schema": SCHEMA}, "text.format.schema"),
    ],
)
def test_a_response_is_refused_a_wrong_format(form: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        response(form)
    assert caught.value.param == param


# --- of a server ------------------------------------------------------------------------

FORMAT: Any = {"type": "json_schema", "json_schema": NAMED}


def fits(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"ok", "n"} and value["n"] <= 99


@pytest.mark.long
def test_an_answer_is_as_its_schema_says(client: OpenAI) -> None:
    options: dict[str, Any] = {"messages": HI, "response_format": FORMAT}
    completion = client.chat.completions.create(
        model="bundled", max_tokens=60, seed=1, **options
    )
    choice = completion.choices[0]
    assert choice.finish_reason == "stop"
    assert fits(choice.message.content or "")


def test_it_comes_behind_reasoning_that_the_prompt_has_begun(bundled: Serving) -> None:
    thinks = {"role": "assistant", "content": "<think>"}
    answer = bundled.post(
        "chat/completions",
        messages=[*HI, thinks],
        add_generation_prompt=False,
        continue_final_message=True,
        guided_choice=["yes"],
        temperature=0,
    )
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "yes"
    assert message["reasoning"]


@pytest.mark.long
def test_a_stream_is_as_its_schema_says(bundled: Serving) -> None:
    body = {"prompt": "x", "response_format": FORMAT, "stream": True, "max_tokens": 300}
    url = f"{bundled.url}/v1/completions"
    with bundled.http.stream("POST", url, json=body) as stream:
        choices = [chunk["choices"][0] for chunk in events(stream.iter_lines())]
    assert fits("".join(choice["text"] for choice in choices))
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.long
def test_a_response_is_as_its_format_says(bundled: Serving) -> None:
    form = {"type": "json_schema", **NAMED}
    record = bundled.post("responses", input="x", text={"format": form}).json()
    assert fits(record["output"][0]["content"][0]["text"])
    assert record["text"] == {"format": form}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"guided_regex": "("}, "guided_regex"),
        (
            "completions",
            {"structured_outputs": {"grammar": "start: b"}},
            "structured_outputs.grammar",
        ),
        (
            "completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"x": 1}, "strict": True},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            "responses",
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "a",
                        "schema": {"type": "strin"},
                    }
                }
            },
            "text.format.schema",
        ),
    ],
)
def test_what_does_not_compile_is_refused_by_the_clients_own_field(
    bundled: Serving, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"input": "x"} if path == "responses" else {"prompt": "x"}
    answer = bundled.post(path, **prompt, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert "structured_outputs.json" not in error["message"]


@pytest.mark.long
def test_long_bodies_are_compiled_as_well(bundled: Serving) -> None:
    """Those are prepared in a process of their own, which has no grammars."""
    answer = bundled.post(
        "completions", prompt="x", guided_choice=["y" * 2500, "z" * 2500]
    )
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    answer = bundled.post("completions", prompt="x", guided_regex="(" + "y" * 5000)
    assert answer.json()["error"]["param"] == "guided_regex"


@pytest.mark.long
def test_a_stuck_grammar_fails_only_its_own_request(
    bundled: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of another constraint: a matcher that served others would be tried anew.
    assert bundled.post("completions", prompt="x", guided_regex="b{3}").is_success
    stick_at_the_end(monkeypatch)
    answer = bundled.post("completions", prompt="x", guided_regex="b{3}c?")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"
    assert "took too long" in answer.json()["error"]["message"]
    assert bundled.post("completions", prompt="x", max_tokens=3).is_success
