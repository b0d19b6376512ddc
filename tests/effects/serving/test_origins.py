"""Pages of other addresses are told from programs, and from pages of this server's."""

import pytest

from minfer.effects.serving.origins import foreign


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"host": "127.0.0.1:8000"}, False),  # a program
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "https://evil.example"}, True),
        ({"host": "127.0.0.1:8000", "origin": "null"}, True),  # a file, or a sandbox
        ({"origin": "https://evil.example"}, True),
    ],
)
def test_foreign(headers: dict[str, str], is_foreign: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert foreign({"type": "http", "headers": raw}) is is_foreign
