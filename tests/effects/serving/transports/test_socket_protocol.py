"""What clients do wrong on a WebSocket is no error of the server's."""

import contextlib

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from tests.circles import claimed, long
from tests.effects.serving.test_server import process

KEY = {"x-api-key": "right"}


def refused(url: str, headers: dict[str, str]) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
        pass
    return caught.value


def closed(link: ClientConnection, data: bytes, *, num_frames: int) -> int:
    """The code with which a text in `num_frames` frames is answered."""
    size = len(data) // num_frames
    for i in range(num_frames):
        kind = Opcode.CONT if i else Opcode.TEXT
        payload = data[i * size : (i + 1) * size]
        frame = Frame(kind, payload, fin=i == num_frames - 1)
        link.socket.sendall(frame.serialize(mask=True))
    with pytest.raises(ConnectionClosed) as caught:
        link.recv(10)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code


@pytest.mark.parametrize("api_servers", [*long([0]), *claimed([1])])
def test_no_client_has_error_lines_written(api_servers: int) -> None:
    options = ("--dry-run", "--api-key=right", "--access-log=text")
    with process(*options, f"--api-processes={api_servers}") as (running, url):
        base = url.replace("http", "ws", 1)
        for path in ("/v1/stream", "/v1/models", "/nothing"):
            for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer x"}):
                answer = refused(base + path, headers).response
                assert answer.status_code == 401
                assert b"invalid_api_key" in answer.body
            assert (
                refused(base + path, {**KEY, "origin": "http://x"}).response.status_code
                == 403
            )
        for num_frames in (1, 2):
            with connect(f"{base}/v1/stream", additional_headers=KEY) as link:
                assert (
                    closed(link, b"\xff\xfe" * num_frames, num_frames=num_frames) == 1007
                )
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{url}/v1/models")
        running.terminate()
        assert running.stdout is not None
        assert running.stderr is not None
        lines = running.stdout.read().splitlines()
        message = running.stderr.read()
    assert "ERROR" not in message
    assert "Traceback" not in message
    assert sum(" WEBSOCKET " in line and " 401 " in line for line in lines) == 9
    assert sum(" GET " in line and " 401 " in line for line in lines) == 1
