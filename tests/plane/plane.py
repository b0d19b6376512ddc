"""One seeded run of the whole control plane: hostile, then healed, and then it must
drain.

A run ends drained, shut down, with an engine that broke, or killed at some turn: then a
second life begins in the same folder. Everything that must hold of each end is checked
here.
"""

import asyncio
import contextlib
import functools
import hashlib
import shutil
import threading
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

import anyio.to_thread

from minfer.effects.live import async_llm
from minfer.effects.live import served_model as served
from minfer.effects.live.engine import engine_worker as worker
from minfer.effects.live.journal import journal_files as files
from minfer.effects.live.journal import journal_writer as journal
from minfer.effects.serving import application
from minfer.effects.serving.access import tenants
from minfer.effects.serving.observability import metrics as counters
from minfer.effects.serving.wire import request_ids, stamp
from minfer.effects.text import tokenizer as text
from minfer.effects.text.tools.formats import NONE
from minfer.journal import replay
from minfer.journal.format import MAGIC, JournalError
from minfer.journal.writing import as_written
from minfer.records.messages import Emit, Submit
from minfer.records.state import Turn
from tests.core.world import POLICIES
from tests.plane.clients import KEY, Client, Http, Reader
from tests.plane.faults import Disk, Faults, Faulty, Pool, Recorder
from tests.plane.loop import Condition, EngineThread, VirtualLoop

EVERY = 32  # turns from one digest of a journal's state to the next: then segments rotate
HORIZON = 1.5  # virtual seconds of trouble
ANSWER_SECONDS = 5000.0  # virtual seconds in which everybody must have been answered
LIVES = ("drained",) * 5 + ("killed", "killed", "broken", "shut down")  # how they end
tokenizer = functools.cache(text.Tokenizer)


def settings(rng: Random) -> dict[str, Any]:
    """A configuration so tight that everything happens at once."""
    size, longest, seqs = (
        rng.choice((2, 4, 8, 16)),
        rng.choice((48, 96)),
        rng.choice((1, 2, 4, 8)),
    )
    return {
        "executor": "oracle",
        "block_size": size,
        "max_model_len": longest,
        "max_num_seqs": seqs,
        "num_gpu_blocks_override": rng.choice((1, 1, 2, 4)) * longest // size
        + rng.choice((0, 3)),
        "max_num_batched_tokens": max(seqs, rng.choice((4, 16, 64, 512))),
        "scheduling_policy": rng.choice(POLICIES),
        "steps_in_flight": rng.choice((1, 2, 2, 3)),
        "max_waiting": rng.choice((6, 9, 9999)),
        "enable_prefix_caching": rng.random() < 0.8,
        "journal_redact": rng.random() < 0.1,
        "journal_size": rng.choice((2**30, 2**13)),
    }


class Plane:
    """A server over a faulty executor, a faulty disk and a clock that jumps: one life of
    it.
    """

    def __init__(self, seed: str, folder: Path, ending: str) -> None:
        self.rng, self.folder, self.ending = Random(seed), folder, ending
        self.faults = Faults(Random(f"{seed}/faults"))
        self.loop, self.disk = VirtualLoop(Random(f"{seed}/loop")), Disk(self.faults)
        self.clients, self.counts = list[Client](), dict[str, float]()
        self.offset, self.reported = (
            0.0,
            0,
        )  # of the engine's clock; turns that were reported
        self.stopped = False  # requests were ended by other hands than their clients'

    def run(self) -> None:
        """Live, then check all that must hold. Raises AssertionError, or what broke."""
        with self.patches():
            self.build()
            self.loop.run_until_complete(self.live())
            self.died = self.loop.died.done()
            if self.died:
                self.llm.worker.driver.record = None
            self.disk.full = self.rng.random() < 0.1
            self.llm.close()
            assert not self.loop.errors, self.loop.errors
            left = asyncio.all_tasks(self.loop)
            assert not left, f"tasks that were not ended: {left}"
            timers = [timer for timer in self.loop._scheduled if not timer.cancelled()]
            assert self.died or not timers, timers
            self.loop.close()
        self.judge()

    # --- what runs ----------------------------------------------------------------------

    def patches(self) -> contextlib.ExitStack:
        """Take away all that is random, a clock, a thread, or a disk."""
        rng, stack = Random(self.rng.random()), contextlib.ExitStack()
        fakes: dict[tuple[Any, str], Any] = {
            (stamp, "uuid"): SimpleNamespace(
                uuid4=lambda: UUID(int=rng.getrandbits(128))
            ),
            (request_ids, "uuid"): SimpleNamespace(
                uuid4=lambda: UUID(int=rng.getrandbits(128))
            ),
            (stamp, "time"): SimpleNamespace(time=lambda: 0.0),
            (application, "time"): SimpleNamespace(time=lambda: 0.0),
            (worker, "threading"): SimpleNamespace(
                Thread=EngineThread,
                Condition=Condition,
                main_thread=threading.main_thread,
            ),
            (journal, "time"): SimpleNamespace(
                gmtime=int, strftime=lambda *_: "20200101T000000Z"
            ),
            (journal, "secrets"): SimpleNamespace(token_bytes=rng.randbytes),
            (tenants, "secrets"): SimpleNamespace(
                token_bytes=lambda: rng.randbytes(32), randbits=rng.getrandbits
            ),
            (journal, "os"): self.disk,
            (files, "os"): self.disk,
            (journal, "ThreadPoolExecutor"): Pool,
            (journal, "MAX_SEGMENTS"): 3,
            (journal, "TURNS_PER_STATE_DIGEST"): EVERY,
            (replay, "TURNS_PER_STATE_DIGEST"): EVERY,
            (counters, "ProcessCollector"): mock.Mock(),  # it tells of this process
            (served, "Tokenizer"): tokenizer,
            (anyio.to_thread, "run_sync"): self.loop.in_thread,
        }
        for (module, name), fake in fakes.items():
            stack.enter_context(mock.patch.object(module, name, fake))
        return stack

    def build(self) -> None:
        """Put the product together as `minfer serve` does."""
        # Answers are any tokens: one that begins like reasoning is text as well.
        self.llm = async_llm.AsyncLLM(
            journal=self.folder,
            tool_call_parser=NONE,
            reasoning_parser=NONE,
            **settings(self.rng),
        )
        self.service = application.Application(self.llm, ["plane"], KEY, max_body=8000)
        driver, self.vocab = self.llm.worker.driver, self.rng.choice((97, 97, 2048))
        driver.clock = lambda: self.loop.now + self.offset
        sizes = driver.config.block_size, self.vocab
        driver.deferred.executor = slow = Faulty(
            self.loop, self.faults, self.late, *sizes
        )
        assert isinstance(driver.record, journal.JournalWriter)
        dies = self.rng.randrange(80) if self.ending == "killed" else -1
        audit, self.writer = self.rng.random() < 0.1, driver.record
        self.record = Recorder(self.writer, slow.pause, self.disk, dies, audit=audit)
        driver.record = self.record
        self.llm.frontend.after.insert(0, slow.pause)
        self.llm.frontend.on_end.insert(0, slow.pause)

    def late(self, event: Any) -> None:
        """The result of a step that was given up arrives."""
        if self.llm.worker.running:
            self.llm.worker.driver.post(event)

    def hear(self) -> None:
        """All turns so far are reported."""
        self.reported = max(self.reported, self.llm.worker.driver.turns)

    def neighbours(self) -> bool:
        """Whether steps went wrong for no fault of a request."""
        return any(
            self.faults.tally[f"steps: {kind}"] for kind in ("fail", "lost", "garble")
        )

    # --- phases -------------------------------------------------------------------------

    async def live(self) -> None:
        """All phases, as far as this ending lets them happen."""
        if self.ending != "second":
            await self.hostile()
        self.disk.full = False
        await self.idle()
        for _ in range(0 if self.stopping() else 2):
            await self.answered([self.come(0.0)])
            client = self.clients[-1]
            assert self.stopping() or not client.fits or client.outcome == "whole", (
                client.why
            )
            await self.idle()
        await asyncio.sleep(2.0)  # what is late comes, what wants to leave leaves
        if not self.loop.died.done():
            await self.ask("/health", 503 if self.stopping() else 200)
            self.counts = metrics(await self.ask("/metrics", 200))

    async def idle(self) -> None:
        """Wait until the engine has nothing to do: what clients left behind is gone."""
        while self.llm.worker.running and not self.loop.died.done():
            await asyncio.sleep(1.0)

    def stopping(self) -> bool:
        return self.service.state.closing or self.llm.errored or self.loop.died.done()

    async def hostile(self) -> None:
        """Clients of all kinds come, some at once, while everything goes wrong."""
        rng, start, tasks = self.rng, 0.0, list[asyncio.Task[None]]()
        self.faults.begin()
        self.faults.odds["explode"] = 0.05 * (self.ending == "broken")
        for _ in range(rng.choice((4, 8, 8, 14))):
            tasks += [
                self.come(start) for _ in range(5 if self.faults.hits("burst") else 1)
            ]
            start += rng.uniform(0, HORIZON / 8)
        storms = self.loop.create_task(self.storms())
        timers = [self.loop.call_later(HORIZON, self.faults.odds.clear)]
        if self.ending == "shut down":
            timers.append(self.loop.call_later(rng.uniform(0, HORIZON), self.shut_down))
        await self.answered(tasks)
        self.faults.odds.clear()
        storms.cancel()
        for timer in timers:
            timer.cancel()
        await asyncio.wait([storms])

    def come(self, start: float) -> asyncio.Task[None]:
        """One more client, from `start` on."""
        kind, rng = (
            Reader if self.rng.random() < 0.25 else Http,
            Random(self.rng.random()),
        )
        client = kind(self, rng)
        self.clients.append(client)

        async def live() -> None:
            await asyncio.sleep(start)
            await client.live()

        return self.loop.create_task(live())

    async def answered(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until clients are, or until the process dies, and they hear no more."""
        everybody, start = asyncio.gather(*tasks), self.loop.now
        await asyncio.wait(
            [everybody, self.loop.died], return_when=asyncio.FIRST_COMPLETED
        )
        if self.loop.died.done():
            everybody.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await everybody
        assert self.loop.now < start + ANSWER_SECONDS, "it took too long"

    async def storms(self) -> None:
        """Clients leave all at once, requests are cancelled by their ids, the clock
        jumps.
        """
        while True:
            await asyncio.sleep(self.faults.rng.uniform(0, 0.5))
            if self.faults.hits("jump"):
                self.offset += self.faults.rng.choice((0.3, -0.3, 20.0, -20.0, 500.0))
            if self.faults.hits("storm"):
                for client in self.clients:
                    if (
                        isinstance(client, Http)
                        and client.got
                        and self.faults.rng.random() < 0.7
                    ):
                        client.leave()
                if self.faults.rng.random() < 0.3:
                    self.stopped = True
                    for name in list(self.llm.frontend.processors):
                        await self.llm.abort(name)

    def shut_down(self) -> None:
        """The server stops, and the model may go before its last clients do."""
        self.stopped = True
        self.service.close()
        if self.rng.random() < 0.5:
            self.loop.call_later(self.rng.uniform(0, 0.3), self.llm.close)

    async def ask(self, path: str, status: int) -> str:
        client = Http(self, Random(0), path)
        await client.live()
        assert client.status == status, client.data
        return client.data.decode()

    # --- what must hold -----------------------------------------------------------------

    def judge(self) -> None:
        """Raise AssertionError unless everything is as it must be."""
        dead, broke = self.llm.worker.dead, bool(self.faults.tally["steps: explode"])
        assert broke or isinstance(dead, worker.EngineDeadError), (
            f"the engine broke: {dead!r}"
        )
        self.stopped = self.stopped or broke
        turns = self.record.log
        emits = [
            c for turn in turns for c in turn.transition.commands if isinstance(c, Emit)
        ]
        ends = [end for emit in emits for end in emit.finished]
        self.lengths = {(end.id, end.sample): end.length for end in ends}
        for client in () if self.died else self.clients:
            try:
                client.judge()
            except AssertionError as error:
                error.add_note(
                    f"{client.params} {getattr(client, 'wish', '')}: {client.got}"
                )
                raise
        if not self.died:
            requested = sum(
                isinstance(event, Submit) for turn in turns for event in turn.events
            )
            tokens = sum(len(new) for emit in emits for new in emit.tokens)
            self.judge_counts(requested, tokens, len(ends), broke=broke)
        if not (self.died or broke):
            self.judge_rest()
        self.judge_journal()

    def judge_counts(
        self, requested: int, tokens: int, ends: int, *, broke: bool
    ) -> None:
        """The metrics are what happened, and what clients saw."""
        ends_by_reason = {
            name: self.counts[f"request_success_total/{name}"]
            for name in ("stop", "length", "abort", "error")
        }
        assert self.counts["generation_tokens_total"] == tokens
        complete = [client for client in self.clients if client.outcome == "whole"]
        num_others = sum(
            client.samples for client in self.clients if client.outcome != "whole"
        )
        ends_seen = Counter(
            choice.reason for client in complete for choice in client.choices
        )
        for kind in ("stop", "length"):
            assert (
                ends_seen[kind] <= ends_by_reason[kind] <= ends_seen[kind] + num_others
            ), f"{ends_seen} {ends_by_reason} {num_others}"
        if not broke:
            assert self.counts["request_generation_tokens_count"] == requested
            assert sum(ends_by_reason.values()) == ends, (
                f"{ends_by_reason} are not {ends}"
            )
            for gauge in (
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
            ):
                assert not self.counts[gauge], gauge

    def judge_rest(self) -> None:
        """Nothing is left of any request."""
        driver, state, config = (
            self.llm.worker.driver,
            self.llm.worker.driver.state,
            self.llm.setup,
        )
        left: dict[str, Any] = {
            "jobs": self.llm.frontend.processors,
            "served": self.llm.worker.live,
            "events": driver.inbox,
            "requests": state.requests,
            "plans": state.inflight,
            "running": state.running,
            "waiting": state.waiting,
            "fences": state.fences,
            "metrics": self.llm.worker.tally.last,
            "faults": state.faults,
            "readers": self.llm._ready,
            "files": self.disk.files,
            "segments": [*self.folder.glob("*.part")] * (self.ending != "second"),
            "blocks": range(config.config.num_blocks - state.blocks.available),
            "rows": range(config.config.max_num_seqs - len(state.free_rows)),
        }
        for kind, items in left.items():
            assert not len(items), f"{kind} are left: {items}"
        assert not self.llm._readers

    def judge_journal(self) -> None:
        """It replays: all that was reported, and what is whole of it wherever it is
        cut.
        """
        log, num_kept, failed = self.record.log, self.record.kept, self.writer.failed
        journal_read = files.read_journal(self.folder)
        turns = list(journal_read.turns())
        unsure = self.died or failed is not None  # the last may be there, or not
        assert num_kept <= journal_read.count <= num_kept + unsure, (
            f"{journal_read.count} turns, not {num_kept}"
        )
        assert self.reported <= journal_read.count or num_kept < len(log), (
            "a lost turn was reported"
        )
        secret = self.llm.setup.args.journal_redact
        for recorded, turn in zip(
            log[journal_read.segments[0].head.turn :], turns, strict=False
        ):
            assert secret or tuple(map(as_written, recorded.events)) == turn.events
            assert secret or recorded.transition.commands == turn.transition.commands
            assert len(recorded.transition.reasons) == len(turn.transition.reasons)
        if not unsure:
            assert journal_read.closed
            assert journal_read.digest == self.writer.digest
            assert secret or journal_read.state == self.llm.worker.driver.state
        if self.rng.random() < 0.3:
            self.faults.tally["torn journal"] += 1
            self.tear(turns)

    def tear(self, turns: list[Turn]) -> None:
        """Cut the last segment anywhere: what is whole replays."""
        path, journal_read = self.writer.paths[-1], None
        data = path.read_bytes()
        head = len(MAGIC) + 8 + int.from_bytes(data[len(MAGIC) :][:4], "little")
        cut = self.rng.randrange(len(data))
        path.write_bytes(data[:cut])
        lost = cut < head and len(self.writer.paths) == 1
        with contextlib.suppress(JournalError) if lost else contextlib.nullcontext():
            journal_read = files.read_journal(self.folder)
            assert (
                list(journal_read.turns())
                == turns[: journal_read.count - journal_read.segments[0].head.turn]
            )
        assert lost == (journal_read is None)
        path.write_bytes(data)


def metrics(reported: str) -> dict[str, float]:
    """Values by name, and by reason where there is one."""
    values = {}
    for line in reported.splitlines():
        if line.startswith("minfer_"):
            name, value = line.removeprefix("minfer_").rsplit(" ", 1)
            reason = name.partition('reason="')[2].partition('"')[0]
            name = name.partition("{")[0]
            values[f"{name}/{reason}" if reason else name] = float(value)
    return values


def run_seed(seed: int, folder: Path) -> tuple[str, Counter[str]]:
    """One run: a digest of all that could be observed, and what happened."""
    digest, tally = hashlib.blake2b(digest_size=12), Counter[str]()
    shutil.rmtree(folder, ignore_errors=True)
    first = Random(seed).choice(LIVES)
    for ending in (first, "second") if first == "killed" else (first,):
        plane = Plane(f"{seed}/{ending}", folder, ending)
        plane.run()
        tally += plane.faults.tally
        tally += Counter(
            {f"life: {ending}": 1, "turns": len(plane.record.log), "runs": 1}
        )
        ends = (
            f"client: {client.outcome or 'cut off'} {client.why}"
            for client in plane.clients
        )
        tally += Counter(map(str.strip, ends))
        reported = [(client.outcome, client.why, client.got) for client in plane.clients]
        digest.update(
            repr((reported, sorted(plane.counts.items()), plane.loop.now)).encode()
        )
        for path in sorted(folder.iterdir()):
            digest.update(path.read_bytes())
    return digest.hexdigest(), tally
