"""A likeness of a model prepares as the model itself does."""

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.input_workers.task import ModelFacts, WorkerModel, prepare
from minfer.effects.serving.openai.chat_completions import ENDPOINT as CHAT
from minfer.effects.serving.openai.completions import ENDPOINT as COMPLETIONS
from minfer.effects.serving.protocol import Endpoint
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.text.tools.formats import Parsers, Parsing
from tests.effects.scripted import write_talker

MODELS = Models(("bundled",), 0, 2048)
MESSAGES = [{"role": "user", "content": "Write a Python function is_prime."}]


@pytest.fixture(scope="module")
def likeness(llm: AsyncLLM) -> WorkerModel:
    facts = ModelFacts.of(llm, ("bundled",))
    travelled = msgspec.json.decode(msgspec.json.encode(facts), type=ModelFacts)
    assert travelled == facts
    return WorkerModel(travelled)


BODIES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "a text": (COMPLETIONS, {"prompt": "def f(", "echo": True, "cache_salt": "s"}),
    "ids": (COMPLETIONS, {"prompt": [[5, 6], [7]], "n": 2, "temperature": 0}),
    "messages": (CHAT, {"messages": MESSAGES, "stream": True, "user": "me"}),
    "an open end": (
        CHAT,
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "def "}],
            "continue_final_message": True,
            "chat_template_kwargs": {"a": {"b": [1, None]}},
        },
    ),
}


@pytest.mark.parametrize(("endpoint", "body"), BODIES.values(), ids=BODIES)
def test_both_prepare_alike(
    llm: AsyncLLM, likeness: WorkerModel, endpoint: Endpoint, body: dict[str, Any]
) -> None:
    data = json.dumps(body).encode()
    result = prepare(endpoint, data, likeness, MODELS)
    assert result == prepare(endpoint, data, llm, MODELS)
    assert result.model == "bundled"


def test_both_know_how_the_model_writes_calls(tmp_path: Path) -> None:
    path = write_talker(tmp_path / "m")
    tool = {"type": "function", "function": {"name": "f"}}
    data = json.dumps({"messages": MESSAGES, "tools": [tool]}).encode()
    with contextlib.closing(AsyncLLM(path, executor="dry")) as llm:
        llm.set_parsers(Parsers("mistral", "think"))
        result = prepare(
            CHAT, data, WorkerModel(ModelFacts.of(llm, ("bundled",))), MODELS
        )
        assert result == prepare(CHAT, data, llm, MODELS)
    expected = Parsing(tools="mistral", reasoning="think", names=("f",))
    assert result.request.parsing == expected


def test_the_model_is_looked_for_before_its_prompt_is_read(likeness: WorkerModel) -> None:
    data = json.dumps({"model": "other", "prompt": "\udfff"}).encode()
    with pytest.raises(ApiError) as caught:
        prepare(COMPLETIONS, data, likeness, MODELS)
    assert caught.value.status in (400, 404)
    data = json.dumps({"model": "other", "prompt": [-1]}).encode()
    with pytest.raises(ApiError) as caught:
        prepare(COMPLETIONS, data, likeness, MODELS)
    assert caught.value.code == "model_not_found"


def test_without_a_tokenizer() -> None:
    facts = ModelFacts(
        folder=None,
        vocab_size=9,
        hidden_size=9,
        max_model_len=9,
        default_params={},
        names=("bundled",),
    )
    result = prepare(COMPLETIONS, b'{"prompt": [8]}', WorkerModel(facts), MODELS)
    assert result.request.prompts[0].ids == (8,)
