"""Whether the journals of a server's routers and of its replicas agree: what routers sent
to a replica came there, and nothing else did.

A request whose first token came from a replica must be in the replica's journal. Of
others that is not certain: they may have ended, or been lost with their replica, before
its engine took them; so they are counted. And a request in a replica's journal must have
been sent there by a router, with these exceptions, which are counted, too:

- one that was resubmitted, as it may be what engines died of: then it runs alone in an
  engine that begins, without a decision of a router;
- one that came when a router's journal had been cut short: behind all that this router is
  known to have sent there.
"""

from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field, frozen

from minfer.runs.routed_requests import RoutedRequest


@frozen
class RouterRecord:
    """What the journal of a router says."""

    name: str
    requests: Sequence[RoutedRequest]
    closed: bool = True  # else it was cut short, or goes on
    # Its replicas compute prompts for those of other routers, which may never get a
    # request whose first token is its last.
    prefills: bool = False


@frozen
class EngineRequest:
    """A request in the journal of a replica."""

    id: str  # its router's
    again: bool = False  # it was resubmitted


@frozen
class ReplicaRecord:
    """What the journals of a replica's engines say."""

    requests: Sequence[EngineRequest]  # in order
    whole: bool = True  # they begin with each engine's first turn


@frozen
class Disagreement:
    """A request that is in one journal and not in another."""

    id: str
    replica: str
    router: str = ""  # that sent it; empty: none did


@define
class Agreement:
    """What was compared. Counts are of requests at replicas: one that was sent to two
    counts twice.
    """

    sent: int = 0  # by routers
    found: int = 0  # of these, in the journals of replicas
    unstarted: int = 0  # not there, and no token came from there
    unrecorded: int = 0  # not there, where the replica's journal is not whole
    alone: int = 0  # resubmitted there without a decision
    late: int = 0  # there, after the journal of a router had been cut short
    absent: dict[str, int] = field(factory=dict)  # by replica that has no journal
    missing: list[Disagreement] = field(factory=list)
    unsent: list[Disagreement] = field(factory=list)

    @property
    def holds(self) -> bool:
        """Whether the journals agree, as far as they are there."""
        return not (self.absent or self.missing or self.unsent)


def compare(
    routers: Sequence[RouterRecord], replicas: Mapping[str, ReplicaRecord]
) -> Agreement:
    """Compare the journals of routers with those of replicas, by name."""
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
    """Note a request that a router sent; `certain`: its replica's engine took it."""
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
    """How many of a replica's requests came before the journal of any router was cut
    short: all of them up to the last one that this router is known to have sent.
    """
    least = len(asked)
    for router in routers:
        if not router.closed:
            own = {one.id for one in router.requests if one.replica == name}
            places = [place + 1 for place, one in enumerate(asked) if one.id in own]
            least = min(least, max(places, default=0))
    return least
