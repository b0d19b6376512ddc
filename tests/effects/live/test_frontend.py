"""An API server, with a client in which nothing runs: what it hands on, to whom, and
when.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from attrs import define, field

from minfer.effects.live.client import (
    EngineClient,
    EngineDied,
    Listener,
    Snapshot,
    TurnOutputs,
)
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.frontend import Frontend
from minfer.effects.live.request_registry import RequestRegistry
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.messages import Admitted, Finish, Finished, Preempted
from minfer.records.request import Request, SamplingParams


@define
class Stub:
    """A client that only notes what is asked of it."""

    requested: list[tuple[Any, ...]] = field(factory=list)
    served: set[str] = field(factory=set)
    listeners: list[Listener] = field(factory=list)
    refusal: BaseException | None = None
    dead: BaseException | None = None
    working: bool = True
    resets: int = 0
    live: RequestRegistry = field(factory=RequestRegistry)

    @property
    def unready(self) -> str:
        return ""

    @property
    def machine(self) -> str:
        return ""

    def clock(self) -> float:
        return 7.0

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        del early
        self.listeners.append(listener)

    def check(self, request: Request) -> None:
        self.requested.append(("check", request.id))

    def submit(self, requests: Sequence[Request]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.served |= {request.id for request in requests}
        self.requested.append(("submit", *[request.id for request in requests]))

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        served_ids = self.served.intersection(ids)
        self.requested.append(("cancel", *sorted(served_ids)))
        return frozenset(served_ids)

    def finish(self, ends: Sequence[Finish]) -> None:
        self.requested.append(("finish", *ends))

    def reset_cache(self) -> None:
        raise NotImplementedError

    def drop_adapter(self, digest: str) -> None:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        raise NotImplementedError

    def drain(self, timeout: float | None = None) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def client() -> Stub:
    return Stub()


@pytest.fixture
def frontend(client: Stub) -> Frontend:
    used: EngineClient = client
    return Frontend(used)


def job(name: str, reported: list[OutputProcessor], **options: Any) -> OutputProcessor:
    sampling = SamplingParams(**options)
    request = Request(id=name, prompt=(1,), max_tokens=9, n=sampling.n, sampling=sampling)
    tokenizer = Tokenizer(bundled_folder()) if sampling.stop else None
    return OutputProcessor(request, reported.append, tokenizer=tokenizer, streaming=True)


def end(name: str, sample: int = 0, length: int = 1) -> Finished:
    return Finished(name, sample, "length", length)


def test_news_reach_their_requests_in_the_order_of_the_batch(frontend: Frontend) -> None:
    reported: list[OutputProcessor] = []
    jobs = {name: job(name, reported) for name in ("c", "a", "b")}
    frontend.submit(list(jobs.values()))
    assert {processor.times.arrived for processor in jobs.values()} == {7.0}
    samples = (("b", 0), ("unknown", 0), ("c", 0), ("a", 0))
    frontend.handle_message(
        TurnOutputs(time=8.0, ids=samples, tokens=((5,), (6,), (), (7, 8)))
    )
    assert reported == [jobs["b"], jobs["a"]]
    assert jobs["a"].take().outputs[0].token_ids == [7, 8]
    assert jobs["b"].times.first == 8.0


def test_a_request_is_gone_before_its_end_is_reported(frontend: Frontend) -> None:
    order: list[tuple[str, bool]] = []
    reported: list[OutputProcessor] = []
    processor = job("a", reported, n=2)
    processor.sink = lambda _: order.append(("sink", "a" in frontend.processors))
    frontend.on_end.append(lambda _: order.append(("end", "a" in frontend.processors)))
    frontend.after.append(lambda: order.append(("after", "a" in frontend.processors)))
    frontend.submit([processor])
    frontend.handle_message(
        TurnOutputs(time=1.0, ids=(("a", 0),), tokens=((3,),), finished=(end("a"),))
    )
    assert order == [("sink", True), ("after", True)]
    processor.take()
    order.clear()
    frontend.handle_message(
        TurnOutputs(time=2.0, finished=(end("a", 1, 0), end("unknown")))
    )
    assert order == [("sink", False), ("end", False), ("after", False)]
    frontend.submit([job("a", reported)])  # its id can be used again


def test_a_fault_in_the_outputs_of_one_request_harms_no_other(
    frontend: Frontend, client: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[OutputProcessor] = []
    calls: list[str] = []

    def broken(*_: object) -> None:
        raise KeyError("a fault")

    frontend.on_end += [broken, ended.append]
    frontend.after += [broken, lambda: calls.append("after")]
    reported: list[OutputProcessor] = []
    bad, good = job("bad", reported), job("good", reported)
    bad.sink = broken
    frontend.submit([bad, good])
    ids = (("bad", 0), ("good", 0))
    frontend.handle_message(TurnOutputs(time=1.0, ids=ids, tokens=((5,), (6,))))
    frontend.handle_message(TurnOutputs(time=2.0, finished=(end("bad"), end("good"))))
    assert good.take().outputs[0].token_ids == [6]
    assert ended == [good]
    assert calls == ["after", "after"]
    with pytest.raises(KeyError, match="a fault"):
        bad.take()
    assert ("cancel", "bad") in client.requested
    assert not frontend.processors
    assert caplog.text.count("Traceback") == 4


def test_a_stop_string_is_reported_to_the_engine(
    frontend: Frontend, client: Stub
) -> None:
    reported: list[OutputProcessor] = []
    processor = job("a", reported, stop="b")
    assert processor.tokenizer is not None
    tokens = tuple(processor.tokenizer.encode("a") + processor.tokenizer.encode("bc"))
    frontend.submit([processor])
    frontend.handle_message(TurnOutputs(time=1.0, ids=(("a", 0),), tokens=(tokens[:1],)))
    assert client.requested == [("submit", "a")]
    frontend.handle_message(
        TurnOutputs(time=2.0, ids=(("a", 0),), tokens=((*tokens[1:], *tokens),))
    )
    assert client.requested[1:] == [("finish", Finish("a", 0, 2))]
    frontend.handle_message(
        TurnOutputs(time=3.0, finished=(Finished("a", 0, "stop", 2),))
    )
    output = processor.take()
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", "b")
    assert not frontend.processors


def test_times_come_with_the_reasons(frontend: Frontend) -> None:
    processor = job("a", [])
    frontend.submit([processor])
    frontend.handle_message(
        TurnOutputs(time=8.0, arrived=("a", "other"), waits={"rows": 2.0})
    )
    let_in = Admitted("a", 0, 3.0, 0, 1)
    other_admitted = Admitted("other", 0, 3.0, 0, 1)
    frontend.handle_message(
        TurnOutputs(time=10.0, reasons=(other_admitted, let_in), waits={"rows": 3.5})
    )
    back = Preempted("a", 0, ("b", 0), 1, 1)
    frontend.handle_message(TurnOutputs(time=11.0, reasons=(back,), waits={"rows": 9.0}))
    assert (processor.times.started, processor.times.preempted) == (10.0, 1)
    assert processor.times.queued == {"rows": 1.5, "step": 1.5}


def test_an_id_is_served_once(frontend: Frontend, client: Stub) -> None:
    first = job("a", [])
    frontend.submit([first])
    says = "id 'a' is being served; ids must differ"
    with pytest.raises(RequestError, match=says):
        frontend.check(job("a", []))
    with pytest.raises(RequestError, match=says):
        frontend.submit([job("a", [])])
    assert frontend.processors == {"a": first}
    frontend.check(job("b", []))
    assert client.requested == [("submit", "a"), ("check", "b")]


@pytest.mark.parametrize("refusal", [EngineDeadError("dead"), RequestError("served")])
def test_who_is_refused_leaves_nothing_behind(
    frontend: Frontend, client: Stub, refusal: Exception
) -> None:
    client.refusal = refusal
    with pytest.raises(type(refusal)):
        frontend.submit([job("a", []), job("b", [])])
    assert not frontend.processors


def test_cancelling_some_or_all(frontend: Frontend, client: Stub) -> None:
    frontend.submit([job("a", []), job("b", [])])
    frontend.cancel(["a", "unknown"])
    frontend.cancel()
    assert client.requested[1:] == [("cancel", "a"), ("cancel", "a", "b")]
    assert set(frontend.processors) == {
        "a",
        "b",
    }  # until the engine says that they have ended


def test_dropping_waits_for_the_end(
    frontend: Frontend, client: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = job("a", [])
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            frontend.handle_message(TurnOutputs(time=1.0, finished=(end("a"),)))

    monkeypatch.setattr("minfer.effects.live.frontend.time.sleep", sleep)
    frontend.submit([processor])
    frontend.drop([processor])
    assert len(waited) == 3
    twin = job("a", [])
    frontend.submit([twin])
    frontend.drop([processor])  # which is gone: the other one of its name stays
    assert frontend.processors == {"a": twin}
    client.working = False
    frontend.drop(
        [twin]
    )  # no thread works on it any more, so there is nothing to wait for
    assert len(waited) == 3


def test_dropping_what_an_interrupt_kept_from_the_engine(
    frontend: Frontend, client: Stub
) -> None:
    client.refusal = KeyboardInterrupt()
    processor = job("a", [])
    with pytest.raises(KeyboardInterrupt):
        frontend.submit([processor])
    frontend.drop([processor])
    assert not frontend.processors


def test_a_death_is_reported_once_to_each(frontend: Frontend, client: Stub) -> None:
    reported: list[OutputProcessor] = []
    rung: list[int] = []
    frontend.after.append(lambda: rung.append(len(reported)))
    jobs = [job("a", reported), job("b", reported)]
    frontend.submit(jobs)
    client.dead = ZeroDivisionError("where it broke")
    frontend.handle_message(EngineDied(("a", "b", "c"), "the engine broke"))
    frontend.handle_message(EngineDied(("a", "b"), "the engine broke"))
    assert reported == jobs
    assert rung == [2, 2]
    assert not frontend.processors
    for processor in jobs:
        with pytest.raises(EngineDeadError, match="the engine broke") as caught:
            processor.take()
        assert caught.value.__cause__ is client.dead


def test_abandoning_tells_everybody_at_once(frontend: Frontend, client: Stub) -> None:
    reported: list[OutputProcessor] = []
    processor = job("a", reported)
    frontend.submit([processor])
    frontend.abandon(EngineDeadError("it stops"))
    assert client.requested[1:] == [("cancel", "a")]
    assert reported == [processor]
    with pytest.raises(EngineDeadError, match="it stops"):
        processor.take()
    frontend.handle_message(
        TurnOutputs(time=1.0, finished=(Finished("a", 0, "cancelled", 0),))
    )
    assert reported == [processor]
    assert not frontend.processors
