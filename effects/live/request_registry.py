"""The live requests of a process: the only registry by request id.

It is the engine client's; the engine server has one until its engine is ready, and passes
it on. A record is added by what takes the request first: an API server, the engine
server, or else the client. It is removed when its client has ended it and nothing reads
its outputs.

    NEW ---> COMPILING ---> SUBMITTED ---> ENDED    set by the engine client
      +------> SEARCHING --------------------^      set by `BeamSearches`

Each part changes its own fields of a record, under its own lock; additions and removals
have a lock here. Other threads add and remove meanwhile: copy before you iterate.

What only one part knows of a request, that part keeps by the request's id, with a type of
its own: the `OutputProcessor` of an API server's request, the `SearchBeam` and the
`LiveSearch` of a beam search, the `Session` of an API server at the engine server, the
`PendingBatch` that compiles, and the `ApiServerRequest` that is resubmitted after a
crash.

What has another lifetime is kept by its owner, too: by sample, the matchers of grammars,
the tokens read for drafts, and the times of last outputs, which are folds over
transitions and have no other access to clients; by answer, `AnswerRecords`, which begin
before the answer's requests and outlive them.
"""

import threading
from enum import Enum
from typing import Final

from attrs import define, field, frozen

from minfer.effects.live.errors import RequestError
from minfer.records.messages import clip
from minfer.records.request import Request
from minfer.routing.messages import Placed


class RequestStage(Enum):
    """What the engine client has done with a request."""

    NEW = "new"  # it does not have it yet: the engine server may hold it
    COMPILING = "compiling"  # a grammar, its own or of its batch
    SUBMITTED = "submitted"  # to the engine
    SEARCHING = "searching"  # its rounds are submitted, as requests of their own
    ENDED = "ended"  # its last outputs may not be read yet


_SERVED: Final = (RequestStage.COMPILING, RequestStage.SUBMITTED)


@frozen
class Sending:
    """A request was sent to one of several engines: why, and on which machine that was
    then.
    """

    placed: Placed
    machine: str


@define(eq=False)
class RequestRecord:
    """What this process knows of a live request."""

    request: Request
    read: bool = False  # something reads its outputs
    arrived: float = 0.0  # at its client
    stored: int = 0  # leading blocks of its prompt that the external store has
    session: str = ""  # requests of a session continue each other; none, if empty
    # Where it was sent, and why, where there are several engines: the last one has it.
    sendings: list[Sending] = field(factory=list)
    stage: RequestStage = RequestStage.NEW


class RequestRegistry(dict[str, RequestRecord]):
    """The records, by id."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()  # an interrupt's handler may cancel requests

    def check_new(self, request: Request) -> None:
        """Raise RequestError if the id of a request is that of a live one. A request that
        is passed on to the engine client is not yet that.
        """
        record = self.get(request.id)
        if record is None:
            return
        if record.request is not request or record.stage is not RequestStage.NEW:
            name = clip(request.id)
            raise RequestError(
                f"a request with the id {name!r} is being served; ids must differ"
            )

    def add(self, request: Request, *, read: bool = False) -> RequestRecord:
        """Returns the record of a new request, which may have been added before. Raises
        RequestError as `check_new`.
        """
        with self._lock:
            self.check_new(request)
            return self.setdefault(request.id, RequestRecord(request, read))

    def served(self) -> dict[str, RequestRecord]:
        """Returns the requests that the engine client has."""
        return {
            name: record for name, record in list(self.items()) if record.stage in _SERVED
        }

    def is_served(self, name: str) -> bool:
        """Returns whether the engine client has a request."""
        return (record := self.get(name)) is not None and record.stage in _SERVED

    def end(self, name: str) -> None:
        """Note that its client has ended a request."""
        with self._lock:
            if (record := self.get(name)) is not None:
                record.stage = RequestStage.ENDED
                if not record.read:
                    del self[name]

    def release(self, name: str) -> None:
        """Note that nothing reads the outputs of a request any more."""
        with self._lock:
            if (record := self.get(name)) is not None:
                record.read = False
                if record.stage in (RequestStage.NEW, RequestStage.ENDED):
                    del self[name]
