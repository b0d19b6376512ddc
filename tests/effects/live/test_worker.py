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
from typing import Any

import pytest
from attrs import frozen

from minfer import LLM, SamplingParams
from minfer.effects.live import worker
from minfer.effects.live.errors import RequestError
from minfer.effects.text.assembly import Assembly
from minfer.policy import FirstCome, Load
from minfer.request import Request
from tests.effects.tiny_model import write_checkpoint
from tests.effects.watched import Watched

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


def test_a_real_interrupt_cancels_all_and_the_llm_goes_on(folder: str) -> None:
    with LLM(folder, **SLOW) as llm:
        wanted = llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7, 8]], ENDLESS)
        assert time.monotonic() - started < 10
        timer.join()
        assert not llm.front.jobs
        assert llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids == wanted
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


def test_a_program_may_end_in_the_middle_of_a_stream(folder: str) -> None:
    code = f"""
from minfer import LLM, SamplingParams
llm = LLM({folder!r}, executor="oracle", num_gpu_blocks_override=2000, max_num_seqs=1)
stream = llm.stream([1, 2], SamplingParams(max_tokens=None, ignore_eos=True))
next(stream)
"""
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")


@frozen
class Later(FirstCome):
    """Lets nobody start before 0.2 s have passed."""

    def admit_from(self, state: None, load: Load) -> float:
        del state
        return load.arrived + 0.2


def test_it_sleeps_until_the_policy_lets_somebody_in(folder: str) -> None:
    with LLM(folder, executor="oracle", scheduling_policy=Later(), **SLOW) as llm:
        turns = Watched(llm)
        output = llm.generate([1, 2], GREEDY)[0]
        assert output.metrics.ttft is not None
        assert output.metrics.ttft >= 0.2
        assert len(turns) < 40  # it did not spin


def test_work_is_not_stopped_by_the_garbage_collector(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        enabled: list[bool] = []
        llm.front.after.append(lambda: enabled.append(gc.isenabled()))
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
                monkeypatch.setattr(worker, "SWEEP_EVERY", 0.0)

        llm.front.after.append(observe)
        stream = llm.stream([1, 2], ENDLESS)
        for _ in range(4):
            next(stream)
        assert freed[0]() is None
        assert not gc.isenabled()
        stream.close()


def test_an_id_is_served_once_at_a_time(folder: str) -> None:
    with LLM(folder, executor="oracle", **SLOW) as llm:
        stream = llm.stream([1, 2], ENDLESS)
        next(stream)
        llm.count = 0  # so that the next request gets the same id
        with pytest.raises(RequestError, match="'0' is being served"):
            llm.generate([[1], [2]], GREEDY)
        assert list(llm.front.jobs) == ["0"]
        stream.close()


def test_an_id_is_free_before_anybody_hears_of_the_end(folder: str) -> None:
    heard: list[tuple[bool, bool]] = []

    def sink(job: Assembly) -> None:
        heard.append((job.take().finished, job.request.id in llm.front.jobs))

    with LLM(folder, executor="oracle") as llm:
        request = Request(id="a", prompt=(1,), max_tokens=3)
        llm.front.submit([Assembly(request, sink, streaming=True)])
        assert llm.worker.thread is not None
        llm.worker.thread.join(60)
    assert heard[-1] == (True, False)
    assert set(heard[:-1]) == {(False, True)}


def test_outputs_come_in_the_order_of_the_batch(folder: str) -> None:
    """Not in the order of a set, which differs from process to process."""
    with LLM(folder, executor="oracle", num_gpu_blocks_override=2000) as llm:
        outputs = llm.generate([[i] for i in range(3, 12)], GREEDY)
        stream = llm.stream([[i] for i in range(3, 12)], GREEDY)
        came = [next(stream).request_id for _ in outputs]
        stream.close()
    assert came == [str(9 + i) for i in range(9)]
