"""A front's questions about a request, passed on to all others (`request_queries`)."""

from collections.abc import Sequence

from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire


def pass_on(
    session: Session,
    message: wire.SendQuery | wire.SendAnswer,
    sessions: Sequence[Session],
) -> None:
    """At the engine server: pass the question of a front on to all others, or an answer
    to the front that asked.
    """
    if isinstance(message, wire.SendAnswer):
        for one in sessions:
            if one.front == message.front:
                one.send(wire.encode(message.answer))
        return
    others = [one for one in sessions if one.front not in (None, session.front)]
    for one in others:
        fields = (session.front or 0, message.number, len(others), message.query)
        one.send(wire.encode(wire.ReceivedQuery(*fields)))
    if not others:
        session.send(wire.encode(wire.QueryAnswer(message.number, 0)))
