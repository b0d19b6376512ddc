"""What a request gives back. Field names are vLLM's."""

import math
import sys
from array import array
from collections.abc import Mapping

from attrs import field, frozen

from minfer.messages import Finished


@frozen(kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds on a clock that never goes back."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    output_tokens: int = 0  # of all samples
    first_scheduled_time: float | None = None  # when its first sample was let in
    # Seconds from arrival until then, by what who was next in line waited for
    # (`schedule.waits_for`).
    queue_times: Mapping[str, float] = field(factory=dict)
    preemptions: int = 0  # of all samples
    draft_tokens: int = 0  # of all samples: guessed ahead, and verified
    accepted_draft_tokens: int = 0  # of these, that are part of the output

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


@frozen
class Found(Finished):
    """The end of a sequence that a beam search has found."""

    cum_logprob: float = 0.0  # natural, of the whole output


@frozen
class Logprob:
    """What the model gave a token, before temperature, top-k and top-p."""

    logprob: float  # natural
    rank: int  # 1 is the likeliest; of those that tie, the lower id comes first
    decoded_token: str | None = None  # None without a tokenizer


# For each token of a prompt, by id: itself first, then the likeliest at its place. None:
# the first, which nothing is before.
PromptLogprobs = list[dict[int, Logprob] | None]


@frozen(kw_only=True)
class CompletionOutput:
    """One sample: all of it, or what is new of it when streamed."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = (
        None  # once it has ended: "stop", "length", "cancelled" or "error"
    )
    stop_reason: int | str | None = (
        None  # the stop string, or the token id of `stop_token_ids`
    )
    # For each of `token_ids`, if it was asked for: by id, itself first, then the
    # likeliest.
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None  # of all tokens of the sample so far
    error: str = ""
    # What a prompt that was pooled came to, instead of tokens: as in `EmbeddingOutput`.
    vector: bytes = field(default=b"", repr=False)
    # Of its request's prompt, if asked for: for those who see samples one by one.
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@frozen(kw_only=True)
class RequestOutput:
    """A request with its samples, in the order of their index (streamed: those with
    news).
    """

    request_id: str
    prompt: str | None  # as it was given; None if it came as token ids
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    # Prompt tokens that the prefix cache gave sample 0 when it was first admitted: the
    # prompt is counted once, and what later samples find of it was computed for this very
    # request.
    num_cached_tokens: int = 0
    # Of the prompt's tokens, if asked for; None if it ended before they were known.
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)


@frozen(kw_only=True)
class EmbeddingOutput:
    """A prompt as one vector."""

    request_id: str
    prompt: str | None  # as it was given; None if it came as token ids
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    vector: bytes = field(repr=False)  # float32, little-endian; nothing if it failed
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # of the prompt
    finish_reason: str = "stop"  # or "cancelled", or "error"
    error: str = ""

    @property
    def embedding(self) -> list[float]:
        """The vector's numbers."""
        return floats(self.vector).tolist()


def floats(vector: bytes) -> "array[float]":
    """The numbers of a vector as it travels."""
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def normalized(vector: bytes) -> bytes:
    """A vector of length 1 in its direction; one without a direction as it is."""
    numbers = floats(vector)
    length = math.hypot(*numbers)
    if not length:
        return vector
    scaled = array("f", [number / length for number in numbers])
    if sys.byteorder == "big":
        scaled.byteswap()
    return scaled.tobytes()
