"""A POST: its body is taken up to a limit, and what is larger does not harm anybody."""

import pytest

from tests.effects.served import Serving, events
from tests.effects.serving.wire import HEAD, NEIGHBOUR, exchange


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_megabytes(slow: Serving, quiet: list[str], chunked: bool) -> None:
    size = 100_000_000
    piece = b"a" * 1_000_000
    if chunked:
        parts = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
        parts += [b"%x\r\n%b\r\n" % (len(piece), piece)] * 100 + [b"0\r\n\r\n"]
    else:
        parts = [HEAD + b"Content-Length: %d\r\n\r\n" % size, *[piece] * 100]
    with slow.http.stream("POST", f"{slow.url}/v1/completions", json=NEIGHBOUR) as beside:
        stream = events(beside.iter_lines())
        got = [next(stream)["choices"][0]["text"]]
        found, said = exchange(slow, b"".join(parts))
        got += [event["choices"][0]["text"] for event in stream]
    assert found == 413
    assert "more than 4194304 bytes" in said["error"]["message"]
    assert "".join(got) == "".join(quiet)
