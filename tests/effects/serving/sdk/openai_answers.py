"""OpenAI's SDK: what is asked for, and comes."""

import asyncio
from typing import Any, Final

from openai import AsyncOpenAI, OpenAI

from tests.effects.serving.sdk.cases import Table
from tests.effects.serving.sdk.servers import Servers

TABLE: Final = Table("openai", ("openai",))
case: Final = TABLE
PROMPT: Final = "import os\n"
REQUESTED: Final[dict[str, Any]] = {"model": "bundled", "max_tokens": 8, "temperature": 0}
TEXT: Final[dict[str, Any]] = {**REQUESTED, "prompt": PROMPT}
TALK: Final[dict[str, Any]] = {
    **REQUESTED,
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
}


def to(servers: Servers) -> OpenAI:
    """A client of the bundled model."""
    url = f"{servers.bundled.url}/v1"
    return servers.kept(OpenAI(base_url=url, api_key="-", max_retries=0))


@case("completions.create: text, why it ended, usage")
def _(servers: Servers) -> None:
    completion = to(servers).completions.create(**TEXT)
    assert completion.object == "text_completion"
    assert completion.choices[0].text
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage
    assert completion.usage.completion_tokens == 8
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 8


@case("completions.create: a list of prompts, answered in its order")
def _(servers: Servers) -> None:
    client = to(servers)
    prompts = ["import os\n", "def f(x", "class A"]
    together = client.completions.create(**{**TEXT, "prompt": prompts})
    solo = [client.completions.create(**{**TEXT, "prompt": prompt}) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [
        completion.choices[0].text for completion in solo
    ]


@case("completions.create: a prompt of token ids")
def _(servers: Servers) -> None:
    completion = to(servers).completions.create(**{**TEXT, "prompt": [5, 6, 7]})
    assert completion.usage
    assert completion.usage.prompt_tokens == 3


@case("completions.create(echo=True): the prompt comes before the text")
def _(servers: Servers) -> None:
    completion = to(servers).completions.create(**TEXT, echo=True)
    assert completion.choices[0].text.startswith(PROMPT)


@case("completions.create(stream=True): parts of what comes whole")
def _(servers: Servers) -> None:
    client = to(servers)
    texts = [
        chunk.choices[0].text for chunk in client.completions.create(**TEXT, stream=True)
    ]
    assert "".join(texts) == client.completions.create(**TEXT).choices[0].text


@case("completions.create(n=3, seed=...): three samples, the same a second time")
def _(servers: Servers) -> None:
    client = to(servers)
    fields = {**TEXT, "temperature": 1, "n": 3, "seed": 5}
    first, second = (client.completions.create(**fields) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in second.choices]


@case("completions.create(stop=...): the text ends before it")
def _(servers: Servers) -> None:
    client = to(servers)
    whole_text = client.completions.create(**TEXT).choices[0].text
    stop = whole_text[5:7]
    completion = client.completions.create(**TEXT, stop=[stop]).choices[0]
    assert (completion.text, completion.finish_reason) == (
        whole_text[: whole_text.index(stop)],
        "stop",
    )


@case("completions.create(logprobs=2): tokens that spell the text, scored")
def _(servers: Servers) -> None:
    completion = to(servers).completions.create(**TEXT, logprobs=2).choices[0]
    scores = completion.logprobs
    assert scores
    assert "".join(scores.tokens or []) == completion.text
    assert all(score <= 0 for score in scores.token_logprobs or [])
    assert all(len(candidates) >= 2 for candidates in scores.top_logprobs or [])


@case("embeddings.create: a vector of length 1 for each input, usage")
def _(servers: Servers) -> None:
    inputs = ["import os\n", "def f(x"]
    embeddings = to(servers).embeddings.create(model="bundled", input=inputs)
    assert [embedding.index for embedding in embeddings.data] == [0, 1]
    for embedding in embeddings.data:
        assert abs(sum(x * x for x in embedding.embedding) - 1) < 1e-5
    assert embeddings.usage.total_tokens == embeddings.usage.prompt_tokens > 2


@case("chat.completions.create: a message, why it ended, usage")
def _(servers: Servers) -> None:
    completion = to(servers).chat.completions.create(**TALK)
    assert completion.object == "chat.completion"
    message = completion.choices[0].message
    assert (message.role, message.refusal) == ("assistant", None)
    assert message.content
    assert completion.usage
    assert completion.usage.prompt_tokens_details
    assert completion.usage.completion_tokens == 8


@case("chat.completions.create: an answer handed back as the SDK made it")
def _(servers: Servers) -> None:
    client = to(servers)
    first = client.chat.completions.create(**TALK).choices[0].message
    messages = [*TALK["messages"], first, {"role": "user", "content": "And its name?"}]
    assert client.chat.completions.create(**{**TALK, "messages": messages}).choices


@case("chat.completions.create: developers, names, and content in parts")
def _(servers: Servers) -> None:
    content_parts = [
        {"type": "text", "text": "Return the size"},
        {"type": "text", "text": "."},
    ]
    messages = [
        {"role": "developer", "content": "You write Python."},
        {"role": "user", "name": "me", "content": content_parts},
    ]
    completion = to(servers).chat.completions.create(**{**TALK, "messages": messages})
    assert completion.choices[0].message.content


@case("chat.completions.create(max_completion_tokens=...): as max_tokens")
def _(servers: Servers) -> None:
    request = {name: value for name, value in TALK.items() if name != "max_tokens"}
    completion = to(servers).chat.completions.create(**request, max_completion_tokens=3)
    assert completion.usage
    assert completion.usage.completion_tokens == 3


@case("chat.completions.create(stream=True): the role, parts, why it ended")
def _(servers: Servers) -> None:
    client = to(servers)
    chunks = list(client.chat.completions.create(**TALK, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == client.chat.completions.create(**TALK).choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1


@case("chat.completions.create(stream_options=...): usage in the last part")
def _(servers: Servers) -> None:
    options = {"include_usage": True}
    fields = {**TALK, "stream": True, "stream_options": options}
    *chunks, last = to(servers).chat.completions.create(**fields)
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 8)


@case("chat.completions.create(n=2, stream=True): parts of two samples")
def _(servers: Servers) -> None:
    fields = {**TALK, "temperature": 1, "seed": 1, "n": 2, "stream": True}
    chunks = list(to(servers).chat.completions.create(**fields))
    ended = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason]
    assert sorted(ended) == [0, 1]


@case("chat.completions.stream(): events, and the answer put together")
def _(servers: Servers) -> None:
    client = to(servers)
    fields = {**TALK, "stop": ["+"]}  # the SDK raises if the limit ends an answer
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole_text = client.chat.completions.create(**fields).choices[0].message.content
    assert completion.choices[0].message.content == whole_text


@case("chat.completions.create(logprobs=True, top_logprobs=2): each token's likeliest")
def _(servers: Servers) -> None:
    fields = {**TALK, "logprobs": True, "top_logprobs": 2}
    scores = to(servers).chat.completions.create(**fields).choices[0].logprobs
    assert scores
    assert len(scores.content or []) == 8
    for token in scores.content or []:
        # Greedy: what was taken is the likeliest.
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2


@case("extra_body: fields that are vLLM's, and minfer's own")
def _(servers: Servers) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "ignore_eos": True, "timing": True}
    fields = {**TALK, "temperature": 1, "extra_body": extra}
    client = to(servers)
    completion = client.chat.completions.create(**fields)
    greedy = client.chat.completions.create(**TALK)
    assert completion.choices[0].message.content == greedy.choices[0].message.content
    assert "timing" in (completion.model_extra or {})


@case("usage: a prompt that was seen before is found in the cache")
def _(servers: Servers) -> None:
    client = to(servers)
    fields = {**TEXT, "prompt": "def cached(a, b):\n    return a\n" * 20}
    client.completions.create(**fields)
    usage = client.completions.create(**fields).usage
    assert usage
    assert usage.prompt_tokens_details
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 64


@case("models.list, models.retrieve: all names, with slashes too")
def _(servers: Servers) -> None:
    client = to(servers)
    assert [model.id for model in client.models.list()] == ["bundled", "alias/of-it"]
    assert client.models.retrieve("alias/of-it").object == "model"


@case("with_raw_response: status and headers beside the answer")
def _(servers: Servers) -> None:
    raw = to(servers).completions.with_raw_response.create(**TEXT)
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().choices[0].text


@case(
    "with_raw_response: x-request-id, on errors too",
    "minfer.effects.serving.wire.request_ids",
)
def _(servers: Servers) -> None:
    client = to(servers)
    raw = client.completions.with_raw_response.create(**TEXT)
    assert raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    headers = {"x-request-id": "mine"}
    chosen = client.completions.with_raw_response.create(**TEXT, extra_headers=headers)
    assert chosen.headers["x-request-id"] == "mine"


@case("with_streaming_response: the body, line by line")
def _(servers: Servers) -> None:
    streaming = to(servers).completions.with_streaming_response
    with streaming.create(**TEXT, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@case("AsyncOpenAI: many at once, whole and streamed")
def _(servers: Servers) -> None:
    async def all_of_them() -> list[str]:
        url = f"{servers.bundled.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:

            async def one(i: int) -> str:
                if i % 2:
                    completion = await client.completions.create(**TEXT)
                    return str(completion.choices[0].text)
                stream = await client.completions.create(**TEXT, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*map(one, range(6))))

    assert len(set(asyncio.run(all_of_them()))) == 1


@case("a stream that is closed early is cancelled")
def _(servers: Servers) -> None:
    slow = servers.slow
    with OpenAI(base_url=f"{slow.url}/v1", api_key="-", max_retries=0) as client:
        fields = {"model": "tiny", "prompt": "x", "max_tokens": 90_000, "stream": True}
        stream = client.completions.create(**fields, extra_body={"ignore_eos": True})  # type: ignore[call-overload]  # a dict
        next(iter(stream))
        stream.close()
        slow.idle()
