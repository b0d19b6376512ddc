"""Reads the prompt, the user, the session and the model in the body of a request."""

from typing import Final

import msgspec
from attrs import field, frozen
from starlette.datastructures import Headers
from starlette.types import Scope

from minfer.blocks.keys import Keys
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.proxy.prompt_keys import read_fields, text_keys
from minfer.effects.proxy.token_keys import TokenKeys
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.coding import Decoder
from minfer.effects.text.tools.formats import AUTO

TOO_LARGE: Final = 413


@frozen(kw_only=True)
class PromptBody:
    """A body that was posted to `path`; it may have `max_bytes` once it is decoded."""

    path: str
    coding: str  # its Content-Encoding, or nothing
    max_bytes: int
    data: bytes


def prompt_body(scope: Scope, data: bytes, max_bytes: int) -> PromptBody:
    """The body of a request, as it came."""
    codings = Headers(scope=scope).getlist("content-encoding")
    return PromptBody(
        path=scope["path"], coding=", ".join(codings), max_bytes=max_bytes, data=data
    )


@frozen(kw_only=True)
class ReadPrompt:
    """The fields of a body that a router uses."""

    keys: Keys  # of the prompt's blocks
    tokens: int  # an estimate, where the prompt is text
    user: str
    session: str
    previous: str  # the response that it continues, or nothing
    model: str  # that is requested, or nothing
    output: int | None  # expected output tokens


@frozen(kw_only=True)
class KeyFacts:
    """The settings with which a worker computes keys."""

    model: str | None  # a folder with a tokenizer; None: keys are those of text
    block_size: int = 0  # tokens of a block, if there is a tokenizer
    # Of the servers:
    templates: TemplateSettings = field(factory=TemplateSettings)
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO


def read_prompt(body: PromptBody, tokens: TokenKeys | None) -> ReadPrompt:
    """Read a body. An invalid request has no keys: its backend refuses it. Raises
    ApiError if the body is too large once decoded.
    """
    data = decode(body)
    fields = read_fields(data)
    prompt = text_keys(fields, data) if tokens is None else tokens.read(body.path, data)
    return ReadPrompt(
        keys=prompt.keys,
        tokens=prompt.tokens,
        user=fields.user_id,
        session=fields.session,
        previous=fields.previous,
        model=fields.model if isinstance(fields.model, str) else "",
        output=fields.output,
    )


def decode(body: PromptBody) -> bytes:
    """A body without its Content-Encoding; empty if that is unknown or wrong. Raises
    ApiError.
    """
    if not body.coding:
        return body.data
    data = bytearray()
    try:
        for chunk in Decoder(body.coding).decode(body.data):
            data += chunk
            if len(data) > body.max_bytes:
                break
    except ApiError:
        return b""
    if len(data) > body.max_bytes:
        message = f"the body has more than {body.max_bytes} bytes once it is decoded"
        raise ApiError(message, status=TOO_LARGE)
    return bytes(data)


def read_record(data: bytes, tokens: TokenKeys | None) -> bytes:
    """The `ReadPrompt` of an encoded `PromptBody`, encoded. Raises ApiError."""
    body = msgspec.msgpack.decode(data, type=PromptBody)
    return msgspec.msgpack.encode(read_prompt(body, tokens))
