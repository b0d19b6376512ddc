"""How a server's options of conversations act in every API: formats of calls that nobody
knows, templates, and variables that all requests have.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from minfer.blocks.keys import block_keys
from minfer.effects.cli.main import parser
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.proxy.prompt_bodies import (
    KeyFacts,
    PromptBody,
    ReadPrompt,
    read_prompt,
)
from minfer.effects.proxy.prompt_reader import PromptReader
from minfer.effects.proxy.prompt_worker import PromptWorker
from minfer.effects.proxy.token_keys import TokenKeys, tokens_root
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.processes import server
from minfer.effects.serving.request_parsing.answer_parsing import log_unknown_format
from minfer.effects.text.tools.formats import Parsers
from minfer.effects.text.tools.table import TOOLS
from minfer.values.checks import ConfigError
from tests.effects.scripted import hermes, say, write_talker
from tests.effects.served import Serving, serving

SILENT: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls or '' }}"
    "{% endfor %}{{ tools or '' }}"
)
FLAVOURED: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ flavour }}{% if tools %}<tool_call>{% endif %}"
)
MESSAGES: Final = [{"role": "user", "content": "hi"}]
LARGE: Final = [{"role": "user", "content": "hi " * 2000}]
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {}}
FUNCTION: Final = {"name": "f", "parameters": SCHEMA}
CHAT_TOOLS: Final = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Final = [{"type": "function", **FUNCTION}]
CLAUDE_TOOLS: Final = [{"name": "f", "input_schema": SCHEMA}]
# By path: a body with tools, and the tool choice that lets none of them be called.
APIS: Final[dict[str, tuple[dict[str, Any], Any]]] = {
    "chat/completions": ({"messages": MESSAGES, "tools": CHAT_TOOLS}, "none"),
    "responses": ({"input": "hi", "tools": FLAT_TOOLS}, "none"),
    "messages": (
        {"messages": MESSAGES, "max_tokens": 90, "tools": CLAUDE_TOOLS},
        {"type": "none"},
    ),
}
SWEET: Final[dict[str, Any]] = {
    "chat_template": FLAVOURED,
    "default_chat_template_kwargs": {"flavour": "sweet"},
}
SETTINGS: Final[dict[str, Any]] = {"executor": "dry", "num_gpu_blocks_override": 600}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_talker(tmp_path_factory.mktemp("talker") / "m", SILENT, context=2**13)


@pytest.fixture(scope="module")
def unknown(folder: str) -> Iterator[Serving]:
    with serving(folder, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def chosen(folder: str) -> Iterator[Serving]:
    with serving(folder, tool_call_parser="none", **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def flavoured(folder: str) -> Iterator[Serving]:
    with serving(folder, **SWEET, **SETTINGS) as server:
        yield server


@pytest.mark.parametrize("path", APIS)
def test_tools_of_an_unknown_format_are_refused_unless_none_can_be_called(
    unknown: Serving, path: str
) -> None:
    body, none = APIS[path]
    answer = unknown.post(path, **body)
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    assert unknown.post(path, **body, tool_choice=none).status_code == 200
    without = {name: value for name, value in body.items() if name != "tools"}
    assert unknown.post(path, **without).status_code == 200


@pytest.mark.parametrize("path", APIS)
def test_calls_stay_text_where_the_user_chose_none(chosen: Serving, path: str) -> None:
    text = hermes(("f", {}))
    say(chosen.llm, text)
    body, _ = APIS[path]
    answer = chosen.post(path, **body, temperature=0)
    assert answer.status_code == 200, answer.text
    assert json.dumps(text)[1:-1] in json.dumps(answer.json())
    assert '"tool_calls"' not in answer.text
    assert '"tool_use"' not in answer.text
    assert '"function_call"' not in answer.text


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
            "tools[0].function.strict",
        ),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_enforced_of_text_is_refused(
    chosen: Serving, path: str, fields: dict[str, Any], field: str
) -> None:
    body, _ = APIS[path]
    answer = chosen.post(path, **{**body, **fields})
    assert answer.status_code == 400
    assert f"{field}: cannot be enforced where calls stay text" in answer.text


def test_a_server_says_at_its_start_that_it_knows_no_format(
    unknown: Serving, chosen: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    log_unknown_format(chosen.llm)
    assert not caplog.records
    log_unknown_format(unknown.llm)
    (record,) = caplog.records
    line = record.getMessage()
    assert "\n" not in line
    assert "--tool-call-parser" in line
    assert all(name in line for name in (*TOOLS, "none"))


@pytest.mark.parametrize("messages", [MESSAGES, LARGE], ids=["small", "large"])
def test_variables_of_all_requests_come_behind_their_own(
    flavoured: Serving, messages: Any
) -> None:
    user_text = messages[0]["content"]
    assert flavoured.prompt_of(messages=messages) == f"<user>{user_text}sweet"
    own_fields = {"chat_template_kwargs": {"flavour": "sour"}}
    assert (
        flavoured.prompt_of(messages=messages, **own_fields) == f"<user>{user_text}sour"
    )
    lengths = [len(f"<user>{user_text}{flavour}") for flavour in ("sweet", "sour")]
    for fields, length in zip(({}, own_fields), lengths, strict=True):
        answer = flavoured.post("chat/completions", messages=messages, **fields)
        assert answer.json()["usage"]["prompt_tokens"] == length
    answer = flavoured.post("responses", input=user_text)
    assert answer.json()["usage"]["input_tokens"] == lengths[0]
    answer = flavoured.post("messages", messages=messages, max_tokens=5)
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == lengths[0]
    answer = flavoured.post("messages/count_tokens", messages=messages)
    assert answer.json()["input_tokens"] == lengths[0]


@pytest.mark.long
def test_workers_render_as_the_server_does(folder: str) -> None:
    bounds = ServerBounds(workers=1)
    with serving(folder, **SWEET, **SETTINGS, service={"bounds": bounds}) as server:
        text = server.prompt_of(messages=LARGE)
        assert text.endswith("sweet")
        assert server.service.receiver.pool.pids


def test_a_template_that_calls_makes_its_format_known(flavoured: Serving) -> None:
    assert flavoured.llm.parsers == Parsers("hermes", "none")
    assert flavoured.post("chat/completions", **APIS["chat/completions"][0]).is_success


def test_a_router_computes_the_keys_of_the_servers_prompts(folder: str) -> None:
    user_text = LARGE[0]["content"]
    data = json.dumps({"messages": LARGE, "tools": CHAT_TOOLS}).encode()
    path = "/v1/chat/completions"
    settings = TemplateSettings(template=FLAVOURED, defaults={"flavour": "sweet"})
    tokens = TokenKeys(folder, 16, settings, Parsers("none", "none"))
    prompt = f"<user>{user_text}sweet<tool_call>"
    ids = tokens._model.tokenizer.encode(prompt) if tokens._model.tokenizer else []
    expected = block_keys(tokens_root(), ids, 16)
    assert tokens.read(path, data).keys == expected
    body = PromptBody(path=path, coding="", max_bytes=2**20, data=data)
    facts = KeyFacts(
        model=folder,
        block_size=16,
        templates=settings,
        tool_parser="none",
        reasoning_parser="none",
    )
    worker = PromptWorker(facts)
    assert worker._tokens is not None
    for reads in (tokens, worker._tokens):
        read: ReadPrompt = read_prompt(body, reads)
        assert read.keys == expected
    own_template = json.dumps(
        {"messages": LARGE, "chat_template": "{{ messages }}"}
    ).encode()
    assert tokens.read(path, own_template).keys == ()  # which only servers render
    silent = TokenKeys(folder, 16)  # whose tools a server may take
    assert silent.read(path, data).keys
    assert PromptReader.start(tokens, 0).tokens is tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat-template", "missing.jinja"], "there is no file 'missing.jinja'"),
        (["--chat-template", "{% if %}"], "line 1: Expected an expression"),
        (["--default-chat-template-kwargs", '{"tools": []}'], "cannot set 'tools'"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(
    options: list[str], message: str
) -> None:
    arguments = parser().parse_args(
        ["serve", "--model", "no/model", "--api-key", "k", "--max-waiting", "1", *options]
    )
    with pytest.raises(ConfigError, match=message):
        server.read_options(arguments)


@pytest.mark.parametrize("value", ["{", "[1]", "5", '"x"', "[" * 100_000])
def test_variables_are_an_object(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--default-chat-template-kwargs", value])
    assert "not " in capsys.readouterr().err


def test_both_names_of_the_parser_of_calls() -> None:
    for name in ("--tool-call-parser", "--tool-parser"):
        options = parser().parse_args(["serve", name, "hermes"])
        assert options.tool_call_parser == "hermes"
    options = parser().parse_args(["route", "--tool-call-parser", "none"])
    assert options.tool_call_parser == "none"
    assert not parser().parse_args(["serve"]).trust_request_chat_template
