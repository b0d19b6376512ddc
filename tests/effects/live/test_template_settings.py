"""The settings of conversations: what is rendered with them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer import LLM
from minfer.effects.live.errors import RequestError
from minfer.effects.live.input_processing.template_settings import (
    TemplateSettings,
    parsers_of,
    template_settings,
    with_template_read,
)
from minfer.effects.setup.custom_template import CustomTemplate
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.effects.text.template_switches import template_switches
from minfer.effects.text.tools.formats import Parsers
from minfer.values.checks import ConfigError
from tests.effects.scripted import write_talker

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
# It shows its variables, and how it calls tools.
FLAVOURED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ flavour or 'plain' }}{% if enable_thinking %}<think>{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
)
SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def text_of(llm: LLM, **options: Any) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(llm.render(CHAT, **options), skip_special_tokens=False)


def test_everything_follows_the_template_in_force(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_talker(tmp_path / "m")
    file = tmp_path / "t.jinja"
    file.write_text(FLAVOURED)
    defaults = {"flavour": "sweet"}
    with LLM(
        path,
        executor="dry",
        chat_template=file,
        default_chat_template_kwargs=defaults,
    ) as llm:
        file.write_text("changed")  # it was read
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(Path(path) / "tokenizer.json"), chat_template=FLAVOURED
        )
        for variables in ({}, {"flavour": "sour"}, {"other": 1}, {"flavour": None}):
            expected = tokenizer.apply_chat_template(
                CHAT, tokenize=False, add_generation_prompt=True, **defaults | variables
            )
            assert text_of(llm, chat_template_kwargs=variables) == expected
        assert text_of(llm).endswith("sweet")
        assert llm.parsers == Parsers("mistral", "none")
        assert llm.get_tokenizer().chat_template == FLAVOURED
        assert llm.tokenizer is not None
        switches = template_switches(llm.tokenizer, tools=False)
        assert switches.on is not None  # by a probe of this template
        output = llm.chat(CHAT, use_tqdm=False)[0]
        assert output.prompt == text_of(llm)


def test_a_model_of_several_templates_has_the_given_one_alone(tmp_path: Path) -> None:
    path = Path(write_talker(tmp_path / "m", "plain {{ messages }}"))
    templates = path / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("with tools <tool_call>")
    with LLM(str(path), executor="dry", chat_template=FLAVOURED) as llm:
        assert text_of(llm, tools=[TOOL]).startswith("<user>hiplain[AVAILABLE_TOOLS]")


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ messages }}\n\n{% if %}", "line 3: Expected an expression"),
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        ("{{ a | no_such_filter }}", "line 1: No filter named"),
        ("\n{{ 'a }}", "line 2: unexpected char"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "it cannot be compiled"),
    ],
)
def test_an_error_in_a_template_is_reported_before_loading(
    tmp_path: Path, template: str, line: str
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template)
    for value, source in ((file, str(file)), (template, "the text of the setting")):
        with pytest.raises(ConfigError) as caught:
            with_template_read(EngineArgs(chat_template=value))
        error = str(caught.value)
        assert error.startswith(f"chat_template ({source}): {line}")
        assert error.endswith("correct the template")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        *(
            ({name: True}, f"default_chat_template_kwargs cannot set '{name}'")
            for name in (
                "messages",
                "tools",
                "add_generation_prompt",
                "continue_final_message",
                "chat_template",
                "chat_template_kwargs",
                "tokenize",
            )
        ),
        ({5: 1}, "names are strings, not 5"),
        ({"a": deep(65)}, "'a' must be JSON, at most 64 lists and objects deep"),
        ({"a": deep(100_000)}, "'a' must be JSON"),
        ({"a": {"b": {1, 2}}}, "'a' must be JSON"),
        ({"a": float("nan")}, "'a' must be JSON"),
    ],
)
def test_variables_that_are_refused(defaults: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        template_settings(EngineArgs(default_chat_template_kwargs=defaults))


def test_requests_cannot_set_the_same_names(tmp_path: Path) -> None:
    path = write_talker(tmp_path / "m")
    with LLM(path, executor="dry") as llm:
        for name in ("messages", "tools", "chat_template", "tokenize"):
            with pytest.raises(ChatTemplateError, match=f"cannot set '{name}'"):
                llm.render(CHAT, chat_template_kwargs={name: True})


def test_settings_are_plain_data() -> None:
    args = EngineArgs(
        chat_template=FLAVOURED, default_chat_template_kwargs={"a": deep(60)}
    )
    read = with_template_read(args)
    assert isinstance(read.chat_template, CustomTemplate)
    assert with_template_read(read) == read
    settings = template_settings(read)
    assert settings == TemplateSettings(template=FLAVOURED, defaults={"a": deep(60)})
    json.dumps(settings.defaults)


def test_parsers_are_named_by_settings(tmp_path: Path) -> None:
    path = write_talker(tmp_path / "m")
    with LLM(path, executor="dry", tool_call_parser="mistral") as llm:
        assert llm.parsers == Parsers("mistral", "think")
    assert parsers_of(EngineArgs(reasoning_parser="none")) == Parsers("auto", "none")
    with pytest.raises(ConfigError, match="there is no tool parser 'x'; use one of"):
        with_template_read(EngineArgs(tool_call_parser="x"))


def test_tools_of_an_unknown_format_are_refused(tmp_path: Path) -> None:
    path = write_talker(tmp_path / "m", SILENT)
    with LLM(path, executor="dry", tool_call_parser="none") as llm:
        (output,) = llm.chat(CHAT, tools=[TOOL], use_tqdm=False)
        assert output.prompt is not None
        assert "'f'" in output.prompt
    with LLM(path, executor="dry") as llm:
        for ask in (llm.chat, llm.stream_chat):
            with pytest.raises(RequestError, match="set tool_call_parser to") as caught:
                ask(CHAT, tools=[TOOL])
            assert caught.value.param == "tools"
            ask(CHAT, tools=[])
