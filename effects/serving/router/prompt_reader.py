"""Reads bodies for a router: one that comes compressed, or that is large, takes long, and
a worker process reads it (`prompt_worker`).
"""

from functools import partial
from typing import Final

import msgspec
from attrs import frozen

from minfer.effects.serving.input_workers.process import Process
from minfer.effects.serving.input_workers.worker_pool import BodyPool
from minfer.effects.serving.router.prompt_bodies import (
    KeyFacts,
    PromptBody,
    ReadPrompt,
    read_prompt,
    read_record,
)
from minfer.effects.serving.router.token_keys import TokenKeys

MODULE: Final = "minfer.effects.serving.router.prompt_worker"
# Bytes of a body that is read in the event loop, as that is cheaper than handing it over:
# of text, as many as take no longer than 4 KB do where they are tokenized, too.
SHORT_TEXT: Final = 2**14
SHORT_PROMPT: Final = 2**12


@frozen
class PromptReader:
    """Reads bodies: in the event loop, or, those that take longer, in a pool."""

    tokens: TokenKeys | None
    pool: BodyPool

    @classmethod
    def start(cls, tokens: TokenKeys | None, workers: int) -> "PromptReader":
        """A reader with so many worker processes; 0: with threads."""
        facts = KeyFacts(model=None)
        if tokens is not None:
            facts = KeyFacts(model=tokens.folder, block_size=tokens.block_size)
        start = partial(Process, facts, MODULE)
        return cls(tokens, BodyPool(start, None, workers=workers))

    async def read(self, body: PromptBody, client: str) -> ReadPrompt:
        """Read a body, at its client's turn. Raises as `read_prompt` and
        `BodyPool.run` do.
        """
        short = SHORT_TEXT if self.tokens is None else SHORT_PROMPT
        if not body.coding and len(body.data) <= short:
            return read_prompt(body, self.tokens)
        data = msgspec.msgpack.encode(body)
        in_thread = partial(read_record, data, self.tokens)
        size = body.most if body.coding else len(body.data)
        result = await self.pool.run(body.path, data, client, in_thread, size)
        if not isinstance(result, bytes):
            raise TypeError(f"{body.path} was not read for a router")
        return msgspec.msgpack.decode(result, type=ReadPrompt)
