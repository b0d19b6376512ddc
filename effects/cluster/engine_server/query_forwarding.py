"""An API server's questions about a request, passed on to all others
(`request_queries`).
"""

from collections.abc import Sequence

from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire


def forward_query(
    session: Session,
    message: wire.SendQuery | wire.SendAnswer,
    sessions: Sequence[Session],
) -> None:
    """Forward the question of an API server to all others, or an answer to the API server
    that asked.
    """
    if isinstance(message, wire.SendAnswer):
        for receiver in sessions:
            if receiver.api_server == message.api_server:
                receiver.send(wire.encode(message.answer))
        return
    receivers = [
        receiver
        for receiver in sessions
        if receiver.api_server not in (None, session.api_server)
    ]
    for receiver in receivers:
        fields = (session.api_server or 0, message.number, len(receivers), message.query)
        receiver.send(wire.encode(wire.ReceivedQuery(*fields)))
    if not receivers:
        session.send(wire.encode(wire.QueryAnswer(message.number, 0)))
