"""The rule for requests that kill engines: who is suspected, runs alone, is ended, and is
refused. The numbers by which it judges are here. How long others wait is where they wait:
for an engine's restart (`RESTART_SECONDS`, `MAX_FAILED_LOADS` in `replica_link`), and for
an API server with suspects of its own (`API_SERVER_RETURN_SECONDS` in `engine_server`);
the length of the denylist is `MAX_CRASHING_REQUESTS` in `crash_denylist`.

    an engine dies --> what ran there is resubmitted --> it dies again --> suspects
    a suspect runs alone --> it is cleared by tokens, or ends by itself
                         --> its engine ends, too: whether it is the cause depends on how
    the cause ends with an error, and equal requests of its client are refused for a while

Theory. An engine dies for reasons of its own, or because of a request. A sample is
cleared by more than `CLEARING_TOKENS` tokens of an engine, unless it had about as many
when the engine before died: then it is cleared by as many more than it had then. A sample
is a suspect if it was admitted, or its grammar may have been compiling (it was not in the
queue yet), in `SUSPECT_DEATHS` engines in a row that died before it was cleared.

A suspect runs alone until it is cleared or ends. If its engine ends meanwhile, it depends
on how it ended (`EndKind`):

    CRASHED         by an exception or a fault: the suspect is the cause
    OUT_OF_MEMORY   another process may have taken the memory
    HUNG            the device may be at fault
    UNKNOWN         after `MAX_SOLO_DEATHS` of these three, the suspect is the cause
    KILLED          from outside, as far as can be known: it says nothing of the suspect

After `MAX_SOLO_ENDS` engines in a row that ended in any way, the suspect is the cause:
it might kill them in a way that nothing here sees.

All requests of a client that were the cause of more than `MAX_CLIENT_DEATHS` ends run
alone: it may have changed the request each time.

    an API server  notes the ends of engines in `SampleHistory` and `SoloDeaths`, and ends
                   requests (`api_server_requests`, `remote_engine`)
    an engine      runs suspects alone (`quarantine`)
    both        refuse requests (`crash_denylist`)
    a proxy     has the denylist, too (`denied_bodies`), and gives a request up that
                `MAX_ENDED_BACKENDS` servers have failed (`attempts`)
"""

from enum import Enum
from typing import Final

from attrs import define, field, frozen

SUSPECT_DEATHS: Final = 2  # engines in a row that died
CLEARING_TOKENS: Final = 8  # tokens that an engine may give a sample before it dies of it
# By how many tokens these numbers may differ, as some are lost.
TOKEN_TOLERANCE: Final = 2
# Engines in a row that were killed for memory, or hung, while they served a request
# alone.
MAX_SOLO_DEATHS: Final = 3
MAX_SOLO_ENDS: Final = 50  # likewise, that ended in whichever way
SOLO_SECONDS: Final = 10.0  # for which an isolated client's request runs alone
REST_SECONDS: Final = 1.0  # between two of those
REFUSED_SECONDS: Final = 600.0  # after the end of the request that was the cause
MAX_CLIENT_DEATHS: Final = 4  # engines that a client may kill before it is isolated
# Servers that may close the connection or fall silent over a request that a proxy
# forwards, before it is given up: it must not crash all of them.
MAX_ENDED_BACKENDS: Final = 2

# Prefix of the error of a request that is given up.
GIVEN_UP: Final = "engines died while they served this request, the last one it alone"
# Prefix of the error of a request that is refused.
REFUSED: Final = "an engine died while it served this same request alone"
REFUSAL_MESSAGE: Final = (
    f"{REFUSED}; the request is refused for {REFUSED_SECONDS / 60:g} minutes after that"
)


class EndKind(Enum):
    """How an engine ended."""

    UNKNOWN = 0  # elsewhere; or of several ranks, one of which may have been killed
    CRASHED = 1  # by an exception, or a fault such as SIGSEGV
    OUT_OF_MEMORY = 2  # the kernel killed it
    HUNG = 3  # its parent killed it
    KILLED = 4  # from outside, as far as is known; or only its link broke


@frozen
class EngineEnd:
    """The last end of an engine."""

    kind: EndKind = EndKind.UNKNOWN
    number: int = 0  # of ends so far, of engines in the same place


@define(eq=False)
class SampleHistory:
    """A sample's history with the engines that served it."""

    admitted: bool = False  # by the current engine
    tokens_received: int = 0  # tokens from this engine
    deaths: int = 0  # engines in a row that did not clear it and died
    last_tokens: int = 0  # from the engine that died last

    def end(self) -> None:
        """Note that its engine has died."""
        self.deaths = 1 if self.cleared else self.deaths + 1
        self.last_tokens = self.tokens_received

    def leave(self) -> None:
        """Note that it is taken from an engine, which lives."""
        if self.tokens_received > self.to_clear:
            self.deaths = self.last_tokens = 0

    @property
    def cleared(self) -> bool:
        """Whether the engine's death was not its fault: it had got many tokens, and not
        about as many as from the engine that died before.
        """
        is_similar = abs(self.tokens_received - self.last_tokens) <= TOKEN_TOLERANCE
        return self.tokens_received > CLEARING_TOKENS and not is_similar

    @property
    def to_clear(self) -> int:
        """The tokens of one engine that do not clear it yet, while that engine lives."""
        return CLEARING_TOKENS + self.last_tokens


@define(eq=False)
class SoloDeaths:
    """The engines in a row that ended while they served one request alone."""

    ends: int = 0  # in all
    deaths: int = 0  # of these, that were killed for memory, hung, or of unknown kind
    # The replicas whose engines were among these, until it is known how they ended.
    undecided: set[int] = field(factory=set)

    def note(self, replica: int) -> None:
        """Note that one more has ended."""
        self.ends += 1
        self.undecided.add(replica)

    def is_cause(self, replica: int, kind: EndKind) -> bool:
        """Note how the engine of a replica ended; returns whether the request was the
        cause.
        """
        if replica not in self.undecided:
            return False
        self.undecided.remove(replica)
        self.deaths += kind is not EndKind.KILLED
        return (
            kind is EndKind.CRASHED
            or self.deaths >= MAX_SOLO_DEATHS
            or self.ends >= MAX_SOLO_ENDS
        )
