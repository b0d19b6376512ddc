"""Reads the bodies of answers that nothing else bounds."""

import aiohttp


async def read_at_most(content: aiohttp.StreamReader, most: int) -> bytes | None:
    """The rest of a body; None if it has more than `most` bytes. Raises
    aiohttp.ClientError and OSError.
    """
    data = bytearray()
    while part := await content.readany():
        data += part
        if len(data) > most:
            return None
    return bytes(data)
