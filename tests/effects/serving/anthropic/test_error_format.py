"""Errors in Anthropic's shape."""

import json

import pytest

from minfer.effects.serving.anthropic.error_format import failure
from minfer.effects.serving.client_errors import ApiError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_a_status_has_a_kind(status: int, kind: str) -> None:
    error = failure(ApiError("é", "a.field", None, status))
    assert (error.status, error.event.name) == (status, "error")
    expected = {"type": "error", "error": {"type": kind, "message": "é"}}
    assert json.loads(error.event.data) == expected


def test_a_prompt_that_is_too_long_has_anthropics_message() -> None:
    error = failure(ApiError("x", None, "context_length_exceeded", 400))
    assert json.loads(error.event.data)["error"]["message"] == "prompt is too long: x"


def test_an_overload_has_a_retry_after() -> None:
    assert failure(ApiError("x", None, "overloaded", 503)).retry_after == 1
