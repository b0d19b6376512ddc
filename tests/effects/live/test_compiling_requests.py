"""Who waits for its grammar comes in line once that is compiled, or is not wanted."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from minfer.effects.live.constraints.compiling_requests import CompilingRequests
from minfer.effects.live.request_registry import RequestRegistry
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.store import COMPILE_THREADS, Grammars
from minfer.records.request import Request, SamplingParams
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.one_by_one import OneByOne


class Compiler(OneByOne):
    """Compiles once it may."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)  # once for each that is compiled

    def compile(self, requested: StructuredOutputs) -> Any:
        self.begun.release()
        assert self.go.wait(60)
        if requested.text == "bad":
            raise GrammarError("bad")
        return requested


def ask(name: str, regex: str = "") -> Request:
    constraint = StructuredOutputs(regex=regex) if regex else None
    params = SamplingParams(structured_outputs=constraint)
    return Request(id=name, prompt=(1,), max_tokens=1, sampling=params)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    opened = Compiler()
    yield opened
    opened.go.set()


@pytest.fixture
def grammars(compiler: Compiler) -> Grammars:
    return Grammars(lambda: compiler)


@pytest.fixture
def compiling(grammars: Grammars) -> CompilingRequests:
    return CompilingRequests(grammars, RequestRegistry())


def wait(
    compiling: CompilingRequests,
    requests: Sequence[Request],
    callback: Callable[[list[str]], object],
) -> bool:
    """Have live requests wait."""
    for request in requests:
        compiling.live.add(request)
    return compiling.wait_for_grammars(requests, callback)


def test_who_needs_no_grammar_does_not_wait(compiling: CompilingRequests) -> None:
    assert not wait(compiling, [ask("a"), ask("b")], print)
    assert not wait(CompilingRequests(None, RequestRegistry()), [ask("a", "x")], print)


@pytest.mark.parametrize("regex", ["x", "bad"])
def test_requests_of_a_batch_wait_for_each_other(
    compiling: CompilingRequests, compiler: Compiler, regex: str
) -> None:
    reported = list[list[str]]()
    finished = threading.Event()

    def then(ids: list[str]) -> None:
        reported.append(ids)
        finished.set()

    batch = (ask("a"), ask("b", regex), ask("c", "y"))
    assert wait(compiling, batch, then)
    assert len(compiling) == 3
    compiler.go.set()
    assert finished.wait(5)
    assert reported == [["a", "b", "c"]]
    assert compiling.release(["b", "unknown", "a"]) == [batch]
    assert not len(compiling)
    assert not wait(compiling, [ask("d", regex)], then)  # it was compiled, or refused


def test_who_is_released_early_takes_its_batch_along(
    compiling: CompilingRequests,
) -> None:
    wait(compiling, [ask("a", "x"), ask("b")], print)
    wait(compiling, [ask("c", "x")], print)
    (batch,) = compiling.release(["b"])
    assert [request.id for request in batch] == ["a", "b"]
    assert len(compiling) == 1


def test_what_only_who_was_released_waited_for_is_not_compiled(
    compiling: CompilingRequests, grammars: Grammars, compiler: Compiler
) -> None:
    busy = [
        grammars.begin(StructuredOutputs(regex=f"busy{i}"))
        for i in range(COMPILE_THREADS)
    ]
    for _ in busy:  # else they are in line, and the shortest comes first
        assert compiler.begun.acquire(timeout=60)
    reported = list[list[str]]()
    wait(compiling, [ask("a", "x"), ask("b", "y")], reported.append)
    wait(compiling, [ask("c", "y")], reported.append)
    assert grammars.pending == len(busy) + 2
    compiling.release(["a"])
    assert grammars.pending == len(busy) + 1
    assert reported == [
        ["a", "b"]
    ]  # who is not among those who wait: nothing comes of it
    compiling.release(["c"])
    assert grammars.pending == len(busy)
