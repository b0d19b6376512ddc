"""The bounds of one request that follow from the model, checked before work is done.

The bytes of a body are counted as they arrive (`body_counter`). Every bound is generous:
each body that could be valid passes, and its parts are checked exactly where they are
read (`Tokenizer.max_chars` for a text, the context for token ids, the fields for
the rest).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from attrs import field, frozen

from minfer.effects.live.errors import OverloadedError
from minfer.effects.live.served_model import ServedModel
from minfer.effects.serving.client_errors import ApiError, ContextLengthError
from minfer.effects.serving.protocol import GenerationRequest
from minfer.effects.serving.request_parsing.body_counts import BodyCounter
from minfer.lifecycle.arrive import longest_prompt, queue_is_full

MIN_BODY_LIMIT_BYTES: Final = 2**22  # that are accepted for any model
ID_BYTES: Final = 8  # of a token id in JSON, with its comma
FREE_ROWS_DIVISOR: Final = 8  # a request leaves one row in 8 free
BODY_MEMORY_BYTES: Final = 2**28  # of bodies that are being received or prepared
CLIENT_SHARE_DIVISOR: Final = 2  # a client may use one half of these
UNCOUNTED_BODY_BYTES: Final = 2**16  # of a body that is too small to be counted


def largest_body(context: int) -> int:
    """The default maximum of a body in bytes: a context full of token ids fits."""
    return max(MIN_BODY_LIMIT_BYTES, ID_BYTES * context)


@frozen(kw_only=True)
class Limits:
    """The bounds of one request."""

    body: int  # bytes
    context: int  # tokens of prompt and output
    text: int | None  # characters of a text that may fit into it; None: not known
    max_running: int  # samples that run at once
    max_waiting: int  # samples that wait at once

    @classmethod
    def of(cls, llm: ServedModel, body: int | None = None) -> "Limits":
        """The limits of a model; None: the default for bodies."""
        config = llm.setup.config
        return cls(
            body=largest_body(config.max_model_len) if body is None else body,
            context=config.max_model_len,
            text=None if llm.tokenizer is None else llm.tokenizer.max_chars,
            max_running=config.max_num_seqs,
            max_waiting=config.max_waiting,
        )

    def body_counter(self) -> BodyCounter | None:
        """A new counter for the bytes of one body; None if there is no bound to check."""
        return None if self.text is None else BodyCounter(self.context, self.text)

    def check_samples(self, request: GenerationRequest) -> None:
        """Refuse what an idle server could not serve either. Raises ApiError."""
        n, prompts = request.width, len(request.prompts)
        field = "best_of" if n > request.params.n else "n"
        if queue_is_full(0, n, self.max_waiting):
            reason = f"{field}: {n} samples do not fit into the waiting queue, which"
            remedy = f"holds {self.max_waiting} (max_waiting); ask for fewer at once"
            raise ApiError(f"{reason} {remedy}", field)
        capacity = self.max_running + self.max_waiting
        if n * prompts > capacity:
            reason = (
                f"{prompts} prompts of {n} samples each are more than the {capacity} that"
            )
            raise ApiError(
                f"{reason} can run and wait here; ask for fewer at once", field
            )

    def check_length(self, request: GenerationRequest, prompt_field: str) -> None:
        """Refuse a `max_tokens` that does not fit, if a client gives one; without one,
        the request gets what fits. Raises ContextLengthError.

        A prompt that does not fit alone is refused by the engine's input processor.
        """
        requested = request.params.max_tokens
        if not request.max_tokens_field or requested is None:
            return
        for i, prompt in enumerate(request.prompts):
            length = len(prompt.ids)
            fits = length <= longest_prompt(self.context, output=True)
            if fits and length + requested > self.context:
                has_several = len(request.prompts) > 1
                place = f"{prompt_field}[{i}]" if has_several else prompt_field
                max_tokens_field = request.max_tokens_field
                raise ContextLengthError(
                    length, requested, self.context, place, max_tokens_field
                )

    def max_running_prompts(self, n: int) -> int:
        """How many prompts of a request run at once, of `n` samples each."""
        max_running = self.max_running - self.max_running // FREE_ROWS_DIVISOR
        return max(1, min(max_running, self.max_waiting) // n)


@frozen
class BodyMemory:
    """Bytes of bodies that are being received or prepared, by client: a bound on memory.

    They are counted as they are announced, before they are received.
    """

    max_bytes: int = BODY_MEMORY_BYTES
    _reserved: dict[str, int] = field(factory=dict, init=False)

    @property
    def reserved(self) -> Mapping[str, int]:
        """The bytes of each client now."""
        return self._reserved

    @contextmanager
    def reserve(self, client: str, size: int) -> Iterator[None]:
        """Count `size` bytes for a client meanwhile. Raises OverloadedError."""
        if size <= UNCOUNTED_BODY_BYTES:
            yield
            return
        client_bytes = self._reserved.get(client, 0) + size
        if (
            client_bytes > self.max_bytes // CLIENT_SHARE_DIVISOR
            or sum(self._reserved.values()) + size > self.max_bytes
        ):
            raise OverloadedError("too many large bodies are being read; try again later")
        self._reserved[client] = client_bytes
        try:
            yield
        finally:
            self._reserved[client] -= size
            if not self._reserved[client]:
                del self._reserved[client]
