"""Errors in OpenAI's shape, to the byte."""

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.error_form import failure


def test_the_shape_of_a_wrong_request() -> None:
    told = failure(ApiError("n: is wrong", "n"))
    assert told.event.data == (
        '{"error":{"message":"n: is wrong","type":"invalid_request_error",'
        '"param":"n","code":null}}'
    )
    assert (told.status, told.retry_after) == (400, None)


def test_the_shape_of_an_error_of_ours() -> None:
    told = failure(ApiError("né", None, "a_code", 500))
    assert told.event.data == (
        '{"error":{"message":"né","type":"server_error","param":null,"code":"a_code"}}'
    )
    assert (told.status, told.retry_after) == (500, None)


def test_a_full_waiting_queue_has_a_retry_after() -> None:
    assert failure(ApiError("full", None, "overloaded", 503)).retry_after == 1
