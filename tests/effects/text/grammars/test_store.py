"""Grammars are compiled once, away from who asks, and not kept without end."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from minfer.effects.text.grammars.protocol import Grammar, GrammarError
from minfer.effects.text.grammars.store import KEPT, Grammars
from minfer.structured import StructuredOutputs
from tests.effects.text.grammars.one_by_one import OneByOne


class Compiler(OneByOne):
    """Counts, and waits if it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def compile(self, asked: StructuredOutputs) -> Any:
        assert asked.text == "quick" or self.go.wait(5)
        self.asked.append(asked.text)
        if asked.text == "bad":
            raise GrammarError("it is bad", asked.param)
        return asked.text.upper()


def asked(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def test_a_constraint_is_compiled_once() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    found: list[Any] = [store.get(asked(one)) for one in ("a", "b", "a")]
    assert found == ["A", "B", "A"]
    assert compiler.asked == ["a", "b"]


def test_who_begins_does_not_wait() -> None:
    compiler = Compiler()
    compiler.go.clear()
    store = Grammars(lambda: compiler)
    begun: Future[Grammar] = store.begin(asked("a"))
    assert not begun.done()
    assert store.begin(asked("a")) is begun
    compiler.go.set()
    assert begun.result(5) is not None


def test_a_refusal_is_kept_too() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    for _ in range(2):
        with pytest.raises(GrammarError, match="bad"):
            store.get(asked("bad"))
    assert compiler.asked == ["bad"]


def test_those_that_were_asked_for_last_are_kept() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    for i in range(KEPT):
        store.get(asked(f"x{i}"))
    store.get(asked("x0"))
    store.get(asked("new"))
    compiler.asked.clear()
    store.get(asked("x0"))
    store.get(asked("x1"))
    assert compiler.asked == ["x1"]


def test_without_a_library_every_constraint_is_refused_until_there_is_one() -> None:
    here = list[Compiler]()

    def make() -> Compiler:
        if not here:
            raise GrammarError("not installed")
        return here[0]

    store = Grammars(make)
    with pytest.raises(GrammarError, match="not installed"):
        store.warm()
    here.append(Compiler())
    store.warm()
    assert store.get(asked("a")) is not None
    store.close()


def test_who_needs_one_that_is_not_kept_waits_for_no_others() -> None:
    compiler = Compiler()
    compiler.go.clear()
    store = Grammars(lambda: compiler)
    begun = [store.begin(asked(f"slow{i}")) for i in range(20)]
    assert store.pending == 20
    assert store.get(asked("quick")) is not None  # while all threads are busy
    assert not any(one.done() for one in begun)
    compiler.go.set()
    for one in begun:
        assert one.result(5) is not None
    assert store.pending == 0
    store.close()
