"""Taking turns with an engine that may be somebody's own: what is said if it raises.

`step` is total. A changed one, and to try those is what replays, simulations and forks
are for, may not be: then the turn is named in which it raised, and where in its code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

from minfer.config import EngineConfig
from minfer.messages import Event, clip
from minfer.state import EngineState, Transition

Step = Callable[[EngineConfig, EngineState, tuple[Event, ...]], Transition]


class EngineRaisedError(RuntimeError):
    """The engine raised in a turn, which its laws forbid.

    `turn` is its number, `time` the engine's before it in seconds; `error` says what was
    raised, and `where` in which file, line and function.
    """

    def __init__(self, turn: int, time: float, raised: Exception) -> None:
        self.turn, self.time = turn, time
        self.error = clip(f"{type(raised).__name__}: {raised}")
        self.where = _place(raised)
        super().__init__(f"turn {turn}: the engine raised {self.error} ({self.where})")


def _place(raised: Exception) -> str:
    """File, line and function of the innermost frame; reads no source."""
    *_, (frame, line) = walk_tb(raised.__traceback__)
    code = frame.f_code
    name = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{line}, in {code.co_qualname}"


@contextmanager
def blamed(turn: int, state: EngineState) -> Iterator[None]:
    """What an engine raises while it takes `turn` in `state` becomes an
    EngineRaisedError.
    """
    try:
        yield
    except Exception as error:  # whatever a changed engine runs into
        raise EngineRaisedError(turn, state.time, error) from error
