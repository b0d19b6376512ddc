"""Embeddings: which inputs may be sent, and answers as OpenAI's SDK reads them."""

import json
from base64 import b64decode
from typing import Any, get_args

import numpy as np
import openai
import pytest
from openai import OpenAI

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.embeddings import (
    MAX_INPUTS,
    EmbeddingBody,
    EmbeddingList,
)
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.records.request import POOLINGS
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import STAMP, delta, refused


def body(**fields: Any) -> EmbeddingBody:
    return read_body(EmbeddingBody, json.dumps({"input": "x", **fields}).encode())


@pytest.mark.parametrize(
    ("input_value", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_form_of_an_input(input_value: Any, inputs: Any) -> None:
    assert body(input=input_value).input == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "64"}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"stream": True}, "stream"),
    ],
)
def test_a_body_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    error = refused(EmbeddingBody, json.dumps({"input": "x", **fields}).encode())
    assert error.param == param


def test_the_pooling_field_has_the_values_of_the_engine() -> None:
    assert get_args(EmbeddingBody.model_fields["pooling"].annotation) == POOLINGS


def test_an_answer_without_a_vector_is_the_servers_fault(bundled: Serving) -> None:
    writer = EmbeddingList(STAMP, body().generation(bundled.llm), None)
    with pytest.raises(ApiError, match="gave no vector") as caught:
        writer.write(0, delta("", "length"))
    assert caught.value.status == 500


def test_the_sdk_reads_base64_and_floats_alike(client: OpenAI) -> None:
    inputs = ["import os", "def f(x):", "class A"]
    # The SDK asks for base64 unless it is told otherwise.
    usual = client.embeddings.create(model="bundled", input=inputs)
    plain = client.embeddings.create(
        model="bundled", input=inputs, encoding_format="float"
    )
    assert [embedding.index for embedding in usual.data] == [0, 1, 2]
    assert usual.object == plain.object == "list"
    assert usual.model == "bundled"
    assert usual.usage.total_tokens == usual.usage.prompt_tokens > 3
    for from_base64, from_floats in zip(usual.data, plain.data, strict=True):
        np.testing.assert_allclose(
            from_base64.embedding, from_floats.embedding, atol=1e-5
        )
        assert np.linalg.norm(from_base64.embedding) == pytest.approx(1, abs=1e-5)
    first, second, third = (np.array(embedding.embedding) for embedding in usual.data)
    assert not np.allclose(first, second, atol=1e-2)
    assert not np.allclose(second, third, atol=1e-2)


@pytest.mark.long
def test_token_ids_and_text_and_poolings(client: OpenAI, bundled: Serving) -> None:
    def made(input_value: Any, **fields: Any) -> list[float]:
        answer = client.embeddings.create(
            model="bundled", input=input_value, encoding_format="float", extra_body=fields
        )
        return answer.data[0].embedding

    record = bundled.http.post(
        f"{bundled.url}/tokenize", json={"prompt": "def f(x):"}
    ).json()["tokens"]
    np.testing.assert_allclose(made("def f(x):"), made(record), atol=1e-4)
    np.testing.assert_allclose(made([record]), made(record), atol=1e-4)
    mean = np.array(made(record, pooling="mean", normalize=False))
    assert np.linalg.norm(mean) != pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(
        mean / np.linalg.norm(mean), made(record, pooling="mean"), atol=1e-5
    )
    size = len(mean)
    assert made(record, dimensions=size) == pytest.approx(made(record), abs=1e-4)


def test_base64_is_float32_in_little_endian_order(bundled: Serving) -> None:
    record = [
        bundled.post("embeddings", input=[7, 8], encoding_format=form).json()
        for form in ("float", "base64")
    ]
    plain, packed = (answer["data"][0]["embedding"] for answer in record)
    np.testing.assert_allclose(np.frombuffer(b64decode(packed), "<f4"), plain, atol=1e-5)
    assert record[0]["id"].startswith("embd-")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": [10**9]}, "input", "outside the vocabulary"),
        ({"input": [5] * 5000}, "input", "maximum context length is"),
        ({"input": "a", "dimensions": 7}, "dimensions", "leave it out"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    client: OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.embeddings.create(model="bundled", **fields)
    assert caught.value.param == param


def test_an_answer_can_be_looked_up(bundled: Serving) -> None:
    name = bundled.post("embeddings", input=["a", "b"]).json()["id"]
    path = f"/v1/requests/{name}"  # the answer may be here before it is noted
    bundled.until(lambda: bundled.get(path).json()["state"] == "ended")
    record = bundled.get(path).json()
    assert [prompt["output_tokens"] for prompt in record["prompts"]] == [0, 0]
    assert all(prompt["latency"] > 0 for prompt in record["prompts"])
