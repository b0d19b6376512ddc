"""The outputs of a request. Field names are vLLM's."""

import math
import sys
from array import array
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from minfer.records.messages import Finished

if TYPE_CHECKING:
    from torch import Tensor


FLOAT_BYTES: Final = 4  # of float32


@frozen(kw_only=True)
class RequestMetrics:
    """The times of a request, in seconds on a monotonic clock; under vLLM's names, too,
    where these differ. A time that has not come is None, under vLLM's names 0.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    output_tokens: int = 0  # of all samples
    first_scheduled_time: float | None = None  # when its first sample was admitted
    # Seconds from arrival until then, by the reason that blocked the head of the queue
    # (`schedule.queue_blocked_by`).
    queue_times: Mapping[str, float] = field(factory=dict)
    preemptions: int = 0  # of all samples
    draft_tokens: int = 0  # of all samples: proposed, and verified
    accepted_draft_tokens: int = 0  # of these, those that are part of the output

    @property
    def ttft(self) -> float | None:
        """Time to the first token of any sample, in seconds."""
        return (
            None
            if self.first_token_time is None
            else self.first_token_time - self.arrival_time
        )

    @property
    def latency(self) -> float | None:
        """Time from arrival to the last token, in seconds."""
        return (
            None
            if self.last_token_time is None
            else self.last_token_time - self.arrival_time
        )

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first, in seconds; samples
        count together.
        """
        if self.ttft is None or self.latency is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def num_generation_tokens(self) -> int:
        """vLLM's name of `output_tokens`."""
        return self.output_tokens

    @property
    def num_preemptions(self) -> int:
        """vLLM's name of `preemptions`."""
        return self.preemptions

    @property
    def queued_ts(self) -> float:
        """vLLM's name of the time at which the request entered the waiting queue."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        """vLLM's name of `first_scheduled_time`."""
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        """vLLM's name of `first_token_time`."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """vLLM's name of `last_token_time`."""
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        """vLLM's name of `ttft`."""
        return self.ttft or 0.0


@frozen
class BeamFinished(Finished):
    """The end of a sequence that a beam search has found."""

    cum_logprob: float = 0.0  # natural, of the whole output


@frozen
class Logprob:
    """A token's log-probability by the model, before temperature, top-k and top-p."""

    logprob: float  # natural
    rank: int  # 1 is the likeliest; of equal ones, the lower id comes first
    decoded_token: str | None = None  # None without a tokenizer


# For each token of a prompt, by id: itself first, then the likeliest at its place. None:
# the first, which has no predecessor.
PromptLogprobs = list[dict[int, Logprob] | None]


@frozen(kw_only=True)
class CompletionOutput:
    """One sample: all of it, or its new part when streamed."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = (
        None  # once it has ended: "stop", "length", "cancelled" or "error"
    )
    stop_reason: int | str | None = (
        None  # the stop string, or the token id of `stop_token_ids`
    )
    # For each of `token_ids`, if requested: by id, itself first, then the
    # likeliest.
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None  # of all tokens of the sample so far
    error: str = ""
    # The vector of a pooled prompt, instead of tokens: as in `EmbeddingOutput`.
    vector: bytes = field(default=b"", repr=False)
    # Of its request's prompt, if requested: for readers of single samples.
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@frozen(kw_only=True)
class RequestOutput:
    """A request with its samples, in the order of their index (streamed: those with new
    output). Its lists are its own: to change one changes no other output.
    """

    request_id: str
    prompt: str | None  # as it was given; None if it came as token ids
    prompt_ids: tuple[int, ...] = field(repr=False)  # of tokens, as the engine has them
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    # Prompt tokens in the prefix cache when sample 0 was first admitted: the prompt is
    # counted once, and later samples hit blocks that were computed for this very
    # request.
    num_cached_tokens: int = 0
    # Of the prompt's tokens, if requested; None if it ended before they were known.
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids, in a list of this output's own."""
        return list(self.prompt_ids)


@frozen
class EmbeddingOutput:
    """The vector of a prompt."""

    vector: bytes = field(repr=False)  # float32, little-endian; empty if it failed

    @cached_property
    def embedding(self) -> list[float]:
        """The vector's numbers."""
        return floats(self.vector).tolist()

    @property
    def hidden_size(self) -> int:
        """The number of its numbers."""
        return len(self.vector) // FLOAT_BYTES

    @property
    def data(self) -> "Tensor":
        """The vector as a tensor in float32, on the CPU: as `LLM.encode` of vLLM has
        it.
        """
        import torch

        return torch.tensor(self.embedding, dtype=torch.float32)


@frozen(kw_only=True)
class EmbeddingRequestOutput:
    """A prompt as one vector."""

    request_id: str
    prompt: str | None  # as it was given; None if it came as token ids
    prompt_ids: tuple[int, ...] = field(repr=False)  # of tokens, as the engine has them
    outputs: EmbeddingOutput
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # of the prompt
    finish_reason: str = "stop"  # or "cancelled", or "error"
    error: str = ""
    finished: bool = True

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids, in a list of this output's own."""
        return list(self.prompt_ids)

    @property
    def vector(self) -> bytes:
        """The vector: see `EmbeddingOutput`."""
        return self.outputs.vector

    @property
    def embedding(self) -> list[float]:
        """The vector's numbers."""
        return self.outputs.embedding


def floats(vector: bytes) -> "array[float]":
    """The numbers of a vector in bytes."""
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first numbers of a vector."""
    return vector[: dimensions * FLOAT_BYTES]


def normalized(vector: bytes) -> bytes:
    """A vector of length 1 in its direction; a zero vector unchanged."""
    numbers = floats(vector)
    length = math.hypot(*numbers)
    if not length:
        return vector
    scaled = array("f", [number / length for number in numbers])
    if sys.byteorder == "big":
        scaled.byteswap()
    return scaled.tobytes()
