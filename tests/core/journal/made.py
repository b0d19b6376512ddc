"""Journals of turns that a test makes up, and their bytes."""

import struct
import zlib

from minfer.engine import step
from minfer.journal.format import MAGIC
from minfer.journal.replay import Journal, open_segments
from minfer.records.config import EngineConfig
from minfer.records.messages import Event
from minfer.records.state import Turn, initial


def opened(data: bytes) -> Journal:
    return Journal(open_segments({"run": data}))


def run(config: EngineConfig, *turns: tuple[Event, ...]) -> list[Turn]:
    state, log = initial(config), list[Turn]()
    for events in turns:
        log.append(Turn(len(log), state, events, step(config, state, events)))
        state = log[-1].transition.state
    return log


def record(payload: bytes) -> bytes:
    """A payload as a record, by the format's description."""
    return struct.pack("<II", len(payload), zlib.crc32(payload)) + payload


def record_ends(data: bytes | bytearray) -> list[int]:
    """Where the records of a journal end."""
    at, ends = len(MAGIC), []
    while at < len(data):
        at += 8 + struct.unpack_from("<I", data, at)[0]
        ends.append(at)
    return ends
