"""A second process, in which strings have other hashes: it decides the same turns again.

The order of a set of strings depends on their hashes, which differ from process to
process. A policy that depends on it decides differently when a recorded run is replayed.
So each story is sent to a process with another PYTHONHASHSEED, which compares every
answer.
"""

import os
import pickle
import sys
import warnings
from collections.abc import Sequence
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any, Final

from attrs import define, evolve, field, frozen

from minfer.engine import step
from minfer.policies.mistakes import PolicyWarning
from minfer.records.config import EngineConfig
from minfer.records.messages import Event
from minfer.records.policy import FirstCome
from minfer.records.state import initial
from minfer.testing.watched_policy import Call

_NAME: Final = "minfer: another hash seed"
_SECONDS: Final = 60.0  # after which the process counts as lost
_HASH_SEEDS: Final = "1", "2"  # the second if this process has the first


def is_second_process() -> bool:
    """Whether this process is such a second process: it imports the program that tests a
    policy, whose checks must not run again there.
    """
    return current_process().name == _NAME


@frozen
class ToldStory:
    """A story: an engine under first come, its events, and the answers of the policy."""

    config: EngineConfig
    events: tuple[tuple[Event, ...], ...]
    calls: tuple[Call, ...]


@frozen
class OtherAnswer:
    """An answer that differs in the second process."""

    turn: int
    method: str
    detail: str


class NotImportableError(Exception):
    """The policy cannot be sent to another process."""


@define
class SecondProcess:
    """A second process, which starts with the first story; `close` ends it."""

    policy: Any
    _connection: Connection | None = field(init=False, default=None)
    _process: Any = field(init=False, default=None)
    _lost: str = field(init=False, default="")  # why there is none

    def start(self) -> None:
        """Start it; its imports take as long as some stories."""
        context = get_context("spawn")
        try:
            pickled = pickle.dumps(self.policy)
        except Exception as error:  # pickle raises errors of many kinds
            self._give_up(f"{error}")
            return
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if main is not None and not os.path.exists(main):
            self._give_up("the program has no file")
            return
        self._connection, theirs = context.Pipe()
        seed = os.environ.get("PYTHONHASHSEED")
        os.environ["PYTHONHASHSEED"] = next(s for s in _HASH_SEEDS if s != seed)
        self._process = context.Process(
            target=_serve, args=(theirs, pickled), name=_NAME, daemon=True
        )
        try:
            self._process.start()
        finally:
            if seed is None:
                del os.environ["PYTHONHASHSEED"]
            else:
                os.environ["PYTHONHASHSEED"] = seed
        theirs.close()

    def _give_up(self, why: str) -> None:
        self._lost = why
        warnings.warn(
            f"scheduling policy {type(self.policy).__name__}: it was not tested in a "
            f"second process, with other hashes of strings: {why}. Define its class in a "
            "module",
            PolicyWarning,
            stacklevel=2,
        )

    def compare(
        self, config: EngineConfig, events: Sequence[Sequence[Event]], calls: list[Call]
    ) -> OtherAnswer | None:
        """The first answer of a story that differs in the second process, or None. Also
        None if the policy cannot be tested there, of which a PolicyWarning warns once.
        """
        if self._connection is None and not self._lost:
            self.start()
        if self._connection is None:
            return None
        told = ToldStory(
            evolve(config, policy=FirstCome()), tuple(map(tuple, events)), tuple(calls)
        )
        try:
            pickled = pickle.dumps(told)
        except Exception:  # an answer that cannot be sent
            return None
        try:
            self._connection.send_bytes(pickled)
            has_answered = self._connection.poll(_SECONDS)
            answer = self._connection.recv() if has_answered else None
        except (EOFError, OSError):
            has_answered, answer = False, None
        if not has_answered:
            self.close()
            self._give_up("it ended, or took too long")
            return None
        if isinstance(answer, NotImportableError):
            self.close()
            self._give_up(str(answer))
            return None
        other: OtherAnswer | None = answer
        return other

    def close(self) -> None:
        """End it."""
        if self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._connection = None


@define
class _Comparing:
    """A policy whose answers are compared with those of the first process."""

    policy: Any
    expected: tuple[Call, ...]
    turn: int = 0
    count: int = 0  # calls so far
    other: OtherAnswer | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        answer = getattr(self.policy, name)(*args)
        if self.other is None and self.count < len(self.expected):
            call = self.expected[self.count]
            self.count += 1
            if (call.method, call.answer) != (name, answer):
                report = (
                    f"{name}{args!r:.300} is {call.answer!r:.300}, and {answer!r:.300}"
                )
                self.other = OtherAnswer(
                    self.turn, name, f"{report} in a process whose strings hash otherwise"
                )
        return answer


def _serve(connection: Connection, pickled: bytes) -> None:
    """Decide stories again, until there are no more."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as it runs
    try:
        policy = pickle.loads(pickled)  # noqa: S301  # of the process that started it
    except Exception as error:  # imports raise anything
        connection.recv_bytes()
        connection.send(NotImportableError(f"its class cannot be imported: {error}"))
        return
    while True:
        try:
            told = pickle.loads(connection.recv_bytes())  # noqa: S301  # likewise
        except EOFError:
            return
        connection.send(_decide(policy, told))


def _decide(policy: Any, told: ToldStory) -> OtherAnswer | None:
    """Decide a story; returns the first answer that differs."""
    comparing: Any = _Comparing(policy, told.calls)
    config = evolve(told.config, policy=comparing)
    state = initial(config)
    for number, events in enumerate(told.events):
        comparing.turn = number
        state = step(config, state, events).state
        if comparing.other is not None:
            return OtherAnswer(number, comparing.other.method, comparing.other.detail)
    return None
