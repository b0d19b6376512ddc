"""Compressed bodies: decoded as they come, and only up to their bound."""

import zlib
from collections.abc import Iterator
from typing import Final

from minfer.effects.serving.client_errors import ApiError

MAX_DECODED_BYTES: Final = 2**16  # that are decoded in one go
# Bytes given to zlib at once. It copies what follows the end of a gzip member, and there
# may be a member in each 20 bytes.
_INPUT_BYTES: Final = 2**12
_CODINGS: Final = ("gzip", "x-gzip", "deflate")
_GZIP, _ZLIB = 31, 15  # windows of `zlib`; below 0: without a head, as some send it
_HEADER_BYTES: Final = 2  # bytes by which the head of a zlib stream is known (RFC 1950)
_DEFLATED: Final = 8  # its method
_PLAIN: Final = ("", "identity")
_UNSUPPORTED_MEDIA_TYPE: Final = 415


class Decoder:
    """Decodes a body by its Content-Encoding. Raises ApiError for an unknown one."""

    def __init__(self, coding: str) -> None:
        self._coding = coding.strip().lower()
        if self._coding not in (*_PLAIN, *_CODINGS):
            supported = ", ".join(_CODINGS)
            reason = f"Content-Encoding: {self._coding[:64]!r} is not known"
            remedy = f"there is {supported}, or send the body as it is"
            raise ApiError(f"{reason}; {remedy}", status=_UNSUPPORTED_MEDIA_TYPE)
        self.plain = self._coding in _PLAIN
        self._inner: zlib._Decompress | None = None  # once the body has begun
        self._head = b""  # the first bytes, until they show the coding

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """A part of the body, decoded. Raises ApiError if its coding is another."""
        if self.plain:
            yield chunk
            return
        for begin in range(0, len(chunk), _INPUT_BYTES):
            yield from self._decode_chunk(chunk[begin : begin + _INPUT_BYTES])

    def _decode_chunk(self, chunk: bytes) -> Iterator[bytes]:
        chunk = self._head + chunk
        self._head = b""
        while chunk:
            if self._inner is None and len(chunk) < _HEADER_BYTES:
                self._head = chunk
                return
            inner = self._inner = self._inner or self._begin(chunk)
            try:
                decoded = inner.decompress(chunk, MAX_DECODED_BYTES)
            except zlib.error:
                raise self._wrong_coding() from None
            chunk = inner.unconsumed_tail
            if inner.eof and inner.unused_data:  # one more follows
                chunk, self._inner = inner.unused_data, None
            if decoded:
                yield decoded

    def end(self) -> None:
        """Note the end of the body. Raises ApiError if it is incomplete."""
        if self._head or (self._inner is not None and not self._inner.eof):
            raise self._wrong_coding()

    def _begin(self, first_bytes: bytes) -> "zlib._Decompress":
        """The decompressor of a body that begins so."""
        if self._coding != "deflate":
            return zlib.decompressobj(_GZIP)
        has_header = (
            first_bytes[0] & 0x0F == _DEFLATED
            and int.from_bytes(first_bytes[:_HEADER_BYTES]) % 31 == 0
        )
        return zlib.decompressobj(_ZLIB if has_header else -_ZLIB)

    def _wrong_coding(self) -> ApiError:
        reason = f"the body is not {self._coding}, as its Content-Encoding says"
        return ApiError(f"{reason}, or it breaks off")
