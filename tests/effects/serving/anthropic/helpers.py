"""What tests of Anthropic's endpoints ask for."""

import json
from typing import Any

import pytest

from minfer.effects.serving.anthropic.create_message import MessagesBody
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.bodies import read_body

HI: list[Any] = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> MessagesBody:
    request = {"messages": HI, "max_tokens": 5, **fields}
    return read_body(MessagesBody, json.dumps(request).encode())


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body(**fields)
    assert caught.value.status == 400
    return caught.value
