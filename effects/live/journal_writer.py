"""The journal of an engine that runs, written turn by turn beside it.

A run writes `DIR/RUN-000001.journal` and on; each is a segment that begins with a
snapshot, so old ones can go: what is kept is bounded. A turn is written before anybody
hears of it, with one system call; a process that is killed loses at most the turn it was
writing. States are values, so their digests and snapshots are made by a thread while the
engine goes on: until a new segment's snapshot is there, turns go to the old one, and they
are repeated in the new one.
"""

import errno
import logging
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Final

from attrs import frozen

import minfer
from minfer.config import ConfigError, EngineConfig
from minfer.effects.live.journal_files import SUFFIX, create, write_all
from minfer.runs import journal_writing as records
from minfer.runs.codec import CodecError, dump
from minfer.runs.decisions import chained, compact, facts
from minfer.runs.journal import EVERY, MAGIC, START, Head, JournalError
from minfer.runs.redact import redacted, redacted_config
from minfer.state import EngineState, Turn

SEGMENTS: Final = 16  # that a run keeps: a segment is that share of the size it may have
_log = logging.getLogger("minfer.journal")


@frozen
class _Mark:
    """What the thread makes of a state: the record of its digest and a head, if it is
    time.
    """

    record: bytes
    head: bytes


class Writer:
    """Records the turns of one engine; give it to the driver as `record`.

    Raises ConfigError if the folder cannot be written, or the policy is not made of
    records. A disk that fails later ends the journal, not the engine: that is logged, and
    `failed` says why. `redact`: write no token ids (`minfer.runs.redact`); that is one
    segment, since snapshots have them.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        about: Mapping[str, Any],
        *,
        size: int = 1 << 30,
        redact: bool = False,
    ) -> None:
        self.config = config
        self.about = {"minfer": minfer.__version__, **about}
        self.secret = secrets.token_bytes(32) if redact else b""
        self.limit = max(1, size // SEGMENTS)  # bytes of a segment
        self.digest = START
        self.turns = 0
        self.pool = ThreadPoolExecutor(1, "minfer-journal")
        self.job: Future[_Mark] | None = None
        self.since: list[bytes] = []  # turns since the state that the job looks at
        self.failed: Exception | None = None
        first = _head(config, self.about, redact=redact)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.paths = [_fresh(folder)]
            self.file = create(self.paths[0])
            self.size = self.base = write_all(self.file, MAGIC + first)
        except OSError as error:
            what = f"--journal {folder}: {error.strerror or error}"
            raise ConfigError(f"{what}; name a folder that can be written") from None

    def __call__(self, turn: Turn) -> None:
        """Write a turn; it is with the operating system when this returns."""
        if self.failed is not None:
            return
        try:
            self._turn(turn)
        except (OSError, CodecError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed = error
        _log.warning(
            "the journal ends after turn %d of %s: %s; the engine goes on without it",
            self.turns,
            self.paths[-1],
            error,
        )

    def _turn(self, turn: Turn) -> None:
        if self.secret and self.size > SEGMENTS * self.limit:
            raise OSError(errno.EFBIG, "it is as large as --journal-size allows")
        told = compact(facts(turn.before, turn.transition))
        self.digest = chained(self.digest, turn.transition, told)
        if self.secret:
            events = redacted(self.config, turn.before, turn.events, self.secret)
            turn = Turn(turn.number, turn.before, events, turn.transition)
        record = records.turn_record(turn, told, self.digest)
        self.size += write_all(self.file, record)
        self.turns += 1
        if self.secret:  # a snapshot would hold the tokens
            return
        if self.job is not None:
            self.since.append(record)
            if self.job.done():
                self._marked(self.job.result())
            return
        # As much is recorded as the snapshot took that a segment begins with, at least.
        full = self.size > max(self.limit, 2 * self.base)
        if full or self.turns % EVERY == 0:
            self.since = []
            self.job = self.pool.submit(
                self._mark, self.turns, self.digest, turn.transition.state, full=full
            )

    def _mark(
        self, turns: int, digest: bytes, state: EngineState, *, full: bool
    ) -> _Mark:
        head = Head(
            config=self.config, turn=turns, digest=digest, state=state, about=self.about
        )
        record = records.state_record(turns, state) if turns % EVERY == 0 else b""
        return _Mark(record, records.head_record(head) if full else b"")

    def _marked(self, mark: _Mark) -> None:
        """Write what the thread made; begin the next segment if it is a head."""
        self.job = None
        if mark.record:
            self.size += write_all(self.file, mark.record)
        if not mark.head:
            return
        run, _, number = self.paths[-1].stem.rpartition("-")
        path = self.paths[-1].with_name(f"{run}-{int(number) + 1:06}{SUFFIX}")
        part = path.with_suffix(".part")
        new = create(part)
        try:
            self.base = len(MAGIC) + len(mark.head)
            self.size = write_all(new, b"".join([MAGIC, mark.head, *self.since]))
            part.rename(path)
        except OSError:
            os.close(new)
            part.unlink(missing_ok=True)
            raise
        os.close(self.file)
        self.file = new
        self.since = []
        self.paths.append(path)
        if len(self.paths) > SEGMENTS:
            self.paths.pop(0).unlink(missing_ok=True)

    def close(self, state: EngineState) -> None:
        """Write the last state's digest and the end. Idempotent."""
        self.pool.shutdown()
        if self.failed is None:
            final = b"" if self.secret else records.state_record(self.turns, state)
            try:
                write_all(self.file, final + records.end_record(self.turns))
                self.failed = JournalError("it was closed")
            except OSError as error:
                self._fail(error)
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _head(config: EngineConfig, about: Mapping[str, Any], *, redact: bool) -> bytes:
    """The record that a journal begins with. Raises ConfigError for a policy that cannot
    be written.
    """
    if redact and getattr(config.policy, "weights", None):
        raise ConfigError(
            "--journal-redact: the policy's weights name clients; leave out one"
        )
    try:
        shown = redacted_config(config) if redact else config
        first = records.head_record(Head(config=shown, about=about))
        dump(config.policy.start())
    except CodecError as error:
        what = f"the policy {config.policy!r:.80} cannot be written to a journal: {error}"
        raise ConfigError(
            f"{what}; make it, and its state, of frozen attrs records"
        ) from None
    return first


def _fresh(folder: Path) -> Path:
    """The first segment of a run whose name nobody has."""
    run = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{run}-{os.getpid()}.{n}" for n in count())
    # The first segment of a run that goes on may be gone already.
    name = next(name for name in names if not any(folder.glob(f"{name}-*")))
    return folder / f"{name}-000001{SUFFIX}"
