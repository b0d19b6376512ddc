"""Who has no key is let in nowhere but where none is needed; who has one, within it."""

import openai
import pytest
from openai import OpenAI

from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys, digest
from minfer.effects.serving.access.authentication import Caller, caller_of
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.records.messages import Submit
from tests.effects.served import serving
from tests.effects.serving.raw_requests import SLOW


@pytest.mark.long
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
        refused = served.get("/v1/models")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert served.get("/v1/nonsense").status_code == 401
        for odd, status in (
            (b"Bearer \xff", 401),
            (b"Bearer", 401),
            (b"Basic secret", 401),
            (b"secret", 401),
            (b"bearer secret", 200),  # the scheme's case does not matter
            (b"BEARER  secret", 200),
        ):
            headers = {"authorization": odd}
            # Httpx takes bytes too.
            response = served.http.get(f"{url}/models", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == status, odd
        anthropics = {"x-api-key": "secret"}
        assert served.http.get(f"{url}/models", headers=anthropics).status_code == 200
        both_keys = {"x-api-key": "secret", "authorization": "Bearer of another"}
        assert served.http.get(f"{url}/models", headers=both_keys).status_code == 200
        for bad in ("Secret", "", "Bearer secret"):
            response = served.http.get(f"{url}/models", headers={"x-api-key": bad})
            assert response.status_code == 401
        record = served.http.post(f"{url}/messages", json={}).json()
        assert record["error"]["type"] == "authentication_error"
        assert served.get("/docs").status_code == 401
        assert served.get("/openapi.json").status_code == 200
        assert served.http.post(f"{served.url}/tokenize", json={}).status_code == 401
        assert served.get("/health").status_code == 200
        assert served.get("/metrics").status_code == 200


TEAM = ApiKey("team", digest(b"sk-t"), priority=-4)
FREE = ApiKey("free", digest(b"sk-f"))


@pytest.mark.long
def test_a_key_gives_client_name_and_priority(folder: str) -> None:
    bounds = ServerBounds(keys=ApiKeys((TEAM, FREE)))
    with serving(folder, service={"bounds": bounds}, **{**SLOW, "step": 0}) as served:
        for key, user in (("sk-t", "one user"), ("sk-f", "a user")):
            response = served.http.post(
                f"{served.url}/v1/completions",
                json={"prompt": [5], "max_tokens": 1, "priority": 7, "user": user},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == 200
        submitted = [e for turn, _ in served.turns for e in turn if isinstance(e, Submit)]
    clients = [(submit.request.client, submit.request.priority) for submit in submitted]
    assert clients == [("team", -4), ("free", 7)]


def test_a_client_without_a_key_is_identified_by_its_address() -> None:
    assert caller_of({"client": ("10.0.0.7", 5)}) == Caller("10.0.0.7")
    assert caller_of({"client": None}) == caller_of({}) == Caller("")
