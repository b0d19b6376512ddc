"""Who has no key is let in nowhere but where none is needed; who has one, within it."""

import openai
import pytest
from openai import OpenAI

from minfer.effects.serving.authentication import (
    Caller,
    caller_of,
    pay_output,
    pay_prompt,
)
from minfer.effects.serving.bounds import Bounds
from minfer.effects.serving.errors import ApiError
from minfer.effects.serving.keys import Bucket, Key, Keys, digest
from minfer.messages import Submit
from tests.effects.served import Serving, serving
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
            found = served.http.get(f"{url}/models", headers=headers)  # type: ignore[arg-type]
            assert found.status_code == status, odd
        anthropics = {"x-api-key": "secret"}
        assert served.http.get(f"{url}/models", headers=anthropics).status_code == 200
        both = {"x-api-key": "secret", "authorization": "Bearer of another"}
        assert served.http.get(f"{url}/models", headers=both).status_code == 200
        for bad in ("Secret", "", "Bearer secret"):
            found = served.http.get(f"{url}/models", headers={"x-api-key": bad})
            assert found.status_code == 401
        told = served.http.post(f"{url}/messages", json={}).json()
        assert told["error"]["type"] == "authentication_error"
        assert served.get("/docs").status_code == 401
        assert served.get("/openapi.json").status_code == 200
        assert served.http.post(f"{served.url}/tokenize", json={}).status_code == 401
        assert served.get("/health").status_code == 200
        assert served.get("/metrics").status_code == 200


TEAM = Key("team", digest(b"sk-t"), requests=Bucket(3), tokens=Bucket(1000), priority=-4)
FREE = Key("free", digest(b"sk-f"))


def ask(served: Serving, key: str, **fields: object) -> tuple[int, dict[str, str], str]:
    """Status, headers and error code of a completion's answer."""
    body = {"prompt": [5] * 100, "max_tokens": 10, "ignore_eos": True, **fields}
    found = served.http.post(
        f"{served.url}/v1/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
    )
    code = found.json().get("error", {}).get("code", "")
    return found.status_code, dict(found.headers), code


def test_keys_with_limits(folder: str) -> None:
    bounds = Bounds(keys=Keys((TEAM, FREE)))
    with serving(folder, service={"bounds": bounds}, **{**SLOW, "step": 0}) as served:
        status, headers, _ = ask(served, "sk-t", priority=7, user="somebody")
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == "2"
        assert 0 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 20
        # Less its prompt and its output.
        assert headers["x-ratelimit-remaining-tokens"] == "890"
        taken = [e for turn, _ in served.turns for e in turn if isinstance(e, Submit)]
        request = taken[0].request  # its key says who it is, and how urgent
        assert (request.client, request.priority) == ("team", -4)
        status, headers, _ = ask(served, "sk-t", temperature=-1)
        assert (status, headers["x-ratelimit-remaining-requests"]) == (400, "1")
        assert ask(served, "sk-t")[0] == 200
        status, headers, code = ask(served, "sk-t")
        assert (status, code) == (429, "rate_limit_exceeded")
        assert 0 < int(headers["retry-after"]) <= 20
        assert headers["x-ratelimit-remaining-requests"] == "0"
        for _ in range(5):
            status, headers, _ = ask(served, "sk-f", user="a user")
            assert status == 200
            assert not any(name.startswith("x-ratelimit") for name in headers)


def test_tokens_are_paid_for_when_they_are_known() -> None:
    key = Key("k", b"", tokens=Bucket(600, lambda: 0.0))
    assert key.tokens is not None
    pay_prompt(key, 500)
    pay_output(key, 400)
    assert key.tokens.level == -300
    with pytest.raises(ApiError, match="tokens of this minute") as caught:
        pay_prompt(key, 100)
    assert (caught.value.status, caught.value.retry_after) == (429, 40)
    pay_prompt(None, 10**9)
    pay_prompt(Key("free", b""), 10**9)


def test_who_has_no_key_is_known_by_its_address() -> None:
    assert caller_of({"client": ("10.0.0.7", 5)}) == Caller("10.0.0.7")
    assert caller_of({"client": None}) == caller_of({}) == Caller("")
