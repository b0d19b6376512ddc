"""Errors in OpenAI's shape, to the byte."""

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.error_form import failure


def test_the_shape_of_a_wrong_request() -> None:
    error = failure(ApiError("n: is wrong", "n"))
    assert error.event.data == (
        '{"error":{"message":"n: is wrong","type":"invalid_request_error",'
        '"param":"n","code":null}}'
    )
    assert (error.status, error.retry_after) == (400, None)


def test_the_shape_of_an_error_of_ours() -> None:
    error = failure(ApiError("né", None, "a_code", 500))
    assert error.event.data == (
        '{"error":{"message":"né","type":"server_error","param":null,"code":"a_code"}}'
    )
    assert (error.status, error.retry_after) == (500, None)


def test_a_full_waiting_queue_has_a_retry_after() -> None:
    assert failure(ApiError("full", None, "overloaded", 503)).retry_after == 1
