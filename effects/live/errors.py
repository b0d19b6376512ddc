"""Errors for callers: requests that cannot be served, engines that serve no requests."""

from typing import Final

from minfer.records.messages import clip

PROGRAM_ENDS: Final = (
    "the program's main thread has ended; let it wait for those who still ask"
)


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


_FAR: Final = 2  # times the limit, beyond which a prompt is not read to its end
_LEAST_LIST: Final = 4096  # items of a list that are always read


def far_too_long(context: int) -> TooLongError:
    """Returns the error about a prompt that may not have been read to its end: it does
    not name its length.
    """
    # Programs search for the words "maximum context length is", here and below.
    why = f"the prompt is far too long: this model's maximum context length is {context}"
    return TooLongError(f"{why} tokens; shorten the prompt")


def too_long(length: int, context: int, able: int) -> TooLongError:
    """Returns the error about a prompt of so many tokens that leaves no room for output.
    The model itself may be `able` to have a longer context.
    """
    if length > _FAR * max(context, _LEAST_LIST):
        return far_too_long(context)
    why = (
        f"the prompt has {length} tokens; this model's maximum context length is "
        f"{context} tokens, of which at least one must be left for the output: shorten "
        "the prompt"
    )
    more = f", or raise max_model_len (this model can do {able})"
    return TooLongError(f"{why}{more}" if context < able else why)


def id_in_use(name: str) -> RequestError:
    """Returns the error about a request whose id is that of a live request."""
    return RequestError(
        f"a request with the id {clip(name)!r} is being served; ids must differ"
    )


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""


def check_queue(waiting: int, new: int, most: int) -> None:
    """Raise OverloadedError if `new` samples more would not fit in the waiting queue."""
    if waiting + new > most:
        why = f"{waiting} samples wait already, of at most {most} (max_waiting)"
        raise OverloadedError(f"{why}; try again later")


class EngineDeadError(RuntimeError):
    """The engine is closed or broken; it serves no requests any more."""


class DrainingError(EngineDeadError):
    """The engine finishes its requests, and takes no new ones."""
