"""The schemas of zod and pydantic in every API: taken, or refused by their keyword."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from tests.circles import claimed, long
from tests.effects.served import Serving, serving
from tests.effects.text.grammars.libraries import test_pydantic as pydantic_tests
from tests.effects.text.grammars.libraries import test_zod as zod_tests
from tests.effects.text.grammars.libraries.pydantic_types import TYPES, model_of

MESSAGES: Final = [{"role": "user", "content": "Hi."}]
SHORT: Final = {"max_tokens": 1, "seed": 3}


def schemas() -> Iterator[tuple[str, Any, str]]:
    """Types' names, their schemas, and why these are refused, if they are."""
    for target, name in zod_tests.TYPES:
        schema = zod_tests.SCHEMAS[target][name]
        yield f"zod {target} {name}", schema, zod_tests.REFUSED.get(name, "")
    hidden = pydantic_tests.NO_SCHEMA | pydantic_tests.NEEDS_EMAIL_VALIDATOR
    for name in sorted(TYPES.keys() - hidden):  # in one order in all processes of pytest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults that JSON cannot have
            schema = model_of(TYPES[name]).model_json_schema()
        yield f"pydantic {name}", schema, pydantic_tests.REFUSED.get(name, "")


SCHEMAS: Final = {name: (schema, why) for name, schema, why in schemas()}
NEWEST: Final = [  # those of zod's other targets are much the same
    name for name in SCHEMAS if name.startswith(("zod draft-2020-12 ", "pydantic "))
]
# Some of each kind, for the quick tests.
SOME: Final = [
    *(f"zod draft-2020-12 {name}" for name in ("cidrv4", "never", "xor_objects")),
    *("zod draft-07 json", "pydantic set", "pydantic dict_literal"),
]


def chat_tool(schema: Any, strict: bool, choice: str) -> tuple[str, Mapping[str, Any]]:
    function = {"name": "f", "parameters": schema, "strict": strict}
    tools = [{"type": "function", "function": function}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, **SHORT}
    return "chat/completions", body


def chat_format(schema: Any, strict: bool, _choice: str) -> tuple[str, Mapping[str, Any]]:
    form = {"name": "f", "schema": schema, "strict": strict}
    form = {"type": "json_schema", "json_schema": form}
    return "chat/completions", {"messages": MESSAGES, "response_format": form, **SHORT}


def responses_tool(
    schema: Any, strict: bool, choice: str
) -> tuple[str, Mapping[str, Any]]:
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
    body = {"input": "Hi.", "tools": [tool], "tool_choice": choice}
    return "responses", {**body, "max_output_tokens": 1}


def responses_format(
    schema: Any, strict: bool, _choice: str
) -> tuple[str, Mapping[str, Any]]:
    form = {"type": "json_schema", "name": "f", "schema": schema, "strict": strict}
    return "responses", {"input": "Hi.", "text": {"format": form}, "max_output_tokens": 1}


def messages_tool(
    schema: Any, strict: bool, choice: str
) -> tuple[str, Mapping[str, Any]]:
    tool = {"name": "f", "input_schema": schema, "strict": strict}
    kind = {"type": "any" if choice == "required" else "auto"}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": kind, "max_tokens": 1}
    return "messages", body


Api = Callable[[Any, bool, str], tuple[str, Mapping[str, Any]]]
TOOLS: Final[tuple[Api, ...]] = (chat_tool, responses_tool, messages_tool)
FORMATS: Final[tuple[Api, ...]] = (chat_format, responses_format)
APIS: Final[tuple[Api, ...]] = (*TOOLS, *FORMATS)


@pytest.fixture(scope="module")
def bundled() -> Iterator[Serving]:
    settings: dict[str, Any] = {"tool_call_parser": "hermes", "dtype": "float32"}
    with serving(num_gpu_blocks_override=256, **settings) as server:
        yield server


def sent(name: str, choices: tuple[str, ...]) -> Iterator[tuple[Api, bool, str]]:
    """To which APIs a schema is sent, whether strict, and with which choice of tools.

    A schema that is refused for tools is sent with all choices. Any other is sent once to
    each API strict and once not, and in such an order that each two of API, strict and
    choice come together, and all three with one of two neighbouring schemas.
    """
    first = [*SCHEMAS].index(name)
    _, reason = SCHEMAS[name]
    for place, api in enumerate(APIS):
        for strict in (True, False):
            if reason and api in TOOLS:
                yield from ((api, strict, choice) for choice in choices)
            else:
                yield api, strict, choices[(first + place + strict) % len(choices)]


def check(served: Serving, name: str, *choices: str) -> None:
    """Send a schema to every API, strict and not."""
    schema, reason = SCHEMAS[name]
    for api, strict, choice in sent(name, choices):
        path, body = api(schema, strict, choice)
        answer = served.post(path, **body)
        # No value matches the schema of `never`, which is no question of effort.
        refused = strict or (api in FORMATS and name.endswith(" never"))
        if reason and refused:
            assert answer.status_code == 400, (api, strict, choice)
            assert reason in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200, (api, strict, choice, answer.text)


def test_each_two_of_api_strict_and_choice_are_sent() -> None:
    choices = ("required", "auto")
    names = [name for name in NEWEST if not SCHEMAS[name][1]]
    for name in names:
        tools = [request for request in sent(name, choices) if request[0] in TOOLS]
        for fields in ((0, 1), (0, 2), (1, 2)):
            pairs = {tuple(request[field] for field in fields) for request in tools}
            assert len(pairs) == (4 if fields == (1, 2) else 6)
    pair = {request for name in names[:2] for request in sent(name, choices)}
    assert len(pair) == len(TOOLS) * 2 * 2 + len(FORMATS) * 2 * 2


@pytest.mark.parametrize("name", SOME)
def test_a_schema_is_taken_or_refused_by_its_keyword(bundled: Serving, name: str) -> None:
    check(bundled, name, "required")


@pytest.mark.parametrize(
    "name", [*long(NEWEST), *claimed(name for name in SCHEMAS if name not in NEWEST)]
)
def test_any_schema_is_taken_or_refused_by_its_keyword(
    bundled: Serving, name: str
) -> None:
    check(bundled, name, "required", "auto")


def test_what_is_not_enforced_is_named_in_a_header(bundled: Serving) -> None:
    unique = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    for sender, field in (
        (chat_tool, "tools.function.parameters"),
        (chat_format, "response_format.json_schema.schema"),
        (responses_tool, "tools.parameters"),
        (responses_format, "text.format.schema"),
        (messages_tool, "tools.input_schema"),
    ):
        path, body = sender(unique, False, "required")
        assert bundled.post(path, **body).headers["x-minfer-ignored"] == field
    # The compiler alone knows that nothing matches.
    never = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    path, body = chat_tool(never, False, "required")
    ignored = bundled.post(path, **body).headers["x-minfer-ignored"]
    assert ignored == "tools.function.parameters"
    for api in APIS:
        path, body = api({"type": "object"}, False, "required")
        assert "x-minfer-ignored" not in bundled.post(path, **body).headers
