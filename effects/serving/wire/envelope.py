"""A message on a socket, opened without parsing its body.

    {"id": ..., "endpoint": ..., "body": {...}}     or     {"cancel": id}

Theory. A body may have megabytes, and making objects of them would block the event loop,
and so all other streams, for half a second. Here it is skipped: `msgspec.Raw` finds where
it ends, and whether it is JSON, in some milliseconds for the largest. It is passed on as
bytes, exactly like the body of a POST: it is counted, and a large one is read in another
process. What is read here is short, or refused.
"""

from typing import Final

import msgspec
from attrs import frozen

from minfer.effects.serving.client_errors import ApiError

MAX_MESSAGE_ID_CHARS: Final = 128
_MAX_CHAR_BYTES: Final = len(rb"\ud83d\ude00")  # as JSON may write a character
_ABSENT: Final = msgspec.Raw()
_UNKNOWN: Final = "Object contains unknown field `"  # msgspec's message, before a name


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """All fields that a message may have, unparsed."""

    id: msgspec.Raw = _ABSENT
    endpoint: msgspec.Raw = _ABSENT
    body: msgspec.Raw = _ABSENT
    cancel: msgspec.Raw = _ABSENT


class _IdAlone(msgspec.Struct):
    """The fields that are read of a message with unknown fields."""

    id: msgspec.Raw = _ABSENT


_fields: Final = msgspec.json.Decoder(_Fields)
_id_alone: Final = msgspec.json.Decoder(_IdAlone)


@frozen
class RequestMessage:
    """A message with a request."""

    id: str
    endpoint: str
    body: bytes


@frozen
class CancelMessage:
    """A message that cancels a request."""

    id: str


@frozen
class OpenedMessage:
    """A message that is an object, whose fields are not yet checked; `name` is its id, if
    it has one.
    """

    name: str | None
    _fields: _Fields | None
    _unknown_field: str = ""  # an unknown field

    def parse(self) -> RequestMessage | CancelMessage:
        """The parsed message. Raises ApiError, which names the field."""
        fields = self._fields
        if fields is None:
            message = (
                f"{self._unknown_field}: is not a field here; there is id, endpoint, body"
            )
            raise ApiError(message, self._unknown_field)
        if bytes(fields.cancel):
            name = _decode_string(fields.cancel)
            if name is None or any(map(bytes, (fields.id, fields.endpoint, fields.body))):
                raise ApiError("cancel: must be an id, and the only field", "cancel")
            return CancelMessage(name)
        if not self.name:
            message = f"id: must be a string of 1 to {MAX_MESSAGE_ID_CHARS} characters"
            raise ApiError(message, "id")
        endpoint = _decode_string(fields.endpoint)
        if endpoint is None:
            raise ApiError("endpoint: must be a string", "endpoint")
        body = bytes(fields.body)
        if not body.startswith(b"{"):
            raise ApiError("body: must be an object", "body")
        return RequestMessage(self.name, endpoint, body)


def open_message(text: str | None) -> OpenedMessage:
    """Open a message. Raises ApiError if it is no JSON object."""
    if text is None:
        raise ApiError("the message is binary; send JSON as text")
    try:
        try:
            fields = _fields.decode(text)
        except msgspec.ValidationError as error:
            _, unknown, unknown_field = str(error).partition(_UNKNOWN)
            if not unknown:
                raise ApiError("the message must be an object") from None
            name = _decode_string(_id_alone.decode(text).id)
            return OpenedMessage(
                name, None, unknown_field.rpartition("`")[0][:MAX_MESSAGE_ID_CHARS]
            )
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"the message is not valid JSON: {error}") from None
    return OpenedMessage(_decode_string(fields.id), fields)


def _decode_string(raw: msgspec.Raw) -> str | None:
    """The string of a field; None, if it is none; empty, if it is too long."""
    data = bytes(raw)
    if not data.startswith(b'"'):
        return None
    if len(data) > _MAX_CHAR_BYTES * MAX_MESSAGE_ID_CHARS + len('""'):
        return ""
    try:
        text = msgspec.json.decode(data, type=str)
    except msgspec.DecodeError:
        return None
    return text if len(text) <= MAX_MESSAGE_ID_CHARS else ""
