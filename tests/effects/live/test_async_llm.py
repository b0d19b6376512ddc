"""AsyncLLM: an iterator per request, and that leaving at any moment harms no request."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer import LLM, AsyncLLM, ParameterError, RequestOutputKind, SamplingParams
from minfer.effects.live.client import EngineMessage, RequestReason, TurnOutputs
from minfer.effects.live.engine import open_engine as opening
from minfer.effects.live.errors import EngineDeadError, OverloadedError, RequestError
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.outputs import RequestOutput
from minfer.records.messages import (
    Cancel,
    Emit,
    Executed,
    Failed,
    Preempted,
    Submit,
)
from minfer.records.state import Turn
from minfer.simulation.oracle import Oracle
from tests.core.recorded import Seen
from tests.effects.tiny_model import write_checkpoint
from tests.effects.watched import Watched

SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "executor": "oracle",
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1000)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


def params(count: int | None, seed: int = 3, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, n=n, ignore_eos=True)


ENDLESS = params(None)


def delta(count: int) -> SamplingParams:
    return evolve(params(count), output_kind=RequestOutputKind.DELTA)


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def ids(outputs: list[RequestOutput], sample: int = 0) -> tuple[int, ...]:
    pieces = [
        completion.token_ids
        for o in outputs
        for completion in o.outputs
        if completion.index == sample
    ]
    return tuple(token for piece in pieces for token in piece)


def text(outputs: list[RequestOutput], sample: int = 0) -> str:
    return "".join(
        completion.text
        for o in outputs
        for completion in o.outputs
        if completion.index == sample
    )


class Slow(Oracle):
    """Takes a while for each step, as a model does: meanwhile the event loop runs."""

    def collect(self) -> Executed | Failed:
        time.sleep(0.004)
        return super().collect()


@pytest.fixture
def slow(folder: str, monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    monkeypatch.setattr(opening, "open_executor", lambda *_: Slow(8, 260))
    return AsyncLLM(folder, **SETTINGS)


def run(llm: AsyncLLM, program: Coroutine[Any, Any, None]) -> None:
    """Run a program of this LLM's; afterwards nothing may be left of any request."""

    async def whole() -> None:
        async with llm:
            await asyncio.wait_for(program, 60)

    asyncio.run(whole())
    settled(llm)


def settled(llm: AsyncLLM) -> None:
    state = llm.worker.driver.state
    assert not llm.frontend.processors
    assert not llm._readers
    for left in (state.requests, state.inflight, state.fences, state.running.ids):
        assert not left
    assert state.blocks.available == llm.setup.config.num_blocks
    assert len(state.free_rows) == llm.setup.config.max_num_seqs


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine's thread has nothing more to do."""
    thread = llm.worker.thread
    if thread is not None:
        await asyncio.to_thread(thread.join, 10)


# --- what comes out ---------------------------------------------------------------------


@pytest.mark.long
def test_deltas_join_to_what_generate_gives(folder: str) -> None:
    expected: dict[int, RequestOutput] = {}
    with LLM(folder, **SETTINGS) as plain:
        for i in range(12):
            expected[i] = plain.generate(
                "abc" * (i + 1), params(5 + i, seed=i, n=1 + i % 3)
            )[0]

    async def program() -> None:
        streams = [
            llm.generate_deltas(
                "abc" * (i + 1), params(5 + i, seed=i, n=1 + i % 3), request_id=f"r{i}"
            )
            for i in range(12)
        ]
        for i, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert {o.request_id for o in outputs} == {f"r{i}"}
            for completion in expected[i].outputs:
                assert [*ids(outputs, completion.index)] == completion.token_ids
                assert text(outputs, completion.index) == completion.text
            assert outputs[-1].metrics.output_tokens == (5 + i) * (1 + i % 3)

    run(llm := AsyncLLM(folder, **SETTINGS), program())


UNREAD = 10  # tokens; those of a character that is not whole yet are not emitted


class Awaiting(Oracle):
    """Ends a step only while fewer than `UNREAD` tokens wait to be read."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        super().__init__(block_size, vocab_size)
        self.read = threading.Semaphore(UNREAD)

    def collect(self) -> Executed | Failed:
        assert self.read.acquire(timeout=10)
        return super().collect()


def test_outputs_come_while_the_request_runs(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Awaiting(8, 260)
    monkeypatch.setattr(opening, "open_executor", lambda *_: executor)
    llm = AsyncLLM(folder, **SETTINGS)

    async def program() -> None:
        outputs = []
        async for output in llm.generate_deltas([1, 2], params(30)):
            outputs.append(output)
            executor.read.release(len(ids([output])))
        assert len(ids(outputs)) == 30
        assert len(outputs) >= 30 / UNREAD

    run(llm, program())


@pytest.mark.long
def test_stop_strings_cut_the_stream(slow: AsyncLLM) -> None:
    async def program() -> None:
        full_text = text(await collect(slow.generate_deltas("abc", params(60))))
        stop = full_text[20:22]
        cut = SamplingParams(seed=3, max_tokens=60, ignore_eos=True, stop=stop)
        outputs = await collect(slow.generate_deltas("abc", cut))
        assert text(outputs) == full_text[: full_text.index(stop)]
        last = outputs[-1].outputs[0]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)

    run(slow, program())


@pytest.mark.long
def test_a_slow_reader_gets_the_rest_in_one_piece(folder: str) -> None:
    async def program() -> None:
        stream = llm.generate_deltas("abc", params(200, n=2), request_id="slow")
        first = await anext(stream)
        await idle(llm)
        await asyncio.sleep(0)
        assert len(llm._ready) == 0
        remaining = [output async for output in stream]
        assert len(remaining) == 1
        outputs = [first, *remaining]
        expected = await collect(llm.generate_deltas("abc", params(200, n=2)))
        assert [ids(outputs, i) for i in (0, 1)] == [ids(expected, i) for i in (0, 1)]
        assert [text(outputs, i) for i in (0, 1)] == [text(expected, i) for i in (0, 1)]
        assert {len(ids(outputs, i)) for i in (0, 1)} == {200}

    run(llm := AsyncLLM(folder, **SETTINGS), program())


@pytest.mark.long
def test_a_loop_that_stands_still_is_rung_for_once(slow: AsyncLLM) -> None:
    """News of all requests wait in the requests themselves, whatever their number."""
    turns = Watched(slow)

    async def program() -> None:
        loop, rings = asyncio.get_running_loop(), []
        plain = loop.call_soon_threadsafe

        def counted(call: Any, *arguments: Any, **options: Any) -> asyncio.Handle:
            rings.append(call)
            return plain(call, *arguments, **options)

        # The loop is this test's own.
        loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]
        streams = [slow.generate_deltas([i + 1], params(200)) for i in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert len(rings) <= len(turns) + 1
        before, num_turns = len(rings), len(turns)
        while len(turns) < num_turns + 6 and slow.worker.running:
            time.sleep(0.01)  # the loop stands still
        assert len(turns) > num_turns + 5
        assert len(rings) <= before + 1
        assert len(slow._ready) <= 8
        await asyncio.gather(*map(collect, streams))

    run(slow, program())


def test_parameters_default_to_the_models(folder: str, tmp_path: Path) -> None:
    for path in Path(folder).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "top_p": 0.5}')

    async def program() -> None:
        advised = SamplingParams(temperature=0, top_p=0.5)
        assert llm.get_default_sampling_params() == advised
        greedy = SamplingParams(temperature=0)
        assert ids(await collect(llm.generate_deltas("abc"))) == ids(
            await collect(llm.generate_deltas("abc", greedy))
        )

    run(llm := AsyncLLM(str(tmp_path), **SETTINGS), program())


def test_a_conversation_is_answered(folder: str) -> None:
    talk = [{"role": "user", "content": "hi"}]

    async def program() -> None:
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(llm.render(talk)) == "<user>hi"
        outputs = await collect(llm.chat(talk, delta(9), request_id="c"))
        assert outputs[-1].prompt == "<user>hi"
        assert ids(outputs) == ids(
            await collect(llm.generate_deltas("<user>hi", params(9)))
        )
        pieces = (await collect(llm.chat(talk)))[-1:]
        assert len(ids(pieces)) > 16 or pieces[-1].outputs[0].finish_reason == "stop"
        with pytest.raises(ChatTemplateError, match="no messages"):
            llm.chat([])
        with pytest.raises(ChatTemplateError, match="exclude each other"):
            llm.render(talk, continue_final_message=True)

    run(llm := AsyncLLM(folder, **SETTINGS), program())


# --- bad input --------------------------------------------------------------------------


def test_everything_is_checked_at_the_call_and_nothing_runs(folder: str) -> None:
    async def program() -> None:
        cases: list[tuple[str, Any, dict[str, Any]]] = [
            ("the prompt is empty", "", {}),
            ("token id 999 at position 1", [1, 999], {}),
            ("the prompt has 1000 tokens", [1] * 1000, {}),
            ("must be SamplingParams", "a", {"sampling_params": {"n": 2}}),
            ("2 sampling_params for 1", "a", {"sampling_params": [ENDLESS, ENDLESS]}),
            ("request_id must be a string", "a", {"request_id": ""}),
            ("request_id must be a string", "a", {"request_id": 5}),
        ]
        for message, prompt, options in cases:
            with pytest.raises(RequestError, match=message):
                llm.generate_deltas(prompt, **options)
        with pytest.raises(ParameterError, match="top_p"):
            llm.generate_deltas("a", SamplingParams(top_p=2))
        llm.generate_deltas("never read", ENDLESS)  # a generator that is not started
        assert llm.worker.thread is None
        assert llm.count == 1

    run(llm := AsyncLLM(folder, **SETTINGS), program())


def test_ids_of_live_requests_differ(slow: AsyncLLM) -> None:
    async def program() -> None:
        late = slow.generate_deltas([1], params(3), request_id="a")
        stream = slow.generate_deltas([1], ENDLESS, request_id="a")
        await anext(stream)
        with pytest.raises(RequestError, match="id 'a' is being served; ids must differ"):
            slow.generate_deltas([1], ENDLESS, request_id="a")
        with pytest.raises(RequestError, match="is being served"):
            await anext(late)
        assert len((await anext(stream)).outputs) == 1  # it goes on
        await stream.aclose()
        await idle(slow)
        assert (
            len(ids(await collect(slow.generate_deltas([1], params(3), request_id="a"))))
            == 3
        )

    run(slow, program())


def test_a_full_queue_is_reported_at_the_call_or_at_the_first_output(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "open_executor", lambda *_: Slow(8, 260))
    llm = AsyncLLM(folder, **(SETTINGS | {"max_num_seqs": 1, "max_waiting": 2}))

    async def attempt(stream: AsyncGenerator[RequestOutput]) -> int:
        try:
            return len(ids(await collect(stream)))
        except OverloadedError as error:
            # Which of them raise is not known.
            assert "try again later" in str(error)  # noqa: PT017
            return -1

    async def program() -> None:
        with pytest.raises(RequestError, match="line is full"):  # and always would be
            llm.generate_deltas([1], params(4, n=3))
        running = llm.generate_deltas([1], ENDLESS)
        await anext(running)
        # Nothing is posted before they are read, so all of them pass the first check.
        streams = [llm.generate_deltas([i + 2], params(4)) for i in range(6)]
        tasks = [asyncio.create_task(attempt(stream)) for stream in streams]
        while sum(task.done() for task in tasks) < 4:
            await anext(running)
        with pytest.raises(OverloadedError, match="2 samples wait already, of at most 2"):
            llm.generate_deltas([9], params(4))
        await running.aclose()
        assert sorted(await asyncio.gather(*tasks)) == [-1, -1, -1, -1, 4, 4]

    run(llm, program())


# --- leaving ----------------------------------------------------------------------------


async def by_break(llm: AsyncLLM) -> None:
    async for _ in llm.generate_deltas([5], ENDLESS, request_id="x"):
        break


async def by_aclose(llm: AsyncLLM) -> None:
    stream = llm.generate_deltas([5], ENDLESS, request_id="x")
    await anext(stream)
    await stream.aclose()


async def by_cancelling_the_task(llm: AsyncLLM) -> None:
    task = asyncio.create_task(collect(llm.generate_deltas([5], ENDLESS, request_id="x")))
    while not llm.worker.driver.state.running.ids:
        await asyncio.sleep(0.002)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def by_a_timeout(llm: AsyncLLM) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(
            collect(llm.generate_deltas([5], ENDLESS, request_id="x")), 0.03
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "leave", [by_break, by_aclose, by_cancelling_the_task, by_a_timeout]
)
def test_leaving_cancels_within_one_step(slow: AsyncLLM, leave: Any) -> None:
    turns = slow.worker.driver.record = Seen()

    async def program() -> None:
        neighbour = asyncio.create_task(collect(slow.generate_deltas([7], params(60))))
        await leave(slow)
        await asyncio.sleep(0)  # a generator without references is closed by the loop
        left = len(turns)
        assert len(ids(await neighbour)) == 60
        await idle(slow)
        cancelled = [i for i, turn in enumerate(turns) if Cancel("x") in turn.events]
        # The turn that was under way may have popped its events already; the next one has
        # it.
        assert len(cancelled) == 1
        assert cancelled[0] <= left + 1
        after = turns[cancelled[0]].transition.state
        assert "x" not in after.requests
        # The blocks come back once the steps that may write to them are over.
        later = turns[cancelled[0] + slow.setup.config.depth]
        assert not later.transition.state.fences

    run(slow, program())


def test_abort_ends_a_request_for_its_reader(slow: AsyncLLM) -> None:
    async def program() -> None:
        stream = slow.generate_deltas([1], ENDLESS, request_id="gone")
        outputs = [await anext(stream)]
        await slow.abort("gone")
        await slow.abort(["unknown"])
        outputs += [output async for output in stream]
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "cancelled"

    run(slow, program())


def test_closing_ends_readers_and_refuses_newcomers(slow: AsyncLLM) -> None:
    async def program() -> None:
        unread = slow.generate_deltas([3], ENDLESS)
        tasks = [
            asyncio.create_task(collect(slow.generate_deltas([i], ENDLESS)))
            for i in range(1, 12)
        ]
        while len(slow.frontend.processors) < 11:
            await asyncio.sleep(0.002)
        before = slow.errored
        await asyncio.to_thread(slow.close)
        assert not before
        assert slow.errored
        for outputs in await asyncio.gather(*tasks):
            assert outputs[-1].outputs[0].finish_reason == "cancelled"
        with pytest.raises(EngineDeadError, match="closed"):
            slow.generate_deltas([1])
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(unread)

    run(slow, program())


def test_an_engine_that_breaks_tells_every_reader(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(Slow):
        left = 5

        def collect(self) -> Executed | Failed:
            self.left -= 1
            executed = super().collect()
            return executed if self.left else Executed(1 // 0, ())

    monkeypatch.setattr(opening, "open_executor", lambda *_: Mortal(8, 260))
    llm = AsyncLLM(folder, **SETTINGS)

    async def program() -> None:
        tasks = [
            asyncio.create_task(collect(llm.generate_deltas([i], ENDLESS)))
            for i in range(1, 20)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert "ZeroDivisionError" in str(results[0])
        assert llm.errored
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            llm.generate_deltas([1])
        assert not llm.frontend.processors
        assert not llm._readers

    asyncio.run(asyncio.wait_for(program(), 30))
    llm.close()


@pytest.mark.long
def test_a_failing_request_does_not_fail_its_neighbours(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flaky(Slow):
        def collect(self) -> Executed | Failed:
            if any(opened.known[0] == 13 for opened in self.plans[0].opens):
                return self.fail("device error", halfway=False)
            return super().collect()

    monkeypatch.setattr(opening, "open_executor", lambda *_: Flaky(8, 260))
    llm = AsyncLLM(folder, **SETTINGS)

    async def program() -> None:
        good = asyncio.create_task(collect(llm.generate_deltas([1], params(30))))
        bad = await collect(llm.generate_deltas([13], params(30)))
        assert bad[-1].outputs[0].finish_reason == "error"
        assert "device error" in bad[-1].outputs[0].error
        assert len(ids(await good)) == 30

    run(llm, program())


# --- storms -----------------------------------------------------------------------------


async def storm(llm: AsyncLLM, tasks: int, seed: int, patience: float) -> None:
    """Many clients, half of which leave at a random moment in a random way."""
    dice = random.Random(seed)
    quiet = {
        i: ids(
            await collect(
                llm.generate_deltas([1 + i, 2, 3] * (1 + i), params(12, seed=i))
            )
        )
        for i in range(7)
    }

    async def client(number: int, leaves: bool) -> None:
        i = number % 7
        prompt = [1 + i, 2, 3] * (1 + i)
        if not leaves:
            outputs = await collect(llm.generate_deltas(prompt, params(12, seed=i)))
            assert ids(outputs) == quiet[i]
            return
        num_outputs, max_outputs = 0, dice.randrange(4)
        stream = llm.generate_deltas(
            prompt, params(None, seed=i, n=1 + i % 2), request_id=f"s{number}"
        )
        async with contextlib.aclosing(stream):
            async for _ in stream:
                num_outputs += 1
                if max_outputs and num_outputs >= max_outputs:
                    break

    async def leave(task: asyncio.Task[None]) -> None:
        await asyncio.sleep(dice.random() * patience)
        task.cancel()

    stay = [asyncio.create_task(client(i, False)) for i in range(tasks // 2)]
    go = [asyncio.create_task(client(i, True)) for i in range(tasks // 2)]
    leaving = [asyncio.create_task(leave(task)) for task in go]
    await asyncio.gather(*stay, *leaving)
    results = await asyncio.gather(*go, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    await idle(llm)
    settled(llm)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_leaving_clients_leaves_nothing_behind(folder: str, seed: int) -> None:
    settings = SETTINGS | {"num_gpu_blocks_override": 160, "max_num_seqs": 16}
    run(llm := AsyncLLM(folder, **settings), storm(llm, 300, seed, 0.5))


@pytest.mark.long
def test_a_storm_on_a_model() -> None:
    llm = AsyncLLM(
        dtype="float32", num_gpu_blocks_override=64, block_size=32, max_num_seqs=16
    )
    run(llm, storm(llm, 60, 5, 0.4))


# --- event loops and threads ------------------------------------------------------------


def test_one_loop_after_another(slow: AsyncLLM) -> None:
    async def leaves_things_behind() -> None:
        stream = slow.generate_deltas([1], ENDLESS)
        await anext(stream)
        # So that they live on.
        asyncio.get_running_loop().tasks = [  # type: ignore[attr-defined]
            asyncio.create_task(collect(slow.generate_deltas([2], ENDLESS))),
            stream,
        ]
        await asyncio.sleep(0.01)

    async def program() -> None:
        assert len(ids(await collect(slow.generate_deltas([1], params(5))))) == 5

    asyncio.run(leaves_things_behind())  # which cancels what is left
    run(slow, program())


def test_a_second_loop_at_the_same_time_is_refused(slow: AsyncLLM) -> None:
    async def other() -> None:
        with pytest.raises(RuntimeError, match="one event loop"):
            await collect(slow.generate_deltas([2], params(2)))

    async def program() -> None:
        stream = slow.generate_deltas([1], ENDLESS)
        await anext(stream)
        await asyncio.to_thread(asyncio.run, other())
        await stream.aclose()

    run(slow, program())


def test_loops_that_begin_together_are_served_or_refused() -> None:
    outcomes: list[str] = []

    def read(llm: AsyncLLM, together: threading.Barrier) -> None:
        async def program() -> None:
            outputs = llm.generate_deltas("a", SamplingParams(max_tokens=2))
            together.wait(10)
            try:
                outcomes.append(str((await collect(outputs))[-1].finished))
            except RuntimeError as error:
                outcomes.append(str(error))

        asyncio.run(program())

    with contextlib.closing(AsyncLLM(executor="dry")) as llm:
        for _ in range(10):
            barrier = threading.Barrier(3)
            threads = [
                threading.Thread(target=read, args=(llm, barrier), daemon=True)
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
    assert len(outcomes) == 30
    refusal = "an AsyncLLM serves one event loop; it has readers in another"
    assert set(outcomes) <= {"True", refusal}


def test_an_interpreter_without_a_loop_any_more_does_not_break_the_engine(
    slow: AsyncLLM,
) -> None:
    loop = asyncio.new_event_loop()
    stream = slow.generate_deltas([1], ENDLESS, request_id="orphan")
    loop.run_until_complete(anext(stream))
    loop.close()
    time.sleep(0.05)  # the engine goes on and finds no waiter to wake
    assert not slow.errored
    assert list(slow.frontend.processors) == ["orphan"]
    slow.close()
    assert not slow.frontend.processors
    with contextlib.suppress(StopIteration):  # closed by hand: there is no loop to do it
        stream.aclose().send(None)
    assert slow.worker.thread is not None
    assert not slow.worker.thread.is_alive()


# --- hooks ------------------------------------------------------------------------------


def described(turn: Turn) -> tuple[list[Any], ...]:
    """What a turn has for its requests: news in columns, ends, and reasons."""
    emits = [command for command in turn.transition.commands if isinstance(command, Emit)]
    return (
        [sample for emit in emits for sample in emit.ids],
        [tokens for emit in emits for tokens in emit.tokens],
        [end for emit in emits for end in emit.finished],
        [event.request.id for event in turn.events if isinstance(event, Submit)],
        [
            reason
            for reason in turn.transition.reasons
            if isinstance(reason, RequestReason)
        ],
    )


def test_a_turn_is_one_message_and_ends_are_reported_once(slow: AsyncLLM) -> None:
    messages: list[EngineMessage] = []
    ended: list[OutputProcessor] = []
    slow.client.listen(messages.append)
    recorded = slow.worker.driver.record = Seen()
    slow.frontend.on_end.append(ended.append)

    async def program() -> None:
        streams = [
            slow.generate_deltas([i], params(6), request_id=f"r{i}") for i in range(1, 21)
        ]
        await asyncio.gather(*map(collect, streams))
        await by_break(slow)
        await idle(slow)
        outputs = [message for message in messages if isinstance(message, TurnOutputs)]
        assert outputs == messages
        turns_with_outputs = [turn for turn in recorded if any(described(turn))]
        for message, turn in zip(outputs, turns_with_outputs, strict=True):
            assert message.time == turn.transition.state.time
            columns = (
                message.ids,
                message.tokens,
                message.finished,
                message.arrived,
                message.reasons,
            )
            assert tuple(map(list, columns)) == described(turn)
        assert sorted(job.request.id for job in ended) == sorted(
            [*(f"r{i}" for i in range(1, 21)), "x"]
        )
        for job in ended:
            times = job.times
            assert times.started is not None
            assert times.first is not None
            assert times.last is not None
            assert times.arrived <= times.started <= times.first <= times.last
            assert job.samples[0].ending is not None
        submits = sum(isinstance(e, Submit) for turn in recorded for e in turn.events)
        assert submits == 21
        # 8 rows for 20 requests: those that waited were admitted later.
        all_times = [job.times for job in ended]
        waits = [
            times.started - times.arrived
            for times in all_times
            if times.started is not None
        ]
        assert max(waits) > 0.01

    run(slow, program())


@pytest.mark.long
def test_a_request_has_started_when_it_was_first_admitted(folder: str) -> None:
    settings = SETTINGS | {"num_gpu_blocks_override": 30, "max_model_len": 200}
    llm = AsyncLLM(folder, **settings)
    turns = Watched(llm)
    ended: list[OutputProcessor] = []
    llm.frontend.on_end.append(ended.append)

    async def program() -> None:
        streams = [llm.generate_deltas([i], params(150)) for i in range(1, 5)]
        await asyncio.gather(*map(collect, streams))

    run(llm, program())
    reasons = [reason for turn in turns for reason in turn.reasons]
    assert any(isinstance(reason, Preempted) for reason in reasons)
    for job in ended:
        assert job.times.started is not None
        assert job.times.first is not None
        assert job.times.started <= job.times.first
