"""An API server's questions to all others about a request, by way of an engine server.

    api 0 --- SendQuery ----> engine --- ReceivedQuery ---> api 1, api 2, ...
          <-- QueryAnswer --- server <-- SendAnswer ------

Any API server may get a connection, so a question about a request may come to an API
server that does not have it. The engine server passes messages on and keeps nothing of
them: each names the API server that asks, and how many others were asked. The first
answer that is not empty ends a question; if all are empty, the last one does. A caller
waits as long as it wants, and then forgets its question. Where there are several engines,
a question goes over the oldest link, at whose other end most API servers are, and its
answers come back that way.
"""

import secrets
from collections.abc import Callable
from typing import Final

from attrs import define

from minfer.effects.cluster.link import link_messages as wire

MAX_PENDING: Final = 64  # unanswered questions of an API server

Send = Callable[[wire.ToEngine], None]
# Gets another API server's answer: JSON, or nothing; None: they cannot be asked now.
OnAnswer = Callable[[bytes | None], None]


def no_record(query: wire.RequestQuery) -> bytes:
    """Returns the answer of an API server that serves no model yet."""
    del query
    return b""


@define(eq=False)
class _PendingQuery:
    """An unanswered question."""

    on_answer: OnAnswer
    link: Send  # that it was sent over
    empty: int = 0  # empty answers so far


class RequestQueries:
    """One API server's questions and answers, in the thread of its links."""

    def __init__(self) -> None:
        # Returns this API server's record of a request; it may have to cancel it.
        self.answer: Callable[[wire.RequestQuery], bytes] = no_record
        self._links: list[Send] = []  # the oldest is first
        self._pending: dict[int, _PendingQuery] = {}

    def ask(self, query: wire.RequestQuery, on_answer: OnAnswer) -> int:
        """Ask the others; `on_answer` is called once. Returns a number to `forget` the
        question by.
        """
        number = secrets.randbits(62)  # not used by earlier processes of this API server
        if not self._links or len(self._pending) >= MAX_PENDING:
            on_answer(None)
            return number
        link = self._links[0]
        self._pending[number] = _PendingQuery(on_answer, link)
        link(wire.SendQuery(number, query))
        return number

    def forget(self, number: int) -> None:
        """Stop waiting for an answer."""
        self._pending.pop(number, None)

    def connect(self, link: Send) -> None:
        """Note a new link, by what sends over it."""
        self._links.append(link)

    def disconnect(self, link: Send) -> None:
        """End all questions on a link without an answer, as it is over."""
        self._links.remove(link)
        pending = list(self._pending.items())
        unanswered = [number for number, query in pending if query.link is link]
        for query in [self._pending.pop(number) for number in unanswered]:
            query.on_answer(None)

    def answer_query(self, received: wire.ReceivedQuery, link: Send) -> None:
        """Answer another API server's question, over the link that it came by."""
        answer = wire.QueryAnswer(
            received.number, received.others, self.answer(received.query)
        )
        link(wire.SendAnswer(received.api_server, answer))

    def take_answer(self, answer: wire.QueryAnswer) -> None:
        """Take an answer to this API server's question; ignored if it is too late."""
        query = self._pending.get(answer.number)
        if query is None:
            return
        query.empty += 1
        if answer.record or query.empty >= answer.others:
            del self._pending[answer.number]
            query.on_answer(answer.record)
