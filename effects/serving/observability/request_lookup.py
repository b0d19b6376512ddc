"""Find a request by its id, whichever API server of this server received it.

    GET, DELETE /v1/requests/ID ---> the records here ---> those of the other API servers
                                                           (`minfer.effects.cluster.link`)

Others have `API_SERVER_REPLY_SECONDS` to answer. A key finds only its own requests.
"""

import asyncio
import json
from typing import Final

from minfer.effects.cluster.engine_client.request_queries import RequestQueries
from minfer.effects.cluster.link.link_messages import RequestQuery
from minfer.effects.serving.client_errors import OVERLOADED, ApiError
from minfer.effects.serving.observability.records import AnswerRecords, JsonObject
from minfer.effects.serving.wire.request_ids import MAX_ID_CHARS

API_SERVER_REPLY_SECONDS: Final = 1.0  # that other API servers have to answer
_UNREACHABLE: Final = (
    "the server's other processes cannot be reached now; try again later"
)
_NO_REPLY: Final = "the server's other processes did not answer in time; try again later"


class RequestLookup:
    """Finds requests, and cancels them."""

    def __init__(self, records: AnswerRecords) -> None:
        self._records = records
        self._queries: RequestQueries | None = None  # where there are other API servers

    def join(self, queries: RequestQueries) -> None:
        """Query other API servers too, and answer their queries."""
        self._queries = queries
        queries.answer = self._answer

    async def find(self, query: RequestQuery) -> JsonObject | None:
        """The record of a request, which is also cancelled if `query` requests that.
        Raises ApiError if the other API servers cannot be queried, or are silent.
        """
        record = self._find_here(query)
        if (
            record is None
            and self._queries is not None
            and len(query.name) <= MAX_ID_CHARS
        ):
            data = await _query_api_servers(self._queries, query)
            record = json.loads(data) if data else None
        return record

    def _find_here(self, query: RequestQuery) -> JsonObject | None:
        find = self._records.cancel if query.cancel else self._records.find
        return find(query.name, query.owner)

    def _answer(self, query: RequestQuery) -> bytes:
        record = self._find_here(query)
        return b"" if record is None else json.dumps(record).encode()


async def _query_api_servers(queries: RequestQueries, query: RequestQuery) -> bytes:
    """The record of another API server, in JSON, or empty."""
    answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    number = queries.ask(query, answer.set_result)
    try:
        async with asyncio.timeout(API_SERVER_REPLY_SECONDS):
            record_json = await answer
    except TimeoutError:
        raise ApiError(_NO_REPLY, None, "timeout", 504) from None
    finally:
        queries.forget(number)
    if record_json is None:
        raise ApiError(_UNREACHABLE, None, OVERLOADED, 503)
    return record_json
