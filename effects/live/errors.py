"""What callers are told: requests that cannot be served, engines that serve nobody."""

from typing import Final

PROGRAM_ENDS: Final = (
    "the program's main thread has ended; let it wait for those who still ask"
)


class RequestError(ValueError):
    """A request cannot be served: that at `index` of its list, because of its field
    `param`.
    """

    def __init__(self, message: str, index: int = 0, param: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.param = param


class TooLongError(RequestError):
    """The context or the cache cannot hold prompt and output, whoever else is served."""


_FAR: Final = 2  # times what fits, beyond which a prompt need not be read to its end
_LEAST_LIST: Final = 4096  # items of a list that are read, whatever fits


def far_too_long(context: int) -> TooLongError:
    """The error about a prompt that may not have been read to its end: so it does not say
    how long that is.
    """
    # Programs look for the words "maximum context length is", here and below.
    why = f"the prompt is far too long: this model's maximum context length is {context}"
    return TooLongError(f"{why} tokens; shorten the prompt")


def too_long(length: int, context: int, able: int) -> TooLongError:
    """The error about a prompt of so many tokens, where an output is to follow. The model
    is `able` to have a longer context, perhaps.
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


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""


class EngineDeadError(RuntimeError):
    """The engine is closed, or broke; it serves nobody any more."""


class DrainingError(EngineDeadError):
    """The engine finishes what it serves, and takes nothing new."""
