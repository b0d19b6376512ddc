"""Intake: from a body on a connection to a request that could run at once.

    announced --> held --> received, and counted part by part --> prepared
       413        503        408                  400             400, 413

Each bound is checked before the work that it bounds. A small body is prepared here, in
the event loop, because that is cheaper than handing it over; others go to the pool.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import attrs
from starlette.requests import ClientDisconnect

from minfer.effects.live.errors import EngineDeadError, OverloadedError, RequestError
from minfer.effects.live.input_processing.input_processor import Urgency
from minfer.effects.serving.access.authentication import Caller, caller_of
from minfer.effects.serving.access.server_bounds import Bounds
from minfer.effects.serving.errors import SHUTTING_DOWN, ApiError
from minfer.effects.serving.input_workers.task import Prepared, Recipe, answer, prepare
from minfer.effects.serving.input_workers.worker_pool import Pool
from minfer.effects.serving.protocol import Endpoint, GenerationRequest, Question
from minfer.effects.serving.request_parsing.limits import Holding, Limits
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.serving.request_parsing.structured_fields import named
from minfer.effects.serving.server_state import Backend
from minfer.effects.serving.wire.transport import Connection, see_nothing
from minfer.effects.text.grammars.protocol import GrammarError
from minfer.policies.fair_queue import FairQueue
from minfer.sampling.structured import StructuredOutputs

LONG: Final = 4096  # bytes of a body that is prepared away from the event loop
Found = TypeVar("Found")


class Intake:
    """Receives and prepares bodies."""

    def __init__(
        self, backend: Backend, models: Models, limits: Limits, bounds: Bounds
    ) -> None:
        llm = backend.llm
        self._backend = backend
        self._models = models
        self._limits = limits
        self._seconds = bounds.body_timeout
        self._tenants = bounds.tenants
        self._holding = Holding()
        # Under a policy with priorities before fairness, each client would use the first.
        self._trusted = not isinstance(llm.setup.config.policy, FairQueue)
        recipe = Recipe.of(llm, tuple(models.names))
        self.pool = Pool(recipe, llm, models, backend.pool, workers=bounds.workers)

    async def take(self, endpoint: Endpoint, connection: Connection) -> Prepared:
        """Receive and prepare one body. Raises ClientDisconnect, ApiError, and the errors
        of `told_of`.
        """
        caller = caller_of(connection.scope)
        with self._held(caller, connection):
            data = await self._received(connection)
            if len(data) <= LONG:
                prepared = prepare(endpoint, data, self._backend.llm, self._models)
            else:
                work = self.pool.prepare(endpoint, data, caller.name)
                prepared = await _while_there(connection, work)
            if prepared.request.params.structured_outputs is not None:
                compiling = self._compiled(prepared.request, caller.name)
                await _while_there(connection, compiling)
        if self._backend.closing:  # else it would be generated first, and refused then
            raise EngineDeadError(SHUTTING_DOWN)
        self._limits.check_samples(prepared.request)
        self._limits.check_room(prepared.request, endpoint.prompt_field)
        urgency = _urgency(caller, prepared.request.urgency, trusted=self._trusted)
        prompts = tuple(
            attrs.evolve(one, salt=self._tenants.salt(caller.key, one.salt))
            for one in prepared.request.prompts
        )
        request = attrs.evolve(prepared.request, urgency=urgency, prompts=prompts)
        return attrs.evolve(prepared, request=request)

    async def ask(self, question: Question, connection: Connection) -> str:
        """The answer to a question, in JSON. Raises as `take` does."""
        caller = caller_of(connection.scope)
        with self._held(caller, connection):
            data = await self._received(connection)
            if len(data) <= LONG:
                return answer(question, data, self._backend.llm, self._models)
            work = self.pool.answer(question, data, caller.name)
            return await _while_there(connection, work)

    async def _compiled(self, request: GenerationRequest, client: str) -> None:
        """Have an answer's constraint compiled, away from the event loop, at its client's
        turn; cancelled if the client disconnects. Raises RequestError.
        """
        asked = request.params.structured_outputs
        if asked is None or (why := await self._refusal(asked, client)) is None:
            return
        param = named(asked.param, request.constrained_by)
        for part in request.parts:
            within = await self._refusal(part.asked, client)
            if within is not None:
                why, param, asked = within, part.field, part.asked
                break
        said = str(why).removeprefix(f"{asked.param}: ")
        raise RequestError(f"{param}: {said}", param=param)

    async def _refusal(
        self, asked: StructuredOutputs, client: str
    ) -> GrammarError | None:
        """Why a constraint cannot be compiled; None if it can."""
        grammars = self._backend.llm.grammars
        if not grammars.knows(asked) and grammars.crowded(client):
            why = "too many constraints wait to be compiled; try again later"
            raise OverloadedError(why)
        begun = asyncio.wrap_future(grammars.begin(asked, client))
        try:
            await begun  # if this is cancelled, that is cancelled, too
        except GrammarError as error:
            return error
        return None

    def close(self) -> None:
        """End the pool."""
        self.pool.close()

    def _held(
        self, caller: Caller, connection: Connection
    ) -> contextlib.AbstractContextManager[None]:
        """Count a body as its client's meanwhile. Raises OverloadedError."""
        most = self._limits.body
        return self._holding.hold(caller.name, min(connection.announced(most), most))

    async def _received(self, connection: Connection) -> bytes:
        tally = self._limits.tally()
        see = see_nothing if tally is None else tally.add
        try:
            async with asyncio.timeout(self._seconds):
                return await connection.read(self._limits.body, see)
        except TimeoutError:
            why = f"the body did not come within {self._seconds:g} s"
            raise ApiError(why, status=408) from None


async def _while_there(connection: Connection, work: Coroutine[Any, Any, Found]) -> Found:
    """Run work while the client is connected. Raises ClientDisconnect."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(connection.departed())
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


def _urgency(caller: Caller, asked: Urgency, *, trusted: bool) -> Urgency:
    """The name for fair scheduling, and the priority of the key. If the key has none, the
    request's: less urgent than others, or if it is trusted, more.
    """
    level = asked.priority if trusted else max(0, asked.priority)
    key = caller.key
    if key is None:
        client = asked.client or caller.name
        return attrs.evolve(asked, client=client, priority=level)
    if key.priority is not None:
        level = key.priority
    return attrs.evolve(asked, client=key.name, priority=level)
