"""An example of each exchange: what may be sent to an address, and what comes back.

They are part of the description. A test sends each body to a server, and holds its
answer against the example, field by field: what is shown here is what is sent.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

JsonObject = dict[str, Any]


@frozen(kw_only=True)
class Example:
    """A body, if there is one, and the answer to it."""

    body: JsonObject | None = None
    answer: JsonObject
    # Some of the events that come instead, with `stream`; "..." stands for more of them.
    events: tuple[JsonObject | str, ...] = ()

    @property
    def stream(self) -> str:
        """The events as they are sent."""
        return "\n".join(map(_framed, self.events))


def _framed(event: JsonObject | str) -> str:
    if isinstance(event, str):
        return f"{event}\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n"


_ASKED: Final = [{"role": "user", "content": "What is 17 + 25?"}]
_TEXT: Final = "17 + 25 = 42"
_USAGE: Final = {
    "prompt_tokens": 18,
    "completion_tokens": 11,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_CONTINUED: Final = {
    "prompt_tokens": 10,
    "completion_tokens": 10,
    "total_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_MODEL: Final = {
    "id": "bundled",
    "object": "model",
    "created": 1767225600,
    "owned_by": "minfer",
    "max_model_len": 2048,
    "chat": True,
}


def _chunk(delta: JsonObject, end: str | None = None) -> JsonObject:
    """A part of a streamed answer of a chat."""
    choice = {"index": 0, "logprobs": None, "delta": delta, "finish_reason": end}
    return {
        "id": "chatcmpl-42",
        "object": "chat.completion.chunk",
        "created": 1767225600,
        "model": "bundled",
        "choices": [choice],
    }


def _part(text: str, end: str | None = None) -> JsonObject:
    """A completion, or a part of one."""
    choice = {"index": 0, "logprobs": None, "text": text, "finish_reason": end}
    return {
        "id": "cmpl-42",
        "object": "text_completion",
        "created": 1767225600,
        "model": "bundled",
        "choices": [choice],
    }


_COMPLETION: Final = Example(
    body={
        "prompt": 'def fibonacci(n):\n    """Return',
        "max_tokens": 10,
        "temperature": 0,
    },
    answer={**_part(" the n-th Fibonacci number", "length"), "usage": _CONTINUED},
    events=(_part(" the"), "...", _part(" number", "length"), "data: [DONE]"),
)
_CHAT: Final = Example(
    body={"messages": _ASKED, "max_tokens": 32, "temperature": 0},
    answer={
        "id": "chatcmpl-42",
        "object": "chat.completion",
        "created": 1767225600,
        "model": "bundled",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "message": {"role": "assistant", "content": _TEXT, "refusal": None},
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    },
    events=(
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"content": "1"}),
        "...",
        _chunk({}, "stop"),
        "data: [DONE]",
    ),
)
_RESPONSE: Final = Example(
    body={"input": "What is 17 + 25?", "max_output_tokens": 32, "temperature": 0},
    answer={
        "id": "resp-42",
        "object": "response",
        "created_at": 1767225600,
        "model": "bundled",
        "status": "completed",
        "incomplete_details": None,
        "output": [
            {
                "id": "msg-42",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {
                        "type": "output_text",
                        "text": _TEXT,
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        ],
        "usage": {
            "input_tokens": 18,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 11,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 29,
        },
    },
    events=(
        "...",
        {
            "type": "response.output_text.delta",
            "sequence_number": 4,
            "item_id": "msg-42",
            "output_index": 0,
            "content_index": 0,
            "delta": "1",
            "logprobs": [],
        },
        "...",
    ),
)
_MESSAGE: Final = Example(
    body={"messages": _ASKED, "max_tokens": 32, "temperature": 0},
    answer={
        "id": "msg-42",
        "type": "message",
        "role": "assistant",
        "model": "bundled",
        "content": [{"type": "text", "text": _TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 18,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 11,
        },
    },
    events=(
        "...",
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "1"},
        },
        "...",
        {"type": "message_stop"},
    ),
)
_EMBEDDINGS: Final = Example(
    body={"input": ["import os", "class Stack"]},
    answer={
        "id": "embd-42",
        "object": "list",
        "created": 1767225600,
        "model": "bundled",
        "data": [{"object": "embedding", "index": 0, "embedding": [-0.024, -0.146]}],
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    },
)
# By path; the method is POST where there is a body, and GET where there is none.
EXAMPLES: Final[Mapping[str, Example]] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGE,
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/messages/count_tokens": Example(
        body={"messages": _ASKED}, answer={"input_tokens": 18}
    ),
    "/tokenize": Example(
        body={"prompt": "import os"},
        answer={
            "count": 2,
            "max_model_len": 2048,
            "tokens": [523, 953],
            "token_strs": None,
        },
    ),
    "/detokenize": Example(body={"tokens": [523, 953]}, answer={"prompt": "import os"}),
    "/v1/models": Example(answer={"object": "list", "data": [_MODEL]}),
    "/v1/models/{name}": Example(answer=_MODEL),
    "/v1/requests/{name}": Example(
        answer={
            "id": "cmpl-42",
            "object": "request",
            "request_id": "cmpl-42",
            "endpoint": "/v1/completions",
            "model": "bundled",
            "created": 1767225600,
            "state": "ended",
            "prompts": [
                {
                    "prompt_tokens": 10,
                    "cached_tokens": 0,
                    "output_tokens": 10,
                    "queue_times": {"step": 0.0002},
                    "ttft": 0.0069,
                    "tpot": 0.0025,
                    "latency": 0.0247,
                    "preemptions": 0,
                    "draft_tokens": 0,
                    "accepted_draft_tokens": 0,
                    "finish_reasons": ["length"],
                }
            ],
        }
    ),
    "/health": Example(answer={"status": "ok"}),
    "/healthz": Example(answer={"status": "ok"}),
    "/ready": Example(answer={"status": "ready"}),
    "/version": Example(answer={"version": "0.1.0"}),
}
