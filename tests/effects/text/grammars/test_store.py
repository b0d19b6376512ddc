"""Grammars are compiled once, away from who asks, and not kept without end."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest

from minfer.effects.text.grammars import store as module
from minfer.effects.text.grammars.grammar_library import (
    Grammar,
    GrammarError,
)
from minfer.effects.text.grammars.store import (
    CLIENT_SHARE,
    COMPILE_THREADS,
    MAX_GRAMMARS,
    MAX_WAITING,
    Grammars,
)
from minfer.sampling.structured import StructuredOutputs
from tests.effects.live.matchers import Walker
from tests.effects.text.grammars.one_by_one import OneByOne


class Compiler(OneByOne):
    """Counts, and waits if it is told to."""

    def __init__(self) -> None:
        self.requested: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.begun = 0

    def compile(self, requested: StructuredOutputs) -> Any:
        self.begun += 1
        assert requested.text == "quick" or self.go.wait(60)
        self.requested.append(requested.text)
        if requested.text == "bad":
            raise GrammarError("it is bad", requested.param)
        return requested.text.upper()


def requested(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def test_a_constraint_is_compiled_once() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    grammars: list[Any] = [store.get(requested(name)) for name in ("a", "b", "a")]
    assert grammars == ["A", "B", "A"]
    assert compiler.requested == ["a", "b"]


def test_who_begins_does_not_wait() -> None:
    compiler = Compiler()
    compiler.go.clear()
    store = Grammars(lambda: compiler)
    future: Future[Grammar] = store.begin(requested("a"))
    assert not future.done()
    second_future = store.begin(requested("a"))
    compiler.go.set()
    assert (
        future.result(5)
        is second_future.result(5)
        is store.begin(requested("a")).result(0)
    )
    assert compiler.requested == ["a"]


def test_a_refusal_is_kept_too() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    for _ in range(2):
        with pytest.raises(GrammarError, match="bad"):
            store.get(requested("bad"))
    assert compiler.requested == ["bad"]


def test_those_that_were_requested_last_are_kept() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    for i in range(MAX_GRAMMARS):
        store.get(requested(f"x{i}"))
    store.get(requested("x0"))
    store.get(requested("new"))
    compiler.requested.clear()
    store.get(requested("x0"))
    store.get(requested("x1"))
    assert compiler.requested == ["x1"]


def test_who_needs_one_that_is_not_kept_waits_for_no_others() -> None:
    compiler = Compiler()
    compiler.go.clear()
    store = Grammars(lambda: compiler)
    slow = [store.begin(requested(f"slow{i}")) for i in range(20)]
    assert store.pending == 20
    assert store.get(requested("quick")) is not None  # while all threads are busy
    assert not any(future.done() for future in slow)
    compiler.go.set()
    for future in slow:
        assert future.result(5) is not None
    assert store.pending == 0
    store.close()


@pytest.fixture
def busy() -> Iterator[tuple[Compiler, Grammars]]:
    """A store all of whose threads are at something, until it may go on."""
    compiler = Compiler()
    compiler.go.clear()
    store = Grammars(lambda: compiler)
    for i in range(COMPILE_THREADS):
        store.begin(requested(f"busy{i}"))
    while compiler.begun < COMPILE_THREADS:
        time.sleep(0.001)
    yield compiler, store
    compiler.go.set()
    store.close()


def ended(compiler: Compiler, waits: list[Future[Grammar]]) -> list[str]:
    """What was compiled once all have what they wait for, without what was before."""
    compiler.go.set()
    for wait in waits:
        wait.result(5)
    return [name for name in compiler.requested if not name.startswith("busy")]


def test_a_constraint_without_waiters_is_not_compiled(
    busy: tuple[Compiler, Grammars],
) -> None:
    compiler, store = busy
    dropped, shared = store.begin(requested("a")), store.begin(requested("b"))
    other_client = store.begin(requested("b"), "another client")
    assert dropped.cancel()
    assert shared.cancel()
    assert store.pending == COMPILE_THREADS + 1
    order = ended(compiler, [other_client, store.begin(requested("c"))])
    assert sorted(order) == ["b", "c"]


def test_a_cancelled_compilation_that_runs_is_kept_for_the_next_request(
    busy: tuple[Compiler, Grammars],
) -> None:
    compiler, store = busy
    running = store.begin(requested("busy0"))
    assert running.cancel()
    assert ended(compiler, [store.begin(requested("busy0"))]) == []
    assert compiler.requested.count("busy0") == 1


def test_clients_take_turns() -> None:
    compiler = Compiler()
    compiler.go.clear()
    with patch.object(module, "COMPILE_THREADS", 1):
        store = Grammars(lambda: compiler)
        waits = [store.begin(requested("first"), "one")]
        while not compiler.begun:
            time.sleep(0.001)
        waits += [store.begin(requested(f"x{i}"), "greedy") for i in range(3)]
        waits += [store.begin(requested(f"long {i}"), "other") for i in range(2)]
        order = ended(compiler, waits)
    assert order == ["first", "x0", "long 0", "x1", "long 1", "x2"]
    store.close()


def test_who_may_wait_takes_a_constraint_out_of_the_line(
    busy: tuple[Compiler, Grammars],
) -> None:
    compiler, store = busy
    waits = store.begin(requested("quick"))
    assert store.get(requested("quick")) is waits.result(5)
    assert ended(compiler, [store.begin(requested("a"))]) == ["quick", "a"]


def test_a_client_may_have_its_share_of_the_line(
    busy: tuple[Compiler, Grammars],
) -> None:
    _, store = busy
    share = MAX_WAITING // CLIENT_SHARE
    futures = [store.begin(requested(f"x{i}"), "me") for i in range(share)]
    assert store.is_full_for("me")
    assert not store.is_full_for("other")
    for i in range(MAX_WAITING - share):
        store.begin(requested(f"y{i}"), f"client {i}")
    assert store.is_full_for("other")
    futures[0].cancel()
    assert not store.is_full_for("other")
    assert not store.is_full_for("me")


def test_waiters_are_cancelled_when_it_is_closed(busy: tuple[Compiler, Grammars]) -> None:
    _, store = busy
    wait = store.begin(requested("a"))
    store.close()
    assert wait.cancelled()
    assert store.pending == COMPILE_THREADS  # they end by themselves


def test_what_is_wrong_with_the_machine_is_tried_again() -> None:
    compiler = Compiler()
    store = Grammars(lambda: compiler)
    with patch.object(compiler, "compile", side_effect=MemoryError):
        with pytest.raises(MemoryError):
            store.begin(requested("a")).result(5)
        with pytest.raises(MemoryError):
            store.get(requested("a"))
    assert store.get(requested("a")) is not None
    store.close()


def test_matchers_that_are_idle_are_kept_until_it_is_closed() -> None:
    store = Grammars(Compiler)
    walker: Any = Walker()
    store.release_matcher(requested("a"), walker, 3)
    assert store.take_idle_matcher(requested("b")) is None
    reused: Any = store.take_idle_matcher(requested("a"))
    assert reused is walker
    store.release_matcher(requested("a"), walker, 3)
    store.close()
    assert store.take_idle_matcher(requested("a")) is None
