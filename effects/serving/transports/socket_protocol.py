"""uvicorn's side of a WebSocket, without two of its error lines, which any client could
have written at each try: that of a handshake that is refused with a status, which uvicorn
takes for one without an answer, and that of a text that is not UTF-8.
"""

from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_NO_TEXT: Final = 1007  # the close code of a text that is not UTF-8


class SocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket, from its handshake on."""

    async def send(self, message: Any) -> None:
        """Send what the application says. Raises OSError if the client is gone."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Hand a whole message on."""
        if self.curr_msg_data_type == "text" and not _is_text(b"".join(self.frames)):
            self.frames = []
            self.conn.send_close(_NO_TEXT)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
