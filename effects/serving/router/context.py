"""The context of a backend's model, as its list of models has it."""

from typing import Final

import aiohttp
import msgspec

_PATH: Final = "/v1/models"
_LONGEST: Final = 2**20  # bytes of a list that is read
_OK: Final = 200
MAX_CONTEXT: Final = 2**23  # tokens; a backend that says more is taken for this


class _Card(msgspec.Struct):
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_decoder: Final = msgspec.json.Decoder(_Cards)


async def read_context(
    http: aiohttp.ClientSession, name: str, seconds: float
) -> int | None:
    """The tokens of the longest context of a backend's models; None if it does not say,
    as it needs a key, for instance. Raises aiohttp.ClientError and OSError.
    """
    get = http.get(
        name + _PATH,
        headers={"Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=seconds),
        allow_redirects=False,
    )
    async with get as response:
        body = await read_at_most(response.content, _LONGEST)
        if response.status != _OK or body is None:
            return None
    try:
        cards = _decoder.decode(body).data
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    context = max((card.max_model_len or 0 for card in cards), default=0)
    return min(context, MAX_CONTEXT) or None


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
