"""The list of models as Anthropic's own SDK reads it, at OpenAI's address."""

from datetime import UTC, datetime

import anthropic
import pytest
from anthropic import Anthropic

from minfer.effects.serving.anthropic.models import card, list_json
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.model_names import Models
from tests.effects.served import Serving


def test_models(bundled: Serving) -> None:
    with Anthropic(base_url=bundled.url, api_key="-", max_retries=0) as client:
        page = client.models.list()
        assert [model.id for model in page] == ["bundled", "alias/of-it"]  # it ends
        assert (page.first_id, page.last_id) == ("bundled", "alias/of-it")
        for name in ("bundled", "alias/of-it"):
            model = client.models.retrieve(name)
            assert (model.id, model.type, model.display_name) == (name, "model", name)
            assert model.created_at <= datetime.now(UTC)
            assert model.max_input_tokens == bundled.llm.setup.config.max_model_len
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("claude")
        body = caught.value.body
        assert isinstance(body, dict)
        assert body["error"]["type"] == "not_found_error"


def test_without_the_header_it_is_openais(bundled: Serving) -> None:
    assert bundled.get("/v1/models").json()["object"] == "list"
    assert bundled.get("/v1/models/bundled").json()["object"] == "model"


def test_a_card() -> None:
    models = Models(("a", "b"), created=5, max_model_len=99)
    assert card(models, "b")["created_at"] == "1970-01-01T00:00:05Z"
    assert list_json(models)["has_more"] is False
    for name in ("c", ""):
        with pytest.raises(ApiError, match="there is a, b"):
            card(models, name)
