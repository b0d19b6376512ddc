"""The program of a router's workers (`minfer.effects.serving.input_workers`).

python -m minfer.effects.proxy.prompt_worker DESCRIPTOR
"""

import sys

import msgspec

from minfer.effects.proxy.prompt_bodies import KeyFacts, read_record
from minfer.effects.proxy.token_keys import TokenKeys
from minfer.effects.serving.input_workers.worker_limits import DEFAULT_LIMITS
from minfer.effects.serving.input_workers.worker_loop import refusal_reply, run_worker
from minfer.effects.serving.input_workers.worker_messages import (
    WorkerReply,
    WorkerRequest,
)
from minfer.effects.text.tools.formats import Parsers


class PromptWorker:
    """Reads bodies for a router."""

    limits = DEFAULT_LIMITS

    def __init__(self, facts: KeyFacts) -> None:
        model = facts.model
        self._tokens = None
        if model is not None:
            parsers = Parsers(facts.tool_parser, facts.reasoning_parser)
            self._tokens = TokenKeys(model, facts.block_size, facts.templates, parsers)

    def reply(self, request: WorkerRequest) -> WorkerReply:
        """The reply for a body; never raises."""
        try:
            return WorkerReply(record=read_record(request.data, self._tokens))
        except Exception as error:
            return refusal_reply(error, request.path)


def _make(facts: bytes) -> PromptWorker:
    return PromptWorker(msgspec.json.decode(facts, type=KeyFacts))


if __name__ == "__main__":
    sys.exit(run_worker(_make))
