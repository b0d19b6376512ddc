"""Compares the journals of a server's routers with those of its replicas: each replica
must have received the requests that routers sent to it, and no others.

A request whose first token came from a replica must be in that replica's journal. Other
requests need not be: they may have ended, or been lost with the replica, before its
engine took them; they are only counted. A request in a replica's journal must have been
sent there by a router, with two exceptions, which are counted, too:

- one that was resubmitted because it may have killed engines: it runs alone in a new
  engine, without a decision of a router;
- one that may have come after a router's journal was cut short: it is later than the last
  request that this router is known to have sent there.
"""

from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field, frozen

from minfer.journal.routed_requests import RoutedRequest


@frozen
class RouterRecord:
    """The requests in the journal of a router."""

    name: str
    requests: Sequence[RoutedRequest]
    closed: bool = True  # False: it was cut short, or is still being written
    # Its replicas only compute prompts, and replicas of other routers decode. The latter
    # never get a request that ends with its first token.
    prefills: bool = False


@frozen
class EngineRequest:
    """A request in the journal of a replica."""

    id: str  # as in the router's journal
    again: bool = False  # whether it was resubmitted


@frozen
class ReplicaRecord:
    """The requests in the journals of a replica's engines."""

    requests: Sequence[EngineRequest]  # in the order in which they came
    # Whether each journal begins with the engine's first turn, and could be read.
    whole: bool = True


@frozen
class Disagreement:
    """A request that is in one journal and not in another."""

    id: str
    replica: str
    router: str = ""  # the one that sent it; empty: none did


@define
class Agreement:
    """The result of a comparison. Numbers count requests; one that was sent to two
    replicas counts twice.
    """

    sent: int = 0  # by routers
    found: int = 0  # of those sent: in the replica's journal
    unstarted: int = 0  # of those sent: not in it, but no token came from the replica
    unrecorded: int = 0  # of those sent: not in it, but a journal is not whole
    alone: int = 0  # in a replica's journal, resubmitted without a router's decision
    late: int = 0  # in a replica's journal, perhaps sent after a router's was cut short
    absent: dict[str, int] = field(factory=dict)  # sent to replicas without a journal
    missing: list[Disagreement] = field(factory=list)  # sent, and not in the journal
    unsent: list[Disagreement] = field(factory=list)  # in a journal, and not sent

    @property
    def holds(self) -> bool:
        """Whether no disagreement was found, and every replica has a journal."""
        return not (self.absent or self.missing or self.unsent)


def compare(
    routers: Sequence[RouterRecord], replicas: Mapping[str, ReplicaRecord]
) -> Agreement:
    """Compare the journals of routers with those of replicas. `replicas` is by name, as
    in `RoutedRequest.replica`.
    """
    found = Agreement()
    there = {
        name: {one.id for one in replica.requests} for name, replica in replicas.items()
    }
    halves = {one.id for each in routers if each.prefills for one in each.requests}
    for router in routers:
        for one in router.requests:
            certain = one.started and (router.prefills or one.id not in halves)
            _note_sent(found, router.name, one, there, replicas, certain=certain)
    sent = {(one.id, one.replica) for router in routers for one in router.requests}
    known = {name for name, _ in sent}
    for name, replica in replicas.items():
        end = _certain_until(routers, name, replica.requests)
        for place, asked in enumerate(replica.requests):
            if (asked.id, name) in sent:
                continue
            if asked.again and asked.id in known:
                found.alone += 1
            elif place >= end:
                found.late += 1
            else:
                found.unsent.append(Disagreement(asked.id, name))
    return found


def _note_sent(
    found: Agreement,
    router: str,
    one: RoutedRequest,
    there: Mapping[str, set[str]],
    replicas: Mapping[str, ReplicaRecord],
    *,
    certain: bool,
) -> None:
    """Count a request that a router sent; `certain`: it must be in the journal."""
    found.sent += 1
    name = one.replica
    if name not in replicas:
        found.absent[name] = found.absent.get(name, 0) + 1
    elif one.id in there[name]:
        found.found += 1
    elif not certain:
        found.unstarted += 1
    elif not replicas[name].whole:
        found.unrecorded += 1
    else:
        found.missing.append(Disagreement(one.id, name, router))


def _certain_until(
    routers: Iterable[RouterRecord], name: str, asked: Sequence[EngineRequest]
) -> int:
    """How many of a replica's first requests came before any router's journal was cut
    short: those up to the last one that each such router is known to have sent.
    """
    least = len(asked)
    for router in routers:
        if not router.closed:
            own = {one.id for one in router.requests if one.replica == name}
            places = [place + 1 for place, one in enumerate(asked) if one.id in own]
            least = min(least, max(places, default=0))
    return least
