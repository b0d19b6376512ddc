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
    resubmitted: bool = False  # whether it was resubmitted


@frozen
class ReplicaRecord:
    """The requests in the journals of a replica's engines."""

    requests: Sequence[EngineRequest]  # in the order in which they came
    # Whether each journal begins with the engine's first turn, and could be read.
    complete: bool = True


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
    agreement = Agreement()
    recorded_ids = {
        name: {recorded.id for recorded in replica.requests}
        for name, replica in replicas.items()
    }
    prefill_ids = {
        sent.id for router in routers if router.prefills for sent in router.requests
    }
    for router in routers:
        for sent in router.requests:
            certain = sent.started and (router.prefills or sent.id not in prefill_ids)
            _count_sent(
                agreement, router.name, sent, recorded_ids, replicas, certain=certain
            )
    sent_to = {(sent.id, sent.replica) for router in routers for sent in router.requests}
    sent_ids = {request_id for request_id, _ in sent_to}
    for name, replica in replicas.items():
        num_certain = _num_certain(routers, name, replica.requests)
        for index, recorded in enumerate(replica.requests):
            if (recorded.id, name) in sent_to:
                continue
            if recorded.resubmitted and recorded.id in sent_ids:
                agreement.alone += 1
            elif index >= num_certain:
                agreement.late += 1
            else:
                agreement.unsent.append(Disagreement(recorded.id, name))
    return agreement


def _count_sent(
    agreement: Agreement,
    router: str,
    request: RoutedRequest,
    recorded_ids: Mapping[str, set[str]],
    replicas: Mapping[str, ReplicaRecord],
    *,
    certain: bool,
) -> None:
    """Count a request that a router sent; `certain`: it must be in the journal."""
    agreement.sent += 1
    name = request.replica
    if name not in replicas:
        agreement.absent[name] = agreement.absent.get(name, 0) + 1
    elif request.id in recorded_ids[name]:
        agreement.found += 1
    elif not certain:
        agreement.unstarted += 1
    elif not replicas[name].complete:
        agreement.unrecorded += 1
    else:
        agreement.missing.append(Disagreement(request.id, name, router))


def _num_certain(
    routers: Iterable[RouterRecord], name: str, requests: Sequence[EngineRequest]
) -> int:
    """The number of a replica's first requests that came before any router's journal was
    cut short: those up to the last one that each such router is known to have sent.
    """
    num_certain = len(requests)
    for router in routers:
        if not router.closed:
            sent_ids = {sent.id for sent in router.requests if sent.replica == name}
            counts = [
                n for n, recorded in enumerate(requests, 1) if recorded.id in sent_ids
            ]
            num_certain = min(num_certain, max(counts, default=0))
    return num_certain
