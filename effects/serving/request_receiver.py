"""RequestReceiver: from a body on a connection to a request that could run at once.

    announced --> reserved --> received, and counted part by part --> prepared
       413        503        408                  400             400, 413

Each bound is checked before the work that it bounds. A small body is prepared here, in
the event loop, because that is cheaper than handing it over; others go to the pool.
"""

import asyncio
import contextlib
import re
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import attrs
from starlette.requests import ClientDisconnect

from minfer.effects.live.errors import EngineDeadError, OverloadedError, RequestError
from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.serving.access.authentication import Caller, caller_of
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.adapters.named_adapters import NamedAdapters
from minfer.effects.serving.client_errors import SHUTTING_DOWN, ApiError
from minfer.effects.serving.input_workers.task import (
    ModelFacts,
    PreparedRequest,
    QueryResult,
    answer,
    prepare,
)
from minfer.effects.serving.input_workers.worker_limits import TEMPLATE_LIMITS
from minfer.effects.serving.input_workers.worker_pool import BodyRefusals, WorkerPool
from minfer.effects.serving.protocol import Endpoint, GenerationRequest, QueryEndpoint
from minfer.effects.serving.request_parsing.ignored_hints import log_ignored
from minfer.effects.serving.request_parsing.limits import BodyMemory, Limits
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.serving.request_parsing.structured_fields import client_field
from minfer.effects.serving.server_state import ServerState
from minfer.effects.serving.wire.transport import Connection, ignore_part
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.policies.fair_queue import FairQueue
from minfer.sampling.structured import StructuredOutputs

LONG_BODY_BYTES: Final = 4096  # of a body that is prepared away from the event loop
# Others are, too, where their schemas may take tens of milliseconds to translate: with
# look-aheads, patterns of names, or parts that must exclude each other, whether these are
# written with escapes or not.
SLOW_SCHEMA: Final = re.compile(
    rb"\(\?[=!\\]|propertyNames|oneOf|\\u00(?:2[18]|3[dDfF]|[467])"
)
# A body that brings a chat template: the name of the field, written with escapes or not.
_TEMPLATE_NAME: Final = "chat_template"
TEMPLATE_FIELD: Final = re.compile(rb'"chat_template"|\\u00[4-7]')
TEMPLATE_WORKERS: Final = 2
TEMPLATE_TIMEOUT_SECONDS: Final = 10.0
TEMPLATE_REFUSALS: Final = BodyRefusals(
    too_long="chat_template: this template takes too long; correct it, or send less",
    too_heavy="chat_template: this template takes too much time or memory; correct it, "
    "or send less",
    status=400,
    param="chat_template",
)
Result = TypeVar("Result")


class RequestReceiver:
    """Receives and prepares bodies."""

    def __init__(
        self,
        state: ServerState,
        models: Models,
        limits: Limits,
        bounds: ServerBounds,
        adapters: NamedAdapters | None = None,
    ) -> None:
        llm = state.llm
        self._state = state
        self._models = models
        self._adapters = adapters
        self._limits = limits
        self._seconds = bounds.body_timeout
        self._tenants = bounds.tenants
        self._body_memory = BodyMemory()
        # Under a policy with priorities before fairness, each client would use the first.
        self._trusted = not isinstance(llm.setup.config.policy, FairQueue)
        facts = ModelFacts.of(llm, tuple(models.names))
        self.pool = WorkerPool(facts, llm, models, state.pool, workers=bounds.workers)
        self.template_pool: WorkerPool | None = None
        if bounds.trust_request_chat_template:
            self.template_pool = WorkerPool(
                # Without secrets: a template that escaped the sandbox would have them.
                attrs.evolve(facts, request_templates=TEMPLATE_LIMITS, reasoning_key=b""),
                llm,
                models,
                state.pool,
                workers=TEMPLATE_WORKERS,
                limit=TEMPLATE_TIMEOUT_SECONDS,
                refusals=TEMPLATE_REFUSALS,
            )

    async def receive(
        self, endpoint: Endpoint, connection: Connection
    ) -> PreparedRequest:
        """Receive and prepare one body. Raises ClientDisconnect, ApiError, and the errors
        of `to_api_error`.
        """
        caller = caller_of(connection.scope)
        with self._reserve_memory(caller, connection):
            data = await self._receive_body(connection)
            if (pool := self._template_pool(endpoint, data)) is not None:
                work = pool.prepare(endpoint, data, caller.name, _tenant(caller))
                prepared = await _while_connected(connection, work)
            elif len(data) <= LONG_BODY_BYTES and SLOW_SCHEMA.search(data) is None:
                prepared = prepare(endpoint, data, self._state.llm, self._models)
            else:
                work = self.pool.prepare(endpoint, data, caller.name)
                prepared = await _while_connected(connection, work)
            if prepared.request.params.structured_outputs is not None:
                compiling = self._compile(prepared.request, caller.name)
                compiled = await _while_connected(connection, compiling)
                prepared = attrs.evolve(prepared, request=compiled)
            adapter = await self._find_adapter(prepared.model, caller, connection)
        log_ignored(prepared.request.ignored)
        if self._state.closing:  # else it would be generated first, and refused then
            raise EngineDeadError(SHUTTING_DOWN)
        self._limits.check_samples(prepared.request)
        self._limits.check_length(prepared.request, endpoint.prompt_field)
        urgency = _urgency(caller, prepared.request.urgency, trusted=self._trusted)
        prompts = tuple(
            attrs.evolve(prompt, salt=self._tenants.salt(caller.key, prompt.salt))
            for prompt in prepared.request.prompts
        )
        request = attrs.evolve(
            prepared.request, urgency=urgency, prompts=prompts, adapter=adapter
        )
        return attrs.evolve(prepared, request=request)

    async def answer_query(
        self, query: QueryEndpoint, connection: Connection
    ) -> QueryResult:
        """The answer to a question. Raises as `receive` does."""
        caller = caller_of(connection.scope)
        with self._reserve_memory(caller, connection):
            data = await self._receive_body(connection)
            if (pool := self._template_pool(query, data)) is not None:
                work = pool.answer(query, data, caller.name, _tenant(caller))
                answered = await _while_connected(connection, work)
            elif len(data) <= LONG_BODY_BYTES:
                answered = answer(query, data, self._state.llm, self._models)
            else:
                work = self.pool.answer(query, data, caller.name)
                answered = await _while_connected(connection, work)
            await self._find_adapter(answered.model, caller, connection)
        log_ignored(answered.ignored)
        return answered

    async def _find_adapter(
        self, model: str, caller: Caller, connection: Connection
    ) -> str:
        """The digest of the adapter that a model's name is of, or nothing for the model
        itself. Raises ApiError for another name, as `NamedAdapters.load_on_first_use`
        does, and ClientDisconnect.
        """
        adapters = self._adapters
        if adapters is None or model in self._models.names:
            return ""
        if (entry := adapters.find(model, caller)) is None:
            loading = adapters.load_on_first_use(model, caller)
            entry = await _while_connected(connection, loading)
        if entry is None:
            self._models.check_name(model, adapters.visible(caller.key))
            return ""
        return entry.digest

    async def _compile(
        self, request: GenerationRequest, client: str
    ) -> GenerationRequest:
        """A request whose constraint is compiled, away from the event loop, at its
        client's turn; cancelled if the client disconnects. Raises RequestError.
        """
        requested = request.params.structured_outputs
        if requested is None:
            return request
        error = await self._compile_error(requested, client)
        if error is not None and (fallback := request.fallback) is not None:
            params = attrs.evolve(request.params, structured_outputs=fallback.constraint)
            ignored = tuple(dict.fromkeys((*request.ignored, fallback.field)))
            request = attrs.evolve(request, params=params, fallback=None, ignored=ignored)
            return await self._compile(request, client)
        if error is None:
            return request
        param = client_field(requested.param, request.constraint_field)
        for part_constraint in request.parts:
            part_error = await self._compile_error(part_constraint.constraint, client)
            if part_error is not None:
                error, param, requested = (
                    part_error,
                    part_constraint.field,
                    part_constraint.constraint,
                )
                break
        reason = str(error).removeprefix(f"{requested.param}: ")
        raise RequestError(f"{param}: {reason}", param=param)

    async def _compile_error(
        self, requested: StructuredOutputs, client: str
    ) -> GrammarError | None:
        """Why a constraint cannot be compiled; None if it can."""
        grammars = self._state.llm.grammars
        if not grammars.is_compiled(requested) and grammars.is_full_for(client):
            message = "too many constraints wait to be compiled; try again later"
            raise OverloadedError(message)
        compiling = asyncio.wrap_future(grammars.begin(requested, client))
        try:
            await compiling  # if this is cancelled, that is cancelled, too
        except GrammarError as error:
            return error
        return None

    def close(self) -> None:
        """End the pools."""
        self.pool.close()
        if self.template_pool is not None:
            self.template_pool.close()

    def _template_pool(
        self, target: Endpoint | QueryEndpoint, data: bytes
    ) -> WorkerPool | None:
        """The pool of bodies with a chat template, if this may be one and the server
        takes them.
        """
        if self.template_pool is None or target.body is None:
            return None
        has_template_field = _TEMPLATE_NAME in target.body.model_fields
        return (
            self.template_pool
            if has_template_field and TEMPLATE_FIELD.search(data)
            else None
        )

    def _reserve_memory(
        self, caller: Caller, connection: Connection
    ) -> contextlib.AbstractContextManager[None]:
        """Count a body as its client's meanwhile. Raises OverloadedError."""
        max_bytes = self._limits.body
        return self._body_memory.reserve(
            caller.name, min(connection.announced_size(max_bytes), max_bytes)
        )

    async def _receive_body(self, connection: Connection) -> bytes:
        body_counter = self._limits.body_counter()
        watch = ignore_part if body_counter is None else body_counter.add
        try:
            async with asyncio.timeout(self._seconds):
                return await connection.read(self._limits.body, watch)
        except TimeoutError:
            message = f"the body did not come within {self._seconds:g} s"
            raise ApiError(message, status=408) from None


async def _while_connected(
    connection: Connection, work: Coroutine[Any, Any, Result]
) -> Result:
    """Run work while the client is connected. Raises ClientDisconnect."""
    work_task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(connection.wait_for_disconnect())
    try:
        await asyncio.wait((work_task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnect
    finally:
        work_task.cancel()
        disconnect.cancel()
        await asyncio.gather(work_task, disconnect, return_exceptions=True)


def _tenant(caller: Caller) -> str:
    """The name of a client's tenant; without a key, the client's own."""
    return caller.name if caller.key is None else caller.key.tenant


def _urgency(
    caller: Caller, requested: SchedulingHints, *, trusted: bool
) -> SchedulingHints:
    """The name for fair scheduling, and the priority of the key. If the key has none, the
    request's: less urgent than others, or if it is trusted, more.
    """
    level = requested.priority if trusted else max(0, requested.priority)
    requested = attrs.evolve(requested, session=requested.client)
    key = caller.key
    if key is None:
        client = requested.client or caller.name
        return attrs.evolve(requested, client=client, priority=level)
    if key.priority is not None:
        level = key.priority
    return attrs.evolve(requested, client=key.name, priority=level)
