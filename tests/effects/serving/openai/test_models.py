"""The list of models, as OpenAI's own SDK reads it."""

import openai
import pytest
from openai import OpenAI

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.model_names import Models
from tests.effects.served import Serving


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled", "alias/of-it"]
    for name in ("bundled", "alias/of-it"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", "minfer")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_the_bundled_model_is_named_as_such(bundled: Serving) -> None:
    cards = bundled.get("/v1/models").json()["data"]
    assert {card["bundled"] for card in cards} == {True}


def test_the_first_name_is_the_default() -> None:
    models = Models(("a", "b"), created=5, max_model_len=99)
    assert [models.resolve(name) for name in (None, "", "b")] == ["a", "a", "b"]
    for name in ("c", ""):
        with pytest.raises(ApiError, match="there is a, b") as caught:
            models.card(name)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert models.card("a")["chat"] is True
    assert Models(("a",), 5, 99, chat=False).card("a")["chat"] is False
    assert models.card("a")["bundled"] is False
    assert models.list_json()["data"] == [models.card("a"), models.card("b")]
