"""Compressed bodies: decoded within their bound, or refused by name."""

import asyncio
import gzip
import time
import zlib

import pytest

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.coding import MAX_DECODED_BYTES, Decoder
from tests.effects.served import Serving
from tests.effects.serving.raw_requests import raw
from tests.effects.serving.transports.test_post import come

BODY = b'{"prompt": "x", "max_tokens": 1}'
_RAW = zlib.compressobj(wbits=-15)
CODED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    " GZIP ": gzip.compress(BODY[:9]) + gzip.compress(BODY[9:]),
    "deflate": zlib.compress(BODY),
    "Deflate": _RAW.compress(BODY) + _RAW.flush(),
    "identity": BODY,
    "": BODY,
}


def decoded(coding: str, *chunks: bytes) -> bytes:
    decoder = Decoder(coding)
    pieces = [decoded for chunk in chunks for decoded in decoder.decode(chunk)]
    assert all(len(decoded) <= MAX_DECODED_BYTES for decoded in pieces)
    decoder.end()
    return b"".join(pieces)


def test_many_empty_gzip_members_take_time_in_proportion_to_their_bytes() -> None:
    data = gzip.compress(b"") * 200_000  # 4 MB
    begin = time.process_time()
    assert decoded("gzip", data) == b""
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("coding", CODED)
def test_a_body_is_decoded_however_it_is_cut(coding: str) -> None:
    data = CODED[coding]
    assert decoded(coding, data) == BODY
    assert decoded(coding, *[data[i : i + 1] for i in range(len(data))]) == BODY


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_it_says_is_refused(coding: str) -> None:
    whole_body = CODED[coding]
    for data in (
        BODY,
        whole_body[:-1],
        whole_body[:5],
        whole_body + b"more",
        b"\x00" * 9,
    ):
        with pytest.raises(ApiError, match=f"the body is not {coding}"):
            decoded(coding, data)


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x" * 999])
def test_other_codings_are_refused_by_name(coding: str) -> None:
    with pytest.raises(ApiError, match="there is gzip, x-gzip, deflate") as caught:
        Decoder(coding)
    assert caught.value.status == 415
    assert coding[:9] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_what_it_decodes_to_is_bounded() -> None:
    bomb = gzip.compress(b"a" * 5_000_000)
    assert asyncio.run(come(gzip.compress(BODY[:10]), content_encoding="gzip"))
    with pytest.raises(ApiError, match="more than 10 bytes") as caught:
        asyncio.run(come(bomb, content_encoding="gzip"))
    assert caught.value.status == 413


def test_over_a_socket(bundled: Serving) -> None:
    for coding, data in CODED.items():
        headers = {"content-type": "application/json", "content-encoding": coding.strip()}
        url = f"{bundled.url}/v1/completions"
        assert bundled.http.post(url, content=data, headers=headers).status_code == 200
    for coding, data, status in (("gzip", BODY, 400), ("br", BODY, 415)):
        header = f"Content-Encoding: {coding}\r\n"
        assert raw(bundled, data, headers=header)[0] == status
    twice = "Content-Encoding: gzip\r\n" * 2
    assert raw(bundled, gzip.compress(gzip.compress(BODY)), headers=twice)[0] == 415
