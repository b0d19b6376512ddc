"""What a live engine has written replays: after a kill, a full disk, a rotation."""

import errno
import os
import signal
import socket
import subprocess
import sys
import zlib
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer import LLM, SamplingParams
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.journal import journal_writer as journals
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.live.journal.journal_writer import JournalWriter
from minfer.journal.format import JournalError
from minfer.journal.reading import payloads
from minfer.policies.fair_queue import FairQueue
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Cancel, Submit
from minfer.records.policy import FirstCome, Policy
from minfer.records.request import Request
from minfer.records.state import Turn, initial
from minfer.simulation.oracle import Oracle
from minfer.values.checks import ConfigError
from minfer.values.pmap import Map
from tests.effects.tiny_model import write_checkpoint

CONFIG = EngineConfig(
    num_blocks=60, block_size=4, max_num_seqs=8, vocab_size=100, policy=FairQueue()
)


def live(
    folder: Path, turns: int, window: int = 0, **options: Any
) -> tuple[Driver, list[Turn]]:
    """An engine over the oracle with a journal, driven for `turns` turns; not closed.

    It waits for the thread that makes snapshots, so a slow machine rotates segments as a
    fast one.
    """
    config = evolve(CONFIG, groups=(CacheGroup(window),))
    writer, log = (
        JournalWriter(folder, config, {"why": "a test"}, **options),
        list[Turn](),
    )

    class Both:
        def __call__(self, turn: Turn) -> None:
            log.append(turn)
            writer(turn)
            if writer.job and len(writer.turns_since) == 3:
                wait([writer.job])

        close = staticmethod(writer.close)

    driver = Driver(config, Oracle(4, 100, config.groups), record=Both())
    for number in range(turns):
        if number % 5 == 0:
            prompt = tuple(range(1, 3 + number % 37))
            driver.post(Submit(Request(id=str(number), prompt=prompt, max_tokens=9)))
        if number % 35 == 0:
            driver.post(Cancel(str(number - 10)))
        driver.turn()
    return driver, log


@pytest.mark.long
def test_a_live_engine_replays(tmp_path: Path) -> None:
    driver, log = live(tmp_path / "new", 300)
    driver.close()
    driver.close()
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    for place in (path, path.parent):
        journal = read_journal(place)
        assert list(journal.turns()) == log
        assert journal.closed
        assert journal.checked == 1
        assert journal.about["why"] == "a test"


def test_the_library_writes_a_journal(tmp_path: Path) -> None:
    with LLM(executor="dry", journal=tmp_path, max_num_seqs=4) as llm:
        llm.generate(
            ["a", "b", "c"] * 3, SamplingParams(max_tokens=9, n=2, stop=["will not come"])
        )
    with LLM(executor="dry", journal=str(tmp_path)) as llm:
        llm.generate(["the second run"], SamplingParams(max_tokens=3))
    assert len(list(tmp_path.iterdir())) == 2
    journal = read_journal(tmp_path)  # the latest
    assert sum(len(turn.events) for turn in journal.turns()) > 3
    assert journal.about["executor"] == "dry"
    first = read_journal(min(tmp_path.iterdir()))
    assert (
        len(
            {
                e.request.id
                for t in first.turns()
                for e in t.events
                if isinstance(e, Submit)
            }
        )
        == 9
    )


@pytest.mark.long
def test_a_redacted_journal_replays_and_holds_no_prompt(tmp_path: Path) -> None:
    driver, log = live(tmp_path, 200, redact=True)
    driver.close()
    journal = read_journal(tmp_path)
    turns = list(journal.turns())
    reasons = [turn.transition.reasons for turn in log]
    assert [turn.transition.reasons for turn in turns] == reasons
    assert journal.closed
    prompts = [e.request.prompt for t in turns for e in t.events if isinstance(e, Submit)]
    assert not any(0 < token < 100 for prompt in prompts for token in prompt)


@pytest.mark.long
def test_a_redacted_journal_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "TURNS_PER_STATE_DIGEST", 50)
    monkeypatch.setattr("minfer.journal.replay.TURNS_PER_STATE_DIGEST", 50)
    driver, log = live(tmp_path, 400, redact=True, size=16 * 4_000)
    driver.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) >= 3
    journal = read_journal(tmp_path)
    replayed = [turn.transition.reasons for turn in journal.turns()]
    assert replayed == [turn.transition.reasons for turn in log]
    assert journal.closed
    assert journal.checked >= len(files)
    files[0].unlink()
    journal = read_journal(tmp_path)
    begin = journal.segments[0].head.turn
    replayed = [turn.transition.reasons for turn in journal.turns()]
    assert replayed == [turn.transition.reasons for turn in log[begin:]]


@pytest.mark.long
def test_without_snapshots_a_redacted_journal_ends_at_its_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = 16 * 500
    driver, log = live(tmp_path, 400, window=8, redact=True, size=size)
    driver.close()
    (path,) = tmp_path.iterdir()
    assert size < path.stat().st_size < size + 1000
    assert (
        "it is as large as --journal-size allows; the engine goes on without"
        in caplog.text
    )
    assert len(caplog.records) == 1
    journal = read_journal(tmp_path)
    replayed = [turn.transition.reasons for turn in journal.turns()]
    assert replayed == [turn.transition.reasons for turn in log[: len(replayed)]]
    assert 10 < len(replayed) < 400
    assert not journal.closed


@pytest.mark.parametrize("redact", [False, True])
def test_a_redacted_journal_names_the_model_not_where_it_is(
    tmp_path: Path, redact: bool
) -> None:
    folder = write_checkpoint(tmp_path / "someone" / "tiny")
    runs = tmp_path / "runs"
    with LLM(str(folder), executor="oracle", journal=runs, journal_redact=redact):
        pass
    details = read_journal(runs).about
    assert details["model"] == ("tiny" if redact else str(folder))
    assert details.get("machine") == (None if redact else socket.gethostname())
    assert not redact or b"someone" not in zlib.decompress(
        next(iter(payloads(next(runs.iterdir()).read_bytes(), "")))[1:]
    )


@pytest.mark.long
def test_segments_rotate_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "TURNS_PER_STATE_DIGEST", 50)
    monkeypatch.setattr("minfer.journal.replay.TURNS_PER_STATE_DIGEST", 50)
    driver, log = live(tmp_path, 200, size=16 * 40_000)
    for _ in range(400):
        log_before = len(log)
        driver.post(Submit(Request(id=f"more{log_before}", prompt=(1, 2), max_tokens=3)))
        driver.turn()
    driver.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) >= 3
    assert not [name for name in names if name.endswith(".part")]
    journal = read_journal(tmp_path)
    assert list(journal.turns()) == log
    assert journal.checked >= len(names)
    (tmp_path / names[0]).unlink()
    journal = read_journal(tmp_path)
    begin = journal.segments[0].head.turn
    assert begin
    assert list(journal.turns()) == log[begin:]
    (tmp_path / names[len(names) // 2]).unlink()
    with pytest.raises(
        JournalError, match=r"begins with turn \d+, but what comes before it ends"
    ):
        list(read_journal(tmp_path).turns())


@pytest.mark.long
def test_a_small_size_is_kept(tmp_path: Path) -> None:
    """Long before the turn in which a digest of the state is due."""
    sizes, size = [], 16 * 4096
    driver, log = live(tmp_path, 0, size=size)
    for number in range(3000):
        driver.post(Submit(Request(id=str(number), prompt=(1, 2), max_tokens=3)))
        driver.turn()
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    driver.close()
    assert max(sizes) < 2 * size  # a snapshot of this run takes about half a segment
    assert len(list(tmp_path.iterdir())) == journals.MAX_SEGMENTS
    journal = read_journal(tmp_path)
    assert 0 < journal.segments[0].head.turn < 2900
    assert list(journal.turns()) == log[journal.segments[0].head.turn :]


@pytest.mark.long
def test_kept_segments_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "TURNS_PER_STATE_DIGEST", 10)
    monkeypatch.setattr("minfer.journal.replay.TURNS_PER_STATE_DIGEST", 10)
    monkeypatch.setattr(journals, "MAX_SEGMENTS", 3)
    driver, log = live(tmp_path, 10, size=1)
    while len(log) < 400:
        driver.post(Submit(Request(id=str(len(log)), prompt=(1, 2), max_tokens=3)))
        driver.turn()
    driver.close()
    assert len(list(tmp_path.iterdir())) == 3
    journal = read_journal(tmp_path)
    assert list(journal.turns()) == log[journal.segments[0].head.turn :]


KILLED = """
import sys
from pathlib import Path
from tests.effects.live.test_journal_writer import live
driver, log = live(Path(sys.argv[1]), 40)
print(len(log), flush=True)
while True:
    driver.turn()
    print(len(log), flush=True)
"""


@pytest.mark.long
def test_a_killed_process_loses_at_most_the_turn_it_was_writing(tmp_path: Path) -> None:
    """Turns are told of only once they are written; what was told before the kill must be
    there.
    """
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(500):
            reported = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        reported = max([reported, *map(int, process.stdout.read().split("\n")[:-1])])
    journal = read_journal(tmp_path)
    list(journal.turns())
    assert journal.count >= reported
    assert not journal.closed


def test_a_disk_that_fails_ends_the_journal_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, log = live(tmp_path, 20)
    real, left = os.write, [3]

    def write(file: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2 + 1] if left[0] == 0 else data)

    monkeypatch.setattr(os, "write", write)
    for _ in range(20):
        driver.turn()
    driver.close()
    monkeypatch.undo()
    assert "the journal ends after turn" in caplog.text
    assert "No space left" in caplog.text
    assert len(caplog.records) == 1
    journal = read_journal(tmp_path)
    turns = list(journal.turns())
    assert turns == log[: len(turns)]
    assert 20 < len(turns) < 40


def test_an_engine_with_a_policy_of_ones_own(tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=9, policy=Mine(3))
    driver = Driver(config, Oracle(64, 9), record=JournalWriter(tmp_path, config, {}))
    driver.post(Submit(Request(id="a", prompt=(1,), max_tokens=3)))
    driver.turn()
    driver.close()
    with pytest.raises(JournalError, match="Mine"):
        read_journal(tmp_path)
    journal = read_journal(tmp_path, [Mine(0)])
    assert list(journal.turns())
    assert journal.config == config


@frozen
class Mine(FirstCome):
    most: int = 0


class Bare(Policy):
    pass


def test_what_cannot_be_journalled_is_reported_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frozen attrs records"):
        JournalWriter(tmp_path, EngineConfig(num_blocks=1, policy=Bare()), {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"--journal .*file"):
        JournalWriter(tmp_path / "file", CONFIG, {})
    weighed = evolve(CONFIG, policy=FairQueue(weights=Map({"Ann": 2.0})))
    with pytest.raises(
        ConfigError, match="--journal-redact: the policy's weights name clients"
    ):
        JournalWriter(tmp_path / "new", weighed, {}, redact=True)
    assert not (tmp_path / "new").exists()
    JournalWriter(tmp_path / "new", weighed, {}).close(initial(weighed))
    with pytest.raises(
        ConfigError, match="--journal-redact records nothing without --journal"
    ):
        LLM(executor="dry", journal_redact=True)


def test_a_disk_that_is_full_at_the_end_lets_the_engine_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, log = live(tmp_path, 20)
    monkeypatch.setattr(os, "write", full)
    driver.close()
    driver.close()
    assert "the journal ends after turn 20" in caplog.text
    assert list(read_journal(tmp_path).turns()) == log


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.long
def test_a_segment_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "TURNS_PER_STATE_DIGEST", 10)
    monkeypatch.setattr("minfer.journal.replay.TURNS_PER_STATE_DIGEST", 10)
    driver, log = live(tmp_path, 10, size=1)
    real, refused = os.write, list[os.stat_result]()

    def write(file: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{file}").endswith(".part"):
            return real(file, data)
        refused.append(os.fstat(file))
        return full()

    monkeypatch.setattr(os, "write", write)
    while len(log) < 400:
        driver.post(Submit(Request(id=str(len(log)), prompt=(1, 2), max_tokens=3)))
        driver.turn()
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    left = [link.stat() for link in links if link.exists()]
    assert refused
    assert not any(
        os.path.samestat(refused_stat, left_stat)
        for refused_stat in refused
        for left_stat in left
    )  # closed
    assert {path.suffix for path in tmp_path.iterdir()} == {".journal"}
    driver.close()
    turns = list(read_journal(tmp_path).turns())
    assert turns == log[: len(turns)]
