"""Who has no key is let in nowhere but where none is needed."""

import openai
import pytest
from openai import OpenAI

from tests.effects.served import serving
from tests.effects.serving.wire import SLOW


def test_an_api_key(folder: str) -> None:
    with serving(folder, service={"api_key": "secret"}, **{**SLOW, "step": 0}) as served:
        url = f"{served.url}/v1"
        with OpenAI(base_url=url, api_key="secret", max_retries=0) as right:
            assert right.completions.create(
                model="tiny", prompt="x", max_tokens=1
            ).choices
        with OpenAI(base_url=url, api_key="Secret", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                wrong.models.list()
            assert caught.value.code == "invalid_api_key"
        assert served.get("/v1/models").status_code == 401
        assert served.get("/v1/nonsense").status_code == 401
        odd = {"authorization": b"Bearer \xff"}
        # Httpx takes bytes too.
        assert served.http.get(f"{url}/models", headers=odd).status_code == 401  # type: ignore[arg-type]
        anthropics = {"x-api-key": "secret"}
        assert served.http.get(f"{url}/models", headers=anthropics).status_code == 200
        both = {"x-api-key": "secret", "authorization": "Bearer of another"}
        assert served.http.get(f"{url}/models", headers=both).status_code == 200
        for bad in ("Secret", "", "Bearer secret"):
            found = served.http.get(f"{url}/models", headers={"x-api-key": bad})
            assert found.status_code == 401
        told = served.http.post(f"{url}/messages", json={}).json()
        assert told["error"]["type"] == "authentication_error"
        assert served.get("/docs").status_code == 200
        assert served.get("/openapi.json").status_code == 200
        assert served.http.post(f"{served.url}/tokenize", json={}).status_code == 401
        assert served.get("/health").status_code == 200
        assert served.get("/metrics").status_code == 200
