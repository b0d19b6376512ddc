"""A disk that fills up, or a folder that goes away, stops the journal for as long as it
lasts, and never the engine.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.engine_worker import EngineWorker
from minfer.effects.live.journal import journal_writer as journals
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.live.journal.journal_writer import (
    FILE_CHECK_TURNS,
    FIRST_RETRY_SECONDS,
    JournalWriter,
)
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Submit
from minfer.records.request import Request
from minfer.records.state import EngineState, Turn
from minfer.simulation.oracle import Oracle
from tests.effects.live.test_journal_writer import CONFIG, full


class Engine:
    """An engine over the oracle, on a clock that tests move; the journal's thread is
    waited for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        redact: bool = False,
        size: int = 2**30,
        config: EngineConfig = CONFIG,
    ) -> None:
        self.now = 0.0
        self.log: list[Turn] = []
        self.writer = JournalWriter(folder, config, {}, redact=redact, size=size)
        oracle = Oracle(4, 100, config.groups)
        self.driver = Driver(config, oracle, clock=lambda: self.now, record=self)
        self.worker = EngineWorker(self.driver, self.writer)

    def __call__(self, turn: Turn) -> None:
        self.log.append(turn)
        self.writer(turn)
        if self.writer.job is not None and len(self.writer.turns_since) == 3:
            self.writer.job.exception(timeout=10)

    def close(self, state: EngineState) -> None:
        """As a driver's record must."""
        self.writer.close(state)

    def turns(self, count: int) -> None:
        """Serve for so many turns."""
        for _ in range(count):
            number = len(self.log)
            if number % 5 == 0:
                self.driver.post(
                    Submit(Request(id=str(number), prompt=(1, 2, 3), max_tokens=9))
                )
            self.driver.turn()

    def reported(self) -> tuple[bool | None, int]:
        """What a snapshot says of the journal."""
        now = self.worker.snapshot()
        return now.journal_writing, now.journal_errors


@pytest.fixture
def room() -> Iterator[pytest.MonkeyPatch]:
    """To fill a disk with, and to undo it."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def check_last_run(folder: Path, engine: Engine, since: int) -> None:
    """The last run in a folder replays, from a turn on, to the end."""
    journal = read_journal(folder)
    assert journal.segments[0].head.turn >= since
    turns = list(journal.turns())
    assert turns == engine.log[journal.segments[0].head.turn :]
    assert turns
    assert journal.closed


def test_writing_comes_back_when_there_is_room(
    tmp_path: Path, room: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path)
    engine.turns(20)
    assert engine.reported() == (True, 0)
    room.setattr(os, "write", full)
    engine.turns(20)
    assert engine.reported() == (False, 1)
    for _ in range(3):  # it is tried again, less and less often
        engine.now += 8 * FIRST_RETRY_SECONDS
        engine.turns(10)
    assert engine.reported() == (False, 4)
    assert len(caplog.records) == 1
    assert not list(tmp_path.glob("*.part"))
    room.undo()
    engine.turns(10)
    assert engine.reported() == (False, 4)  # it is not time yet
    engine.now += 20 * FIRST_RETRY_SECONDS
    engine.turns(30)
    assert engine.reported() == (True, 4)
    assert "goes on with turn" in caplog.text
    assert len(caplog.records) == 2
    engine.driver.close()
    check_last_run(tmp_path, engine, since=80)
    first = read_journal(min(tmp_path.iterdir()))  # what came before is there, too
    assert list(first.turns()) == engine.log[:20]


def test_a_folder_that_was_removed_is_noticed_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs"
    engine = Engine(folder)
    engine.turns(10)
    shutil.rmtree(folder)
    engine.turns(FILE_CHECK_TURNS)
    assert engine.reported() == (False, 1)
    assert "it was removed" in caplog.text
    engine.now += 2 * FIRST_RETRY_SECONDS
    engine.turns(20)
    assert engine.reported() == (True, 1)
    engine.driver.close()
    check_last_run(folder, engine, since=FILE_CHECK_TURNS)


def test_a_disk_that_is_full_now_and_then_is_not_filled_by_us(
    tmp_path: Path, room: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "MAX_SEGMENTS", 4)
    engine = Engine(tmp_path)
    for _ in range(9):
        engine.turns(20)
        room.setattr(os, "write", full)
        engine.turns(5)
        room.undo()
        engine.now += 2 * journals.MAX_RETRY_SECONDS
    engine.turns(20)
    assert engine.reported() == (True, 9)
    engine.driver.close()
    assert len(list(tmp_path.iterdir())) == 4
    check_last_run(tmp_path, engine, since=200)


def fill(engine: Engine, room: pytest.MonkeyPatch) -> None:
    """Some turns, then some with a full disk, then some with room again."""
    engine.turns(10)
    room.setattr(os, "write", full)
    engine.turns(10)
    room.undo()
    engine.now += 2 * journals.MAX_RETRY_SECONDS
    engine.turns(20)


def test_a_journal_without_tokens_comes_back_too(
    tmp_path: Path, room: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, redact=True)
    fill(engine, room)
    assert engine.reported() == (True, 1)
    engine.driver.close()
    assert len(list(tmp_path.iterdir())) == 2
    journal = read_journal(tmp_path)
    begin = journal.segments[0].head.turn
    assert begin >= 20
    turns = list(journal.turns())
    assert journal.closed
    assert journal.checked == 1  # the last state, with what clients are called there
    reasons = [turn.transition.reasons for turn in engine.log[begin:]]
    assert [turn.transition.reasons for turn in turns] == reasons
    assert begin + len(turns) == len(engine.log)
    prompts = [seq.request.prompt for seq in turns[0].before.running.seqs]
    assert prompts
    assert not {token for prompt in prompts for token in prompt} & {1, 2, 3}


def test_one_with_a_sliding_window_ends_where_it_fails(
    tmp_path: Path, room: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, redact=True, config=evolve(CONFIG, groups=(CacheGroup(8),)))
    fill(engine, room)
    assert engine.reported() == (False, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_engine_that_is_started_again_takes_nothing_from_the_one_before(
    tmp_path: Path,
) -> None:
    before = Engine(tmp_path)
    before.turns(30)  # and it is killed, not closed
    contents = {path: path.read_bytes() for path in tmp_path.iterdir()}
    after = Engine(tmp_path)
    after.turns(20)
    after.driver.close()
    check_last_run(tmp_path, after, since=0)
    assert {path: path.read_bytes() for path in contents} == contents
    (path,) = contents
    assert list(read_journal(path).turns()) == before.log


def test_of_ten_runs_in_a_second_the_last_is_the_latest(tmp_path: Path) -> None:
    for _ in range(11):  # as text, run 10 comes before run 9
        engine = Engine(tmp_path)
        engine.turns(3)
        engine.driver.close()
    engine = Engine(tmp_path)
    engine.turns(5)
    engine.driver.close()
    assert len(read_journal(tmp_path).segments) == 1
    check_last_run(tmp_path, engine, since=0)
