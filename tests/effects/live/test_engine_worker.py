"""The engine's thread: it lives while there is work, waits when told to, and never cuts a
turn.
"""

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer import LLM, SamplingParams
from minfer.effects.live.client import EngineDied, EngineMessage, TurnOutputs
from minfer.effects.live.constraints.compiling_requests import CompilingRequests
from minfer.effects.live.engine import engine_worker as worker
from minfer.effects.live.errors import (
    PROGRAM_ENDED_MESSAGE,
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.text.grammars.store import Grammars
from minfer.records.messages import Admitted, Cancel, Finish, Finished
from minfer.records.plan import Plan
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Request
from minfer.sampling.structured import StructuredOutputs
from tests.core.recorded import Seen
from tests.effects.served import Slow
from tests.effects.text.grammars.one_by_one import OneByOne
from tests.effects.tiny_model import write_checkpoint
from tests.effects.waiting import until
from tests.effects.watched import Watched, settle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SLOW: dict[str, Any] = {"num_gpu_blocks_override": 2000, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with so long a context that it would write for minutes."""
    path = tmp_path_factory.mktemp("tiny")
    return str(write_checkpoint(path, max_position_embeddings=100_000))


def engine_thread(llm: LLM) -> threading.Thread | None:
    return llm.worker.thread


@pytest.mark.long
def test_a_real_interrupt_cancels_all_and_the_llm_goes_on(folder: str) -> None:
    with LLM(folder, **SLOW) as llm:
        expected = llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7, 8]], ENDLESS)
        timer.join()
        assert not llm.frontend.processors
        assert llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids == expected
        assert llm.worker.driver.state.blocks.available == 2000


def test_the_thread_ends_with_the_work(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        assert engine_thread(llm) is None
        stream = llm.stream([1, 2], ENDLESS)
        next(stream)
        thread = engine_thread(llm)
        assert thread is not None
        assert thread.is_alive()
        stream.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.long
@pytest.mark.parametrize("after", ["", "time.sleep(0.3)  # until the engine has left"])
def test_a_thread_that_a_program_does_not_wait_for_is_notified(
    folder: str, after: str
) -> None:
    """It would wait for ever, and the program with it."""
    code = f"""
import threading, time
from minfer import LLM, SamplingParams
llm = LLM({folder!r}, executor="oracle", num_gpu_blocks_override=2000, max_num_seqs=1)
endless = SamplingParams(max_tokens=None, ignore_eos=True)
def ask():
    for _ in range(2):  # once more when the engine is gone
        try:
            llm.generate([1, 2], endless, use_tqdm=False)
        except Exception as error:
            print(type(error).__name__, error)
        {after}
threading.Thread(target=ask).start()
while not llm.worker.driver.busy:
    time.sleep(0.001)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first, second = completed.stdout.splitlines()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert first == f"EngineDeadError {PROGRAM_ENDED_MESSAGE}"
    assert second.startswith("EngineDeadError ")
    assert PROGRAM_ENDED_MESSAGE in second


@pytest.mark.parametrize("serving", [False, True])
def test_who_hears_that_the_program_ends_does_not_hold_up_other_callers(
    folder: str, serving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These may hold what it waits for: else they would wait for each other."""
    returned: list[bool] = []
    died = threading.Event()
    with LLM(folder, executor="oracle", **SLOW) as llm:

        def hear(message: EngineMessage) -> None:
            if isinstance(message, EngineDied):
                assert message.ids == ("a",)
                canceller = threading.Thread(target=llm.client.cancel, args=(["a"],))
                canceller.start()
                canceller.join(10)
                returned.append(not canceller.is_alive())
                died.set()

        llm.client.listen(hear)
        if serving:
            llm.client.submit([request("a", 90_000)])
        monkeypatch.setattr(threading, "main_thread", threading.Thread)
        if not serving:
            llm.client.submit([request("a")])
        assert died.wait(10)
        monkeypatch.undo()
    assert returned == [True]


@pytest.mark.long
def test_a_program_may_end_in_the_middle_of_a_stream(folder: str) -> None:
    code = f"""
from minfer import LLM, SamplingParams
llm = LLM({folder!r}, executor="oracle", num_gpu_blocks_override=2000, max_num_seqs=1)
stream = llm.stream([1, 2], SamplingParams(max_tokens=None, ignore_eos=True))
next(stream)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (0, "")


@frozen
class Later(FirstCome):
    """Admits no request before some seconds have passed."""

    seconds: float = 0.2

    def admit_from(self, state: None, load: Load) -> float:
        del state
        return load.arrived + self.seconds


@pytest.mark.long
def test_it_sleeps_until_the_policy_admits_a_request(folder: str) -> None:
    with LLM(folder, executor="oracle", scheduling_policy=Later(), **SLOW) as llm:
        turns = Watched(llm)
        output = llm.generate([1, 2], GREEDY)[0]
        assert output.metrics.ttft is not None
        assert output.metrics.ttft >= 0.2
        assert len(turns) < 40  # it did not spin


def test_work_is_not_stopped_by_the_garbage_collector(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        enabled: list[bool] = []
        llm.frontend.after.append(lambda: enabled.append(gc.isenabled()))
        llm.generate([1, 2], GREEDY)
        assert not any(enabled)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_a_worker_that_is_never_idle_sweeps_up_cycles(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        freed: list[weakref.ref[Knot]] = []

        def observe() -> None:
            if not freed:
                freed.append(weakref.ref(Knot()))
                monkeypatch.setattr(worker, "COLLECT_SECONDS", 0.0)

        llm.frontend.after.append(observe)
        stream = llm.stream([1, 2], ENDLESS)
        for _ in range(4):
            next(stream)
        assert freed[0]() is None
        assert not gc.isenabled()
        stream.close()


def test_outputs_come_in_the_order_of_the_batch(folder: str) -> None:
    """Not in the order of a set, which differs from process to process."""
    with LLM(folder, executor="oracle", num_gpu_blocks_override=2000) as llm:
        outputs = llm.generate([[i] for i in range(3, 12)], GREEDY)
        stream = llm.stream([[i] for i in range(3, 12)], GREEDY)
        request_ids = [next(stream).request_id for _ in outputs]
        stream.close()
    assert request_ids == [str(9 + i) for i in range(9)]


# --- what a client may ask for ----------------------------------------------------------


def request(name: str, tokens: int = 20, output: tuple[int, ...] = ()) -> Request:
    return Request(
        id=name,
        prompt=(1, 2, 3),
        max_tokens=tokens,
        seed=7,
        sampling=GREEDY,
        output=output,
    )


def finish(llm: LLM) -> None:
    """Wait until the engine has nothing to do, nor to wait for."""
    settle(llm)
    assert not llm.client.working


def listened(llm: LLM) -> list[EngineMessage]:
    messages: list[EngineMessage] = []
    llm.client.listen(messages.append)
    return messages


def tokens_of(messages: list[EngineMessage], name: str) -> tuple[int, ...]:
    collected: tuple[int, ...] = ()
    for news in messages:
        assert isinstance(news, TurnOutputs)
        for sample, tokens in zip(news.ids, news.tokens, strict=True):
            collected += tokens if sample == (name, 0) else ()
    return collected


def ends_of(messages: list[EngineMessage]) -> dict[str, Finished]:
    news = [message for message in messages if isinstance(message, TurnOutputs)]
    return {end.id: end for message in news for end in message.finished}


def test_a_request_goes_on_after_what_it_had(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        messages = listened(llm)
        llm.client.submit([request("whole")])
        finish(llm)
        expected = tokens_of(messages, "whole")
        assert len(expected) == 20
        for had in (1, 7, 19):
            name = f"after {had}"
            llm.client.submit([request(name, output=expected[:had])])
            finish(llm)
            assert tokens_of(messages, name) == expected[had:]
            assert ends_of(messages)[name].length == 20


def test_a_sample_is_finished_at_a_length(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        messages = listened(llm)

        def cut(message: EngineMessage) -> None:
            if len(tokens_of([message], "a")) and llm.worker.live.is_served("a"):
                llm.client.finish([Finish("a", 0, 1), Finish("unknown", 0, 1)])

        llm.client.listen(cut)
        recorded = llm.worker.driver.record = Seen()
        llm.client.submit([request("a", 5000)])
        finish(llm)
    end = ends_of(messages)["a"]
    assert (end.reason, end.length) == ("stop", 1)
    events = [event for turn in recorded for event in turn.events]
    requested = [event for event in events if isinstance(event, Finish)]
    assert {event.id for event in requested} == {"a"}


def test_cancelling_says_who_was_served(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        messages = listened(llm)
        recorded = llm.worker.driver.record = Seen()
        llm.client.submit([request("a", 5000), request("b", 5000)])
        assert llm.client.cancel(["a", "unknown"]) == {"a"}
        assert llm.client.cancel(["a", "b"]) >= {"b"}
        finish(llm)
        assert not llm.client.cancel(["a", "b"])
        events = [event for turn in recorded for event in turn.events]
    assert {event.id for event in events if isinstance(event, Cancel)} == {"a", "b"}
    reasons = {end.reason for end in ends_of(messages).values()}
    assert reasons == {"cancelled"}


def test_a_full_queue_is_an_error_before_and_an_end_after(folder: str) -> None:
    with LLM(folder, executor="oracle", max_waiting=2, **SLOW) as llm:
        messages = listened(llm)
        with pytest.raises(OverloadedError, match="0 samples wait already, of at most 2"):
            llm.client.check(evolve(request("a"), n=3))
        llm.client.check(request("a"))
        llm.client.submit([request(name) for name in "abc"])
        finish(llm)
    ends = ends_of(messages)
    assert [ends[name].reason for name in "abc"] == ["length", "length", "rejected"]
    assert "waiting line is full" in ends["c"].error


def test_a_snapshot_is_how_things_are(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        idle = llm.client.snapshot()
        assert (idle.requests, idle.running, idle.waiting) == (0, 0, 0)
        assert (idle.blocks, idle.blocks_free, idle.dead) == (2000, 2000, "")
        assert not idle.waiting_for
        assert not idle.stalled
        snapshots = []
        llm.frontend.after.append(lambda: snapshots.append(llm.client.snapshot()))
        llm.generate([[1], [2], [3]], GREEDY)
        finish(llm)
        busy, last = snapshots[1], llm.client.snapshot()
    assert (busy.requests, busy.running, busy.waiting) == (3, 1, 2)
    assert busy.waiting_for == {"rows": 1, "turn": 1}
    assert busy.blocks_free < 2000
    assert busy.time <= last.time
    assert last.totals.counts["generation_tokens"] == 36
    assert last.totals.counts["prompt_tokens"] == 3
    assert llm.client.snapshot().dead == "EngineDeadError('it was closed')"


def test_who_waits_for_a_step_is_stalled_but_not_who_the_policy_lets_wait(
    folder: str,
) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        slow = Slow(llm.worker.driver.executor, 0)
        slow.left = 0
        slow.free.clear()
        llm.worker.driver.deferred.executor = slow
        began = time.monotonic()
        llm.client.submit([request("a", 1)])
        until(lambda: llm.client.snapshot().stalled > 0.05)
        assert llm.client.snapshot().stalled < time.monotonic() - began
        slow.free.set()
        finish(llm)
        assert not llm.client.snapshot().stalled
    with LLM(folder, executor="oracle", scheduling_policy=Later(30), **SLOW) as llm:
        llm.client.submit([request("a", 1)])
        until(lambda: llm.worker.driver.wake is not None)
        time.sleep(0.05)
        assert llm.client.working
        assert not llm.client.snapshot().stalled
        llm.client.cancel(["a"])
        finish(llm)


def test_an_admission_is_reported_once_and_before_the_step_that_runs_it(
    folder: str,
) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        heard: list[EngineMessage] = []
        llm.client.listen(heard.append, early=True)
        executor: Any = llm.worker.driver.executor
        launch = executor.launch
        before: list[int] = []  # messages that there were when a step was launched

        def launched(plan: Plan) -> None:
            before.append(len(heard))
            launch(plan)

        executor.launch = launched
        llm.client.submit([request("a", 3), request("b", 3)])
        finish(llm)
    news = [message for message in heard if isinstance(message, TurnOutputs)]
    assert [message.arrived for message in news if message.arrived] == [("a", "b")]
    starts = [
        (index, reason.id)
        for index, message in enumerate(news)
        for reason in message.reasons
        if isinstance(reason, Admitted)
    ]
    assert [name for _, name in starts] == ["a", "b"], "each once"
    assert starts[0][0] < before[0], "before the first step"
    ends = [end.id for message in news for end in message.finished]
    assert ends == ["a", "b"]


@pytest.mark.parametrize("salt", ["", "of a user"])
def test_a_cache_that_was_reset_is_not_found_again(
    folder: str, tmp_path: Path, salt: str
) -> None:
    prompt = {"prompt_token_ids": [3] * 200, "cache_salt": salt}
    with LLM(folder, executor="oracle", journal=tmp_path, **SLOW) as llm:
        hits, texts = [], set()
        for _ in range(2):
            for _ in range(2):
                output = llm.generate(prompt, GREEDY)[0]
                hits.append(output.num_cached_tokens)
                texts.add(tuple(output.outputs[0].token_ids))
            llm.reset_prefix_cache()
        finish(llm)
        assert llm.client.resets == llm.client.snapshot().resets == 2
    assert hits == [0, 192, 0, 192]
    assert len(texts) == 1
    journal = read_journal(tmp_path)
    assert len(list(journal.turns())) > 4  # as they were: nothing happened beside them
    assert journal.closed
    with pytest.raises(EngineDeadError):
        llm.reset_prefix_cache()


def test_draining_finishes_what_runs_and_takes_nothing_new(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        messages = listened(llm)
        llm.client.submit([request("a", 90_000)])
        assert not llm.client.drain(timeout=0.05)
        assert llm.client.snapshot().draining
        for refuse in (
            lambda: llm.client.check(request("b")),
            lambda: llm.client.submit([request("b")]),
            lambda: llm.generate([1], GREEDY),
        ):
            with pytest.raises(DrainingError, match="takes no more"):
                refuse()
        assert not ends_of(messages)
        llm.client.cancel(["a"])
        assert llm.client.drain()
        assert set(ends_of(messages)) == {"a"}
        assert llm.client.snapshot().dead == ""


def test_a_death_is_reported_once_with_those_it_concerns(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        messages = listened(llm)
        broken = llm.worker.driver.executor
        monkeypatch.setattr(broken, "collect", lambda: 1 / 0)
        llm.client.submit([request("a"), request("b")])
        finish(llm)
        deaths = [message for message in messages if isinstance(message, EngineDied)]
        assert [death.ids for death in deaths] == [("a", "b")]
        assert "ZeroDivisionError" in deaths[0].reason
        assert isinstance(llm.client.dead, ZeroDivisionError)
        assert "ZeroDivisionError" in llm.client.snapshot().dead
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            llm.client.submit([request("c")])


class Slowly(OneByOne):
    """Compiles once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.beside = 0.0
        self.served = 0

    def restart(self) -> None:
        pass

    def compile(self, _: StructuredOutputs) -> Any:
        assert self.go.wait(20)
        return self

    def matcher(self) -> Any:
        return self

    def rollback(self, _: int) -> None:
        pass

    advance = rollback

    def mask(self) -> bytes:
        return bytes([1 << 5])


def constrained(name: str) -> Request:
    constraint = SamplingParams(structured_outputs=StructuredOutputs(regex=name))
    return evolve(request(name, 4), sampling=constraint, needs_host_mask=True)


def test_a_request_that_waits_for_its_grammar_blocks_none_and_can_be_cancelled(
    folder: str,
) -> None:
    slowly = Slowly()
    with LLM(folder, executor="oracle", num_gpu_blocks_override=2000) as llm:
        llm.worker.driver.deferred.masks._grammars = store = Grammars(lambda: slowly)  # type: ignore[attr-defined]  # of one that is slow
        llm.worker.compiling = CompilingRequests(store, llm.worker.live)
        messages = listened(llm)
        llm.client.submit([constrained("a")])
        llm.client.submit([constrained("b")])
        with pytest.raises(RequestError, match="is being served"):
            llm.client.submit([constrained("a")])
        llm.client.submit([request("free", 4)])
        settle(llm)
        assert set(ends_of(messages)) == {"free"}
        assert llm.client.working
        assert not llm.client.drain(timeout=0.05)
        assert llm.client.cancel(["a"]) == {"a"}
        settle(llm)
        assert ends_of(messages)["a"].reason == "cancelled"
        slowly.go.set()
        assert llm.client.drain(timeout=20)
        assert ends_of(messages)["b"].reason == "length"


def test_a_request_that_waits_for_its_grammar_ends_when_the_engine_closes(
    folder: str,
) -> None:
    slowly = Slowly()
    llm = LLM(folder, executor="oracle", num_gpu_blocks_override=2000)
    llm.worker.compiling = CompilingRequests(Grammars(lambda: slowly), llm.worker.live)
    messages = listened(llm)
    llm.client.submit([constrained("a")])
    llm.close()
    slowly.go.set()
    assert ends_of(messages)["a"].reason == "cancelled"
