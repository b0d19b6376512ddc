"""A journal: every input of the engine and a digest of every decision, as bytes.

Theory. The engine is a function, so its inputs replay it: the configuration, and per turn
the events, of which only time, results and arrivals are nondeterministic. What follows
from the state is not written: a result has no step and no row, since those are in the
first plan in flight; content keys follow from tokens. So a turn over 256 decode rows is
256 tokens and 22 bytes.

Decisions are written as *facts*: how a turn's plans differ from the plan before them, the
samples that ended, and the reasons. A steady decode has none. Facts and the columns of
plans go into a digest that is chained from turn to turn, so a replay that decides
differently is detected in that turn, with the field, the recorded and the new decision.

A file is one segment:

    "minfer journal 1\n", then records: u32 length, u32 CRC-32, payload (little-endian
    throughout)

    H  head, zlib of JSON: format, version, configuration, the number of its first turn,
       the digest before it, the state before it (null: the engine's first) and that
       state's digest, and about: what ran, and where
    T  a turn: u8 flags (1: the first event is the time; 2: the next is the good result of
       the plan first in flight), f64 seconds, 8 bytes of digest, u8 width, u32 count;
       then `count` token ids as `width` planes of their bytes, lowest first: the result's
       by row, then those of prompts; then JSON, or nothing:
         events  all others, records as `minfer.journal.codec` writes them; prompt and
                 keys are counts
         sizes   tokens by row, unless all rows yielded their most
         logprobs  of rows that are beams of a search: [place in the plan,
                 log-probability, rank, likeliest token ids, theirs]
         facts   see `minfer.journal.decisions`
    S  digest of the state after a number of turns, a multiple of 16,384 or all so far:
       u64, 16 bytes
    E  the engine was closed; u64 number of turns

A file may end anywhere: bytes after the last complete record were never acknowledged. An
incomplete record before complete ones is damage: a reader finds the next records by their
first bytes, lengths and checksums, and reports how many turns they are.
Digests of states are those of `minfer.journal.projection`, which leaves out token ids and
keys, so that a journal without token ids has the same. Classes and fields of records have
the names of `minfer.journal.wire_names`.

Format 6 is the first that later versions read: what they add has defaults. Journals of
formats before it are refused, with the last commit that reads them.

This module has the format; `minfer.journal.writing` makes records of turns, and
`minfer.journal.reading` turns of records.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

from minfer.records.config import EngineConfig
from minfer.records.state import EngineState, initial
from minfer.values.checks import MAX_INT64

MAGIC: Final = b"minfer journal 1\n"
# Of heads, facts and digests; the number in MAGIC is that of the framing of records.
FORMAT: Final = 6
# the last that reads older formats, 2 to 5
READS_OLDER: Final = "minfer 0.1.0 (commit 964bfc75)"
TURNS_PER_STATE_DIGEST: Final = 1 << 14  # turns from one digest of the state to the next
START_DIGEST: Final = bytes(8)  # the digest before the first turn
NO_STEP: Final = MAX_INT64 + 1  # a number that no step has

FRAME: Final = struct.Struct("<II")  # length and CRC-32 of the payload behind it
TURN: Final = struct.Struct("<cBd8sBI")  # T: flags, seconds, digest, width, count
MARK: Final = struct.Struct("<cQ")  # S or E: number of turns
HAS_TICK: Final = 1  # flags of a turn
HAS_RESULT: Final = 2


class JournalError(ValueError):
    """A journal cannot be read; the message has the reason and the place."""


@frozen(kw_only=True)
class Head:
    """The first record of a segment."""

    config: EngineConfig
    turn: int = 0  # the number of its first turn
    digest: bytes = START_DIGEST
    state: EngineState | None = None  # None: the engine's first, or it was not read
    # of `state`, unless that is the engine's first
    state_digest: bytes = b""
    format: int = FORMAT
    about: Mapping[str, Any] = field(factory=dict)

    @property
    def begin(self) -> EngineState:
        """The state before the segment's first turn."""
        return initial(self.config) if self.state is None else self.state


def framed(payload: bytes) -> bytes:
    """A payload as a record."""
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload
