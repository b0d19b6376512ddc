"""A front's questions about a request, passed on to all others (`request_queries`)."""

from collections.abc import Sequence

from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire


def forward_query(
    session: Session,
    message: wire.SendQuery | wire.SendAnswer,
    sessions: Sequence[Session],
) -> None:
    """Forward the question of a front to all others, or an answer to the front that
    asked.
    """
    if isinstance(message, wire.SendAnswer):
        for receiver in sessions:
            if receiver.front == message.front:
                receiver.send(wire.encode(message.answer))
        return
    receivers = [
        receiver for receiver in sessions if receiver.front not in (None, session.front)
    ]
    for receiver in receivers:
        fields = (session.front or 0, message.number, len(receivers), message.query)
        receiver.send(wire.encode(wire.ReceivedQuery(*fields)))
    if not receivers:
        session.send(wire.encode(wire.QueryAnswer(message.number, 0)))
