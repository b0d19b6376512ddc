"""The list of models, as OpenAI's own SDK reads it."""

import openai
import pytest
from openai import OpenAI


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled", "alias/of-it"]
    for name in ("bundled", "alias/of-it"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", "minfer")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
