"""Writes the journal of a running engine, turn by turn.

A run writes `DIR/RUN-000001.journal` and on; each is a segment that begins with a
snapshot, so old ones can be deleted: the size is bounded. A turn is written before its
outputs are reported, with one system call; a process that is killed loses at most the
turn that it was writing. States are values, so a thread makes their digests and snapshots
while the engine continues: until a new segment's snapshot is there, turns go to the old
segment, and they are repeated in the new one.

    writing --- the disk is full, the folder is gone ---> failed     turns are not written
       ^                                                     |
       +--- a new run, which begins with a snapshot <--------+       tried again and again

An engine never stops for its journal. Turns that could not be written are in no run: the
turns before belong to one, the turns after to another.
"""

import errno
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Final

from attrs import frozen

import minfer
from minfer.effects.live.journal.journal_files import SUFFIX, create, write_all
from minfer.journal import writing as records
from minfer.journal.codec import CodecError, dump
from minfer.journal.decisions import compact, extend_digest, facts
from minfer.journal.format import MAGIC, START_DIGEST, TURNS_PER_STATE_DIGEST, Head
from minfer.journal.redact import redacted, redacted_config
from minfer.journal.redact_state import can_be_redacted, redacted_state
from minfer.records.config import EngineConfig
from minfer.records.state import EngineState, Turn
from minfer.values.checks import ConfigError

MAX_SEGMENTS: Final = 16  # each has this share of the allowed size
FIRST_RETRY_SECONDS: Final = 1.0  # until a failed journal is retried; doubled
MAX_RETRY_SECONDS: Final = 60.0  # each time, up to this
FILE_CHECK_TURNS: Final = 64  # between two checks that the file is still in its folder
_log = logging.getLogger("minfer.journal")


@frozen
class _StateRecords:
    """A thread's results for a state: the record of its digest and a head, if due."""

    record: bytes
    head: bytes


class JournalWriter:
    """Records the turns of one engine; pass it to the driver as `record`.

    Raises ConfigError if the folder cannot be written, or the policy is not made of
    records. A disk that fails later stops the journal, not the engine: that is logged,
    `failed` holds the cause as long as it lasts, and `errors` counts all failed attempts.
    `redact`: write no token ids (`minfer.journal.redact`). With a sliding window there
    are no redacted snapshots: that journal is one segment, which ends where it fails, or
    when it reaches the size allowed for all segments.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        header: Mapping[str, Any],
        *,
        size: int = 1 << 30,
        redact: bool = False,
    ) -> None:
        self.config = config
        self.written_config = redacted_config(config) if redact else config
        self.snapshots = not redact or can_be_redacted(config)
        self.about = {"minfer": minfer.__version__, **header}
        self.secret = secrets.token_bytes(32) if redact else b""
        self.limit = max(1, size // MAX_SEGMENTS)  # bytes of a segment
        self.digest = START_DIGEST
        self.turns = 0
        self.pool = ThreadPoolExecutor(1, "minfer-journal")
        self.job: Future[_StateRecords] | None = None
        self.turns_since: list[bytes] = []  # turns since the state of the job
        self.failed: Exception | None = None
        self.errors = 0
        self.closed = False
        self.folder = folder
        self.numbers = count()  # of runs that begin in the same second
        self.older: list[Path] = []  # segments of this engine's earlier runs
        self.pause = FIRST_RETRY_SECONDS
        self.retry_time = 0.0  # when writing is retried, on the engine's clock
        first = _head(config, self.written_config, self.about, redact=redact)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.paths = [_new_run_path(folder, self.numbers)]
            self.file = create(self.paths[0])
            self.size = self.base = write_all(self.file, MAGIC + first)
        except OSError as error:
            reason = f"--journal {folder}: {error.strerror or error}"
            raise ConfigError(f"{reason}; name a folder that can be written") from None

    def __call__(self, turn: Turn) -> None:
        """Write a turn; the operating system has it when this returns."""
        if self.closed or (self.failed is not None and not self.snapshots):
            return
        try:
            if self.failed is None:
                self._write_turn(turn)
            else:
                self._resume(turn)
        except (OSError, CodecError) as error:
            self._fail(error, turn.transition.state.time)

    def _fail(self, error: Exception, now: float) -> None:
        """Note that writing failed; logged once, however often it is retried."""
        self.errors += 1
        self.job = None  # its results belong to a run that has ended
        self.retry_time = now + self.pause
        self.pause = min(MAX_RETRY_SECONDS, 2 * self.pause)
        if self.failed is None:
            _log.warning(
                "the journal ends after turn %d of %s: %s; the engine goes on without%s",
                self.turns,
                self.paths[-1],
                error,
                ", and begins another when that is possible" * self.snapshots,
            )
        self.failed = error

    def _resume(self, turn: Turn) -> None:
        """Begin a new run: start its snapshot, or write it when it is ready."""
        if self.job is not None:
            self.turns_since.append(self._record(turn))
            if self.job.done():
                self._begin_run(self.job.result())
        elif turn.transition.state.time >= self.retry_time:
            self.turns = turn.number + 1
            self.digest = START_DIGEST
            self.turns_since = []
            self.job = self.pool.submit(
                self._encode_state,
                self.turns,
                START_DIGEST,
                turn.transition.state,
                full=True,
            )

    def _begin_run(self, encoded: _StateRecords) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._begin_segment(_new_run_path(self.folder, self.numbers), encoded.head)
        self.older += self.paths[:-1]
        del self.paths[:-1]
        self.failed = None
        _log.warning("the journal goes on with turn %d of %s", self.turns, self.paths[-1])

    def _record(self, turn: Turn) -> bytes:
        """Returns a turn as the journal's next record."""
        decisions = compact(facts(turn.before, turn.transition))
        self.digest = extend_digest(self.digest, turn.transition, decisions)
        if self.secret:
            events = redacted(self.config, turn.before, turn.events, self.secret)
            turn = Turn(turn.number, turn.before, events, turn.transition)
        self.turns += 1
        return records.turn_record(turn, decisions, self.digest)

    def _write_turn(self, turn: Turn) -> None:
        if not self.snapshots and self.size > MAX_SEGMENTS * self.limit:
            raise OSError(errno.EFBIG, "it is as large as --journal-size allows")
        if turn.number % FILE_CHECK_TURNS == 0 and not os.fstat(self.file).st_nlink:
            raise OSError(errno.ENOENT, "it was removed")
        record = self._record(turn)
        self.size += write_all(self.file, record)
        if not self.snapshots:
            return
        if self.job is not None:
            self.turns_since.append(record)
            if self.job.done():
                self._write_state(self.job.result())
            return
        # A segment has at least as many bytes of turns as of its first snapshot.
        is_full = self.size > max(self.limit, 2 * self.base)
        if is_full or self.turns % TURNS_PER_STATE_DIGEST == 0:
            self.turns_since = []
            self.job = self.pool.submit(
                self._encode_state,
                self.turns,
                self.digest,
                turn.transition.state,
                full=is_full,
            )

    def _encode_state(
        self, turns: int, digest: bytes, state: EngineState, *, full: bool
    ) -> _StateRecords:
        state = self._recorded_state(state)
        head = Head(
            config=self.written_config,
            turn=turns,
            digest=digest,
            state=state,
            about=self.about,
        )
        record = (
            records.state_record(turns, state)
            if turns % TURNS_PER_STATE_DIGEST == 0
            else b""
        )
        return _StateRecords(record, records.head_record(head) if full else b"")

    def _recorded_state(self, state: EngineState) -> EngineState:
        """Returns a state as it is written."""
        return redacted_state(self.config, state, self.secret) if self.secret else state

    def _write_state(self, encoded: _StateRecords) -> None:
        """Write the thread's results; begin the next segment if there is a head."""
        self.job = None
        self.pause = FIRST_RETRY_SECONDS  # writing works
        if encoded.record:
            self.size += write_all(self.file, encoded.record)
        if encoded.head:
            run, _, number = self.paths[-1].stem.rpartition("-")
            name = f"{run}-{int(number) + 1:06}{SUFFIX}"
            self._begin_segment(self.paths[-1].with_name(name), encoded.head)

    def _begin_segment(self, path: Path, head: bytes) -> None:
        """Write a file with a head and the turns since, and continue in it."""
        self.job = None
        temporary = path.with_suffix(".part")
        new_file = create(temporary)
        try:
            self.base = len(MAGIC) + len(head)
            self.size = write_all(new_file, b"".join([MAGIC, head, *self.turns_since]))
            temporary.rename(path)
        except OSError:
            os.close(new_file)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self.file)
        self.file = new_file
        self.turns_since = []
        self.paths.append(path)
        if len(self.older) + len(self.paths) > MAX_SEGMENTS:
            oldest = self.older if self.older else self.paths
            oldest.pop(0).unlink(missing_ok=True)

    def close(self, state: EngineState) -> None:
        """Write the last state's digest and the end. Idempotent."""
        self.pool.shutdown()
        if self.failed is None and not self.closed:
            final = b""
            if self.snapshots:
                final = records.state_record(self.turns, self._recorded_state(state))
            try:
                write_all(self.file, final + records.end_record(self.turns))
            except OSError as error:
                self._fail(error, state.time)
        self.closed = True
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _head(
    config: EngineConfig,
    written_config: EngineConfig,
    header: Mapping[str, Any],
    *,
    redact: bool,
) -> bytes:
    """Returns the first record of a journal, with the configuration `written_config`.
    Raises ConfigError for a policy that cannot be written.
    """
    if redact and getattr(config.policy, "weights", None):
        raise ConfigError(
            "--journal-redact: the policy's weights name clients; leave out one"
        )
    try:
        first = records.head_record(Head(config=written_config, about=header))
        dump(config.policy.start())
    except CodecError as error:
        reason = (
            f"the policy {config.policy!r:.80} cannot be written to a journal: {error}"
        )
        raise ConfigError(
            f"{reason}; make it, and its state, of frozen attrs records"
        ) from None
    return first


def _new_run_path(folder: Path, numbers: Iterator[int]) -> Path:
    """Returns the first segment's path, for a run whose name is not used, and was not
    used before with these numbers.
    """
    run = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{run}-{os.getpid()}.{number}" for number in numbers)
    # Check all segments: the first one of a live run may be deleted already.
    name = next(name for name in names if not any(folder.glob(f"{name}-*")))
    return folder / f"{name}-000001{SUFFIX}"
