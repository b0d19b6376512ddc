"""Log-probabilities in the shapes of both endpoints, from records and from a model."""

import math
from typing import Any

import pytest
from openai import OpenAI

from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.outputs import Logprob
from minfer.effects.text.tokenizer import Tokenizer
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import (
    chat,
    completion,
    delta,
    read,
    served,
    writer_of,
)


def token_text() -> tuple[Tokenizer, list[dict[int, Logprob]]]:
    """The two tokens of a character whose bytes they share, and one whose rivals are
    impossible.
    """
    tokenizer = Tokenizer(bundled_folder())
    snow = tokenizer.encode("x\u2603y", add_special_tokens=False)
    assert len(snow) > 3
    scores = []
    for place, token in enumerate(snow):
        own_score = Logprob(
            -0.5 - place, 3, tokenizer.token_bytes(token).decode(errors="replace")
        )
        rivals = {i: Logprob(-0.1 * i, i, str(i)) for i in (1, 2)}
        scores.append({token: own_score, **rivals, 300: Logprob(-math.inf, 4, "\ufffd")})
    return tokenizer, scores


def test_log_probabilities_of_a_completion() -> None:
    tokenizer, scores = token_text()
    writer = writer_of(completion(logprobs=3, stream=True), tokenizer)
    first_events = writer.write(0, delta("x", None, scores[:1]))
    ended = writer.write(0, delta("\u2603y", "stop", scores[1:]))
    first, second = read([*first_events, *ended])
    halves = [chunk["choices"][0]["logprobs"] for chunk in (first, second)]
    joined = {name: halves[0][name] + halves[1][name] for name in halves[0]}
    assert joined["token_logprobs"] == [-0.5 - i for i in range(len(scores))]
    assert joined["tokens"] == ["x", *["\ufffd"] * (len(scores) - 2), "y"]
    # Bytes that go on with a character are where it ends.
    assert joined["text_offset"] == [0, 1, *[2] * (len(scores) - 2)]
    assert joined["top_logprobs"][0] == {
        "x": -0.5,
        "1": -0.1,
        "2": -0.2,
        "\ufffd": -9999.0,
    }
    # Where a rival is spelled as the token itself is, the token itself is told of.
    assert joined["top_logprobs"][1] == {"\ufffd": -1.5, "1": -0.1, "2": -0.2}
    (empty,) = read(writer.write(0, delta("", None, ())))
    assert empty["choices"][0]["logprobs"] is None


def test_log_probabilities_of_a_conversation() -> None:
    tokenizer, scores = token_text()
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    writer = writer_of(chat(**fields), tokenizer)
    writer.write(0, delta("x\u2603y", "stop", scores))
    (answer,) = read(writer.end(served(1, 1, 0)))
    logprobs = answer["choices"][0]["logprobs"]
    content = logprobs["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "x\u2603y"
    assert [token["token"] for token in content] == [
        "x",
        *["\ufffd"] * (len(scores) - 2),
        "y",
    ]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["1", "2", "x"]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.1, -0.2, -0.5]
    writer = writer_of(chat(**fields, stream=True), tokenizer)
    first_events = writer.write(0, delta("x", None, scores[:1]))
    events = read([*first_events, *writer.write(0, delta("", "stop", scores[1:]))])
    next_scores = [event["choices"][0]["logprobs"] for event in events]
    assert [len(chunk["content"]) if chunk else 0 for chunk in next_scores] == [
        0,
        1,
        len(scores) - 1,
        0,
    ]
    assert [
        item for chunk in next_scores if chunk for item in chunk["content"]
    ] == content
    assert events[2]["choices"][0]["delta"] == {"content": ""}


def test_tokens_without_a_tokenizer_are_named_by_their_ids() -> None:
    writer = writer_of(completion(logprobs=1))
    scores = [{7: Logprob(-1.0, 2), 9: Logprob(-0.5, 1)}]
    writer.write(0, delta("", "stop", scores))
    (answer,) = read(writer.end(served(1, 1, 0)))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"token_id:7": -1.0, "token_id:9": -0.5}]


@pytest.mark.long
def test_log_probabilities_of_completions(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "bundled",
        "prompt": "def add(a",
        "logprobs": 2,
        "temperature": 1.5,
        "seed": 2,
        "max_tokens": 15,
    }
    choice = client.completions.create(**fields).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens
    assert scores.token_logprobs
    assert scores.top_logprobs
    assert scores.text_offset
    for token, score, top in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
    ):
        assert top[token] == score <= 0
        assert len(top) in (2, 3)
    for offset, token in zip(scores.text_offset, scores.tokens, strict=True):
        assert choice.text.startswith(token, offset) or offset == len(choice.text)
    streamed: list[Any] = []
    with client.completions.create(**fields, stream=True) as stream:
        streamed += [
            chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs
        ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for chunk in streamed for item in getattr(chunk, name)] == getattr(
            scores, name
        )
    plain = client.completions.create(**{**fields, "logprobs": None}).choices[0]
    assert (plain.text, plain.logprobs) == (choice.text, None)
    bare = client.completions.create(**{**fields, "logprobs": 0}).choices[0].logprobs
    assert bare is not None
    assert bare.token_logprobs == scores.token_logprobs
    assert [len(top) for top in bare.top_logprobs or ()] == [1] * len(scores.tokens)


@pytest.mark.long
def test_log_probabilities_of_conversations(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "bundled",
        "logprobs": True,
        "top_logprobs": 4,
        "seed": 8,
        "messages": [{"role": "user", "content": "def f("}],
        "max_tokens": 15,
        "n": 2,
    }
    completion = client.chat.completions.create(**fields)
    contents: list[list[Any]] = [[], []]
    for choice in completion.choices:
        assert choice.logprobs is not None
        contents[choice.index] = choice.logprobs.content or []
        text = b"".join(
            bytes(token.bytes or ()) for token in contents[choice.index]
        ).decode()
        assert choice.message.content
        assert text.startswith(choice.message.content)
        for token in contents[choice.index]:
            assert token.bytes == [*token.token.encode()]
            values = [top.logprob for top in token.top_logprobs]
            assert len(values) == 4
            assert values == sorted(values, reverse=True)
            assert token.logprob in values or token.logprob <= values[-1]
    streamed: list[list[Any]] = [[], []]
    with client.chat.completions.create(**fields, stream=True) as stream:
        for chunk in stream:
            for news in chunk.choices:
                streamed[news.index] += (news.logprobs and news.logprobs.content) or []
    assert streamed == contents
    plain = client.chat.completions.create(
        **{**fields, "logprobs": False, "top_logprobs": 0}
    )
    assert [c.message.content for c in plain.choices] == [
        c.message.content for c in completion.choices
    ]
    assert all(choice.logprobs is None for choice in plain.choices)


def test_log_probabilities_need_a_model(slow: Serving) -> None:
    answer = slow.post("completions", prompt="x", logprobs=0)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "logprobs"
    assert "the oracle executor has no model" in error["message"]
