"""litellm, which turns one function into many providers' calls: two of them are ours."""

import asyncio
from typing import Any, Final

import pytest

from tests.effects.serving.sdk.cases import Table
from tests.effects.serving.sdk.servers import Servers

TABLE: Final = Table("litellm", ("litellm",))
case: Final = TABLE


def parameters(servers: Servers, **overrides: Any) -> dict[str, Any]:
    """Arguments of a completion, for a server like vLLM's."""
    return {
        "model": "hosted_vllm/bundled",
        "api_base": f"{servers.bundled.url}/v1",
        "messages": [{"role": "user", "content": "Write a Python function is_prime."}],
        "max_tokens": 8,
        "temperature": 0,
        "num_retries": 0,
        **overrides,
    }


@case("completion: a message, why it ended, usage")
def _(servers: Servers) -> None:
    import litellm

    completion = litellm.completion(**parameters(servers))
    assert completion.choices[0].message.content
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 8


@case("completion(stream=True): parts of what comes whole")
def _(servers: Servers) -> None:
    import litellm

    chunks = litellm.completion(**parameters(servers, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole_text = litellm.completion(**parameters(servers)).choices[0].message.content
    assert text == whole_text


@case("completion: as the provider `openai`")
def _(servers: Servers) -> None:
    import litellm

    completion = litellm.completion(
        **parameters(servers, model="openai/bundled", api_key="-")
    )
    assert completion.choices[0].message.content


@case("acompletion: in an event loop, whole and streamed")
def _(servers: Servers) -> None:
    import litellm

    async def both() -> tuple[str, str]:
        completion = await litellm.acompletion(**parameters(servers))
        stream = await litellm.acompletion(**parameters(servers, stream=True))
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return completion.choices[0].message.content, "".join(texts)

    whole_text, streamed = asyncio.run(both())
    assert whole_text == streamed


@case("text_completion: a prompt is continued")
def _(servers: Servers) -> None:
    import litellm

    fields = parameters(
        servers, prompt="import os\n", model="text-completion-openai/bundled"
    )
    del fields["messages"]
    completion = litellm.text_completion(**fields, api_key="-")
    assert completion.choices[0].text


@case("NotFoundError, BadRequestError: litellm's own classes")
def _(servers: Servers) -> None:
    import litellm

    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**parameters(servers, model="hosted_vllm/gpt-9"))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**parameters(servers, temperature=-1))
