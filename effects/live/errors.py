"""Errors for callers: requests that cannot be served, engines that serve no requests."""

from typing import Final

from minfer.lifecycle.arrive import longest_prompt, queue_is_full

PROGRAM_ENDED_MESSAGE: Final = (
    "the program's main thread has ended; let it wait for those who still ask"
)


# The option of `minfer serve` that lets requests bring chat templates.
REQUEST_TEMPLATE_OPTION: Final = "--trust-request-chat-template"


class RequestError(ValueError):
    """A request cannot be served: the one at `index` of its list, because of its field
    `param`.
    """

    def __init__(self, message: str, index: int = 0, param: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.param = param


class TooLongError(RequestError):
    """The context or the cache cannot hold prompt and output, whatever the load."""


_UNREAD_FACTOR: Final = 2  # times the limit, beyond which a prompt is not read to its end
_MIN_ITEMS_READ: Final = 4096  # items of a list that are always read


def far_too_long(context: int) -> TooLongError:
    """Returns the error about a prompt that may not have been read to its end: it does
    not name its length.
    """
    # Programs search for the words "maximum context length is", here and below.
    reason = (
        f"the prompt is far too long: this model's maximum context length is {context}"
    )
    return TooLongError(f"{reason} tokens; shorten the prompt")


def check_prompt(length: int, context: int, model_max_len: int, *, output: bool) -> None:
    """Raise TooLongError for a prompt of `length` tokens that the context cannot hold,
    with room for `output` if there is any. The model itself can have a context of
    `model_max_len`.
    """
    if length <= longest_prompt(context, output=output):
        return
    if length > _UNREAD_FACTOR * max(context, _MIN_ITEMS_READ):
        raise far_too_long(context)
    reason = (
        f"the prompt has {length} tokens; this model's maximum context length is "
        f"{context} tokens"
    )
    if not output:
        raise TooLongError(f"{reason}: shorten the prompt")
    reason += ", of which at least one must be left for the output: shorten the prompt"
    remedy = f", or raise max_model_len (this model can do {model_max_len})"
    raise TooLongError(f"{reason}{remedy}" if context < model_max_len else reason)


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""


def check_queue(waiting: int, num_new: int, max_waiting: int) -> None:
    """Raise OverloadedError if `num_new` more samples do not fit in the queue."""
    if queue_is_full(waiting, num_new, max_waiting):
        reason = f"{waiting} samples wait already, of at most {max_waiting} (max_waiting)"
        raise OverloadedError(f"{reason}; try again later")


class CrashingRequestError(RequestError):
    """An equal request crashed an engine while it ran alone (`crash_denylist`)."""


class EngineDeadError(RuntimeError):
    """The engine is closed or broken; it serves no requests any more."""


class DrainingError(EngineDeadError):
    """The engine finishes its requests, and takes no new ones."""
