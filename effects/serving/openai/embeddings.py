"""POST /v1/embeddings: texts become vectors.

A vector is formatted when it comes, and the answer is joined from these strings: a list
of thousands of numbers takes milliseconds to write, and the server's other requests
should not wait for all of them at once.
"""

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import read_prompt
from minfer.effects.serving.client_errors import INTERNAL, ApiError
from minfer.effects.serving.openai.completions import PromptsField
from minfer.effects.serving.openai.fields import Client, PriorityField
from minfer.effects.serving.openai.usage import usage_of
from minfer.effects.serving.protocol import (
    Endpoint,
    GenerationRequest,
    Include,
    ModelInfo,
    PoolingOptions,
    PromptUsage,
)
from minfer.effects.serving.request_parsing.bodies import StrictObject, read_body
from minfer.effects.serving.wire.error_form import failure
from minfer.effects.serving.wire.stamp import Stamp
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.effects.text.outputs import CompletionOutput, floats, normalized
from minfer.effects.text.tokenizer import Tokenizer
from minfer.sampling.params import SamplingParams

MAX_INPUTS: Final = 2048  # OpenAI's


class EmbeddingBody(StrictObject):
    """Texts, and the parameters of their vectors."""

    input: Annotated[
        list[Any], Field(fail_fast=True, max_length=MAX_INPUTS), PromptsField
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: Client = ""
    # vLLM's:
    normalize: bool = True  # to a length of 1
    priority: PriorityField = 0
    cache_salt: str = ""
    # minfer's:
    pooling: Literal["last", "mean"] = "last"
    deadline: Annotated[float, Field(gt=0)] = math.inf  # seconds from arrival

    @property
    def stream(self) -> bool:
        """False: the answer is sent as a whole."""
        return False

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """Its inputs as token ids. Raises RequestError and ApiError."""
        size = llm.setup.spec.hidden_size
        if self.dimensions not in (None, size):
            message = f"dimensions: this model's vectors have {size}; leave it out"
            raise ApiError(message, "dimensions")
        vocab, salt = llm.setup.spec.vocab_size, self.cache_salt.encode()
        prompts = [read_prompt(entry, llm.tokenizer, vocab, salt) for entry in self.input]
        return GenerationRequest(
            prompts=tuple(prompts),
            params=SamplingParams(),
            urgency=SchedulingHints(
                priority=self.priority, client=self.user, deadline=self.deadline
            ),
            stream=False,
            include=Include(),
            pooled=PoolingOptions(
                pooling_type=self.pooling,
                normalize=self.normalize,
                base64=self.encoding_format == "base64",
            ),
        )


class EmbeddingList:
    """An answer: one object with a vector for each input."""

    def __init__(
        self, stamp: Stamp, request: GenerationRequest, _tokenizer: Tokenizer | None
    ) -> None:
        self._stamp = stamp
        self._pooled = request.pooled or PoolingOptions()
        self._formatted: dict[int, str] = {}  # by input

    def write(self, choice: int, delta: CompletionOutput) -> list[StreamEvent]:
        """Keep the vector of an input; nothing is sent yet."""
        if not delta.vector:
            message = "the request failed: the executor gave no vector"
            raise ApiError(message, None, "engine_error", INTERNAL)
        vector = normalized(delta.vector) if self._pooled.normalize else delta.vector
        formatted = (
            b64encode(vector).decode() if self._pooled.base64 else _numbers(vector)
        )
        item = {"object": "embedding", "index": choice, "embedding": formatted}
        self._formatted[choice] = json.dumps(item)
        return []

    def end(self, served: Sequence[PromptUsage]) -> list[StreamEvent]:
        """The answer."""
        usage = usage_of(served)
        del usage["completion_tokens"]
        fields = {
            "id": self._stamp.id,
            "object": "list",
            "created": self._stamp.created,
            "model": self._stamp.model,
            "usage": usage,
        }
        data = ", ".join(self._formatted[i] for i in sorted(self._formatted))
        return [StreamEvent(f'{json.dumps(fields)[:-1]}, "data": [{data}]}}')]


def _numbers(vector: bytes) -> list[float]:
    return floats(vector).tolist()


ENDPOINT: Final = Endpoint(
    name="embeddings",
    path="/v1/embeddings",
    summary="Make vectors of texts.",
    body=EmbeddingBody,
    id_prefix="embd",
    prompt_field="input",
    streams=False,
    read=partial(read_body, EmbeddingBody),
    writer=EmbeddingList,
    failure=failure,
)
