"""Reads bodies for a router: small ones in the event loop, compressed and large ones in a
worker process (`prompt_worker`).
"""

from functools import partial
from typing import Final

import msgspec
from attrs import frozen

from minfer.effects.proxy.prompt_bodies import (
    KeyFacts,
    PromptBody,
    ReadPrompt,
    read_prompt,
    read_record,
)
from minfer.effects.proxy.token_keys import TokenKeys
from minfer.effects.serving.input_workers.process import Process
from minfer.effects.serving.input_workers.worker_pool import BodyPool

MODULE: Final = "minfer.effects.proxy.prompt_worker"
# Bytes of a body that is read in the event loop, as a worker would cost more: with a
# tokenizer, which takes longer, and without.
MAX_LOOP_TOKENIZED_BYTES: Final = 2**12
MAX_LOOP_TEXT_BYTES: Final = 2**14


@frozen
class PromptReader:
    """Reads bodies: in the event loop, or, those that take longer, in a pool."""

    tokens: TokenKeys | None
    pool: BodyPool

    @classmethod
    def start(cls, tokens: TokenKeys | None, workers: int) -> "PromptReader":
        """A reader with this number of worker processes; 0: with threads."""
        facts = KeyFacts(model=None)
        if tokens is not None:
            facts = KeyFacts(
                model=tokens.folder,
                block_size=tokens.block_size,
                templates=tokens.templates,
                tool_parser=tokens.parsers.tools,
                reasoning_parser=tokens.parsers.reasoning,
            )
        start = partial(Process, facts, MODULE)
        return cls(tokens, BodyPool(start, None, workers=workers))

    async def read(self, body: PromptBody, client: str) -> ReadPrompt:
        """Read a body, at its client's turn. Raises as `read_prompt` and
        `BodyPool.run` do.
        """
        max_bytes = MAX_LOOP_TEXT_BYTES
        if self.tokens is not None:
            max_bytes = MAX_LOOP_TOKENIZED_BYTES
        if not body.coding and len(body.data) <= max_bytes:
            return read_prompt(body, self.tokens)
        data = msgspec.msgpack.encode(body)
        in_thread = partial(read_record, data, self.tokens)
        size = body.max_bytes if body.coding else len(body.data)
        result = await self.pool.run(body.path, data, client, in_thread, size)
        if not isinstance(result, bytes):
            raise TypeError(f"{body.path} was not read for a router")
        return msgspec.msgpack.decode(result, type=ReadPrompt)
