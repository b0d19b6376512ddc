"""What a model can be made with is said in its signature, and nowhere otherwise."""

import asyncio
import contextlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import pytest

from minfer import LLM, AsyncLLM, SamplingParams
from minfer.effects.execution.warming.start_progress import Report, ignore_progress
from minfer.effects.live.served_model import ServedModel
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.text.chat_templates import (
    ChatOptions,
    Conversation,
    Conversations,
    Tools,
)
from minfer.effects.text.tools.formats import Parsers
from tests.effects.scripted import say, write_talker

CHATS = [ServedModel.render, LLM.chat, LLM.stream_chat, AsyncLLM.chat]
NAMES: Any = {
    "ChatOptions": ChatOptions,
    "Conversation": Conversation,
    "Conversations": Conversations,
    "Tools": Tools,
}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_signature_is_that_of_the_settings(kind: type[ServedModel]) -> None:
    fields = attrs.fields(EngineArgs)
    types = get_type_hints(EngineArgs)
    parameters = dict(inspect.signature(kind).parameters)
    assert list(parameters) == [field.name for field in fields]
    for field in fields:
        parameter = parameters[field.name]
        assert parameter.default == field.default, field.name
        assert parameter.annotation == types[field.name], field.name
        positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert positional == (field.name == "model")


def test_every_setting_arrives() -> None:
    """Each under its own name: what a setting is made of reaches the engine's."""
    odd: dict[str, Any] = {
        field.name: f"odd {field.name}" for field in attrs.fields(EngineArgs)
    }
    received: list[EngineArgs] = []

    class Model(ServedModel):
        def _open(self, args: EngineArgs, report: Report = ignore_progress) -> None:
            del report
            received.append(args)

    with attrs.validators.disabled():
        Model(**odd)
    assert attrs.asdict(received[0], recurse=False) == odd


@pytest.mark.parametrize("method", CHATS)
def test_a_conversations_options_are_named(method: Any) -> None:
    types = get_type_hints(ChatOptions)
    parameters = inspect.signature(method).parameters
    hints = get_type_hints(method, localns=NAMES)
    defaults = {
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": None,
    }
    assert defaults.keys() == types.keys()
    for name, default in defaults.items():
        assert parameters[name].kind is parameters[name].KEYWORD_ONLY
        assert parameters[name].default == default
        assert hints[name] == types[name]


def test_an_unknown_setting_is_refused_by_the_class_that_was_called() -> None:
    with pytest.raises(
        TypeError,
        match=r"AsyncLLM has no setting 'modle'; did you mean model.*max_num_seqs",
    ):
        AsyncLLM(modle="x")  # type: ignore[call-arg]  # the point


@pytest.mark.long
def test_a_model_without_torch_needs_none() -> None:
    code = (
        "import sys; from minfer import LLM; llm = LLM(executor='dry'); "
        "llm.generate('a'); llm.close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_how_a_model_writes_is_what_its_template_shows(tmp_path: Path) -> None:
    path = write_talker(tmp_path / "m", special=["[ARGS]"])
    with contextlib.closing(AsyncLLM(path, executor="dry")) as llm:
        assert llm.parsers == Parsers("hermes", "think")
        llm.set_parsers(Parsers("json", "none"))
        assert llm.parsers == Parsers("json", "none")


def test_special_tokens_may_be_shown(tmp_path: Path) -> None:
    path = write_talker(tmp_path / "m", special=["[ARGS]", "[X]"])
    params = SamplingParams(temperature=0, max_tokens=99)
    with contextlib.closing(AsyncLLM(path, executor="dry")) as llm:
        say(llm, "a[X][ARGS]b")

        async def text(*shown: str) -> str:
            outputs = llm.generate_deltas("x", params, shown=shown)
            return "".join([output.outputs[0].text async for output in outputs])

        async def both() -> tuple[str, str]:
            return await text(), await text("[ARGS]", "b", "[Y]")

        assert asyncio.run(both()) == ("ab", "a[ARGS]b")
