"""Turns of an engine that may be changed: the error if it raises.

`step` is total. A changed one may not be, and replays, simulations and forks exist to try
such engines: then the error names the turn in which it raised, and the line of code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

from minfer.records.config import EngineConfig
from minfer.records.messages import Event, clip
from minfer.records.state import EngineState, Transition

Step = Callable[[EngineConfig, EngineState, tuple[Event, ...]], Transition]


class EngineRaisedError(RuntimeError):
    """The engine raised in a turn, which its laws forbid.

    `turn` is its number, `time` the engine's before it in seconds; `error` is the text of
    the error, and `where` its file, line and function. `journal` is the file that the
    turn was read from, if it was.
    """

    def __init__(
        self, turn: int, time: float, raised: Exception, journal: str = ""
    ) -> None:
        self.turn, self.time = turn, time
        self.error = clip(f"{type(raised).__name__}: {raised}")
        self.where = _error_location(raised)
        place = f"{journal}: turn {turn}" if journal else f"turn {turn}"
        super().__init__(f"{place}: the engine raised {self.error} ({self.where})")


def _error_location(raised: Exception) -> str:
    """File, line and function of the innermost frame; reads no source."""
    *_, (frame, line) = walk_tb(raised.__traceback__)
    code = frame.f_code
    name = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{line}, in {code.co_qualname}"


@contextmanager
def wrap_engine_errors(
    turn: int, state: EngineState, journal: str = ""
) -> Iterator[None]:
    """Turn an error that the engine raises in `turn` in `state` into an
    EngineRaisedError; `journal` is the file that the turn was read from.
    """
    try:
        yield
    except Exception as error:  # a changed engine may raise anything
        raise EngineRaisedError(turn, state.time, error, journal) from error
