"""Reads a body up to a maximal size."""

import aiohttp


async def read_at_most(content: aiohttp.StreamReader, max_bytes: int) -> bytes | None:
    """The rest of a body; None if it has more than `max_bytes` bytes. Raises
    aiohttp.ClientError and OSError.
    """
    data = bytearray()
    while chunk := await content.readany():
        data += chunk
        if len(data) > max_bytes:
            return None
    return bytes(data)
