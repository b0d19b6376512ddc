"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's, for administrators."""

from typing import Final

import msgspec
from attrs import frozen
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import Scope

from minfer.effects.serving.access.authentication import caller_of
from minfer.effects.serving.adapters.named_adapters import NOT_FOUND, NamedAdapters
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.server_state import ServerState
from minfer.effects.serving.wire.error_form import failure
from minfer.effects.serving.wire.origins import is_cross_origin
from minfer.effects.serving.wire.post import post_route
from minfer.effects.serving.wire.transport import (
    Connection,
    StreamEvent,
    ignore_part,
)

LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
OPTION: Final = "--allow-runtime-lora-updating"
MAX_BODY_BYTES: Final = 2**16
_FORBIDDEN: Final = 403


class LoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a load."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # in the place of an adapter of that name


class UnloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an unload; the number is vLLM's, and has no effect."""

    lora_name: str
    lora_int_id: int | None = None


@frozen
class AdapterUpdates:
    """The two endpoints; `adapters` is None where the server has none."""

    state: ServerState
    adapters: NamedAdapters | None

    def routes(self) -> list[BaseRoute]:
        """Returns both routes."""
        return [post_route(LOAD_PATH, self._load), post_route(UNLOAD_PATH, self._unload)]

    async def _load(self, connection: Connection) -> None:
        await self._answer(connection, LOAD_PATH)

    async def _unload(self, connection: Connection) -> None:
        await self._answer(connection, UNLOAD_PATH)

    async def _answer(self, connection: Connection, path: str) -> None:
        """Load or unload as the body says, and answer."""
        try:
            adapters = self._check_allowed(connection.scope)
            data = await connection.read(MAX_BODY_BYTES, ignore_part)
            if path == LOAD_PATH:
                message = await _load(adapters, connection.scope, data)
            else:
                message = await _unload(adapters, data)
        except ClientDisconnect:
            return
        except Exception as error:
            api_error = self.state.api_error(error, "lora_name", path)
            await connection.refuse(failure(api_error))
            return
        transport = connection.transport(stream=False, name="")
        event = StreamEvent(msgspec.json.encode({"message": message}).decode())
        await transport.write([event], last=True)

    def _check_allowed(self, scope: Scope) -> NamedAdapters:
        """Returns the adapters, for a client that may change them. Raises ApiError."""
        adapters = self.adapters
        if adapters is None or not adapters.sources.runtime_updates:
            message = "this server does not load or unload adapters while it runs; start"
            needs = f"it with --enable-lora and {OPTION}"
            raise ApiError(f"{message} {needs}", None, "not_found", NOT_FOUND)
        key = caller_of(scope).key
        if is_cross_origin(scope) or key is None or not key.admin:
            message = (
                "only a key with admin = true (in the file of --api-keys-file) may load "
                "or unload adapters"
            )
            raise ApiError(message, None, "not_allowed", _FORBIDDEN)
        return adapters


async def _load(adapters: NamedAdapters, scope: Scope, data: bytes) -> str:
    try:
        body = msgspec.json.decode(data, type=LoadBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_body(error) from None
    entry = await adapters.load(
        body.lora_name, body.lora_path, caller_of(scope), replace=body.load_inplace
    )
    return f"Success: LoRA adapter {entry.name!r} added successfully."


async def _unload(adapters: NamedAdapters, data: bytes) -> str:
    try:
        body = msgspec.json.decode(data, type=UnloadBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_body(error) from None
    await adapters.unload(body.lora_name)
    return f"Success: LoRA adapter {body.lora_name!r} removed successfully."


def _bad_body(error: Exception) -> ApiError:
    return ApiError(f"the body is not valid: {error}")
