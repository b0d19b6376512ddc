"""What is read is what was written; damage is named with its place."""

import json
import struct
import zlib
from bisect import bisect
from collections.abc import Callable
from typing import Any

import pytest

from minfer.journal.format import FORMAT, MAGIC, START_DIGEST, JournalError
from minfer.journal.reading import payloads, read_head
from minfer.journal.replay import open_segments
from minfer.journal.writing import encode_journal
from minfer.records.config import EngineConfig
from minfer.records.messages import Submit
from tests.circles import claimed
from tests.core.journal.made import opened, record, record_ends
from tests.core.recorded import recorded


@pytest.mark.long
@pytest.mark.parametrize("every", [97, *claimed([1])])
def test_a_torn_tail_loses_only_the_last_record(every: int) -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    starts = [0, *record_ends(data)]
    ends = {
        at + near for at in starts[2:-1] for near in (-1, 0, 1) if at + near >= starts[2]
    }
    for cut in sorted({*range(starts[2], len(data), every), *ends}):
        journal = opened(data[:cut])
        whole = sum(end <= cut for end in starts[2:])  # records after the head
        found = list(journal.turns())
        assert found == turns[: min(whole, len(turns))]
        assert bool(journal.torn) == (cut not in starts)
        assert not journal.closed


def test_requests_are_known_without_a_replay() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    events = [event for turn in turns for event in turn.events]
    names = [event.request.id for event in events if isinstance(event, Submit)]
    assert len(names) > 3
    assert opened(data).request_ids() == names
    late = encode_journal(config, turns[9:])
    found = opened(late).request_ids()
    assert set(found[: len(turns[9].before.requests)]) == set(turns[9].before.requests)
    assert set(found) <= set(names)
    broken = bytearray(data)
    broken[record_ends(data)[4] + 12] ^= 1
    assert (
        opened(bytes(broken)).request_ids()
        == names[: len(opened(data[: record_ends(data)[4]]).request_ids())]
    )


def test_a_last_record_that_was_not_written_whole_is_torn() -> None:
    config, turns = recorded(8, 20)
    data = bytearray(encode_journal(config, turns))
    del data[record_ends(data)[len(turns)] :]  # the engine did not get to its end
    data[-1] ^= 1
    journal = opened(bytes(data))
    assert list(journal.turns()) == turns[:-1]
    assert "cut off" in journal.torn[0]


def test_damage_is_named_with_its_place() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = record_ends(data)
    broken = bytearray(data)
    broken[ends[4] + 12] ^= 1
    journal = opened(bytes(broken))
    with pytest.raises(JournalError, match=f"run: record 5 at byte {ends[4]} is damaged"):
        list(journal.turns())
    assert journal.count == 4
    assert len(list(journal.turns(until=4))) == 4


def test_turns_that_were_taken_away_are_missed() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = record_ends(data)
    for kept in (3, len(turns) - 1):  # then the digest of the last state, and the end
        with pytest.raises(
            JournalError, match=rf"after turn {kept - 1} .* turns are missing"
        ):
            list(opened(data[: ends[kept]] + data[ends[-3] :]).turns())
    with pytest.raises(JournalError, match="turns are missing"):
        list(opened(data[: ends[3]] + data[ends[-2] :]).turns())  # the end alone
    for odd in (b"?", b"Tx"):
        odd_record = record(odd)
        with pytest.raises(JournalError, match=r"damaged|no turn"):
            list(opened(data[: ends[3]] + odd_record + data[ends[3] :]).turns())


@pytest.mark.parametrize("whole", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("every", [397, *claimed([29, 1])])
def test_damage_of_any_byte_is_named_with_the_turns_behind_it(
    every: int, whole: bool
) -> None:
    """A damaged length, too, hides no record behind it."""
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    data = data if whole else data[: record_ends(data)[len(turns)]]
    starts = [len(MAGIC), *record_ends(data)]
    last, kinds = len(starts) - 2, set[str]()
    # Each place of a record that says how it is read, and some of all others.
    framing = [at + near for at in starts[4:6] + starts[-3:-1] for near in range(30)]
    for at in sorted({*range(starts[0], len(data), every), *framing}):
        if at >= len(data):
            break
        number = bisect(starts, at) - 1
        behind = len([one for one in range(number + 1, last + 1) if one <= len(turns)])
        for change in (1, 0xFF) if every == 1 else (1 << at % 8,):
            broken = bytearray(data)
            broken[at] ^= change
            torn, found = list[str](), list[bytes]()
            try:
                found += payloads(bytes(broken), "run", torn=torn)
            except JournalError as error:
                text = str(error)
                place = f"run: record {number} at byte {starts[number]} is damaged: its "
                assert text.startswith(place)
                tail = f"; {behind} whole turns follow it, from byte {starts[number + 1]}"
                assert (tail in text) == (number < last)
                kinds.add(text[len(place) :].partition(";")[0])
            else:
                assert torn
                assert (number, len(found)) == (last, last)
                kinds.add("torn")
    assert kinds == {"torn", "length is wrong", "checksum differs"}


def test_damage_before_other_damage_and_a_torn_tail() -> None:
    """The turns behind it that are whole are counted, and no others."""
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = record_ends(data)
    broken = bytearray(data[: ends[10] + 40])
    broken[ends[4] + 3] ^= 0x40
    broken[ends[6]] ^= 2
    broken[ends[7] + 20] ^= 2
    with pytest.raises(
        JournalError,
        match=f"record 5 at byte {ends[4]} is damaged: its length is wrong; 3 whole "
        f"turns follow it, from byte {ends[5]} on; turns before it are whole: "
        "minfer replay --until 4",
    ):
        list(opened(bytes(broken)).turns())


def test_a_damaged_head_of_a_last_segment_is_no_torn_one() -> None:
    config, turns = recorded(8, 20)
    first, second = encode_journal(config, turns[:9]), encode_journal(config, turns[9:])
    broken = bytearray(second)
    broken[len(MAGIC) + 2] ^= 1
    with pytest.raises(JournalError, match=f"record 0 .*; {len(turns) - 9} whole turns"):
        open_segments({"run": first, "run-1": bytes(broken)})


def test_zeros_are_a_torn_tail_only_at_the_end() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    cut = record_ends(data)[6]
    journal = opened(data[:cut] + bytes(4096))
    assert list(journal.turns()) == turns[:6]
    assert journal.torn
    with pytest.raises(JournalError, match=r"record 7 .* is damaged"):
        list(opened(data[:cut] + bytes(800) + data[cut + 800 :]).turns())


def test_reordered_records_diverge() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = record_ends(data)
    parts = [data[a:b] for a, b in zip([len(MAGIC), *ends], ends, strict=False)]
    parts[5], parts[6] = parts[6], parts[5]
    with pytest.raises(JournalError, match="turn 4"):
        list(opened(MAGIC + b"".join(parts)).turns())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "this file is empty"),
        (b"PK\x03\x04 something", "not a journal"),
        (b"minfer journal 2\n", "newer format"),
        (MAGIC, "no head"),
        (MAGIC + b"\x05\0\0\0", "no head"),
        (
            MAGIC + record(b"Hxx"),
            "head cannot be read",
        ),
    ],
)
def test_what_is_no_journal_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(JournalError, match=why):
        opened(data)


def test_a_head_of_another_format_or_with_unknown_records_is_refused() -> None:
    def head(text: bytes) -> bytes:
        payload = b"H" + zlib.compress(text)
        return MAGIC + record(payload)

    newer, older = b'{"format": 9}', b'{"format": 1, "about": {"minfer": "0.2.0"}}'
    with pytest.raises(
        JournalError, match=r"format 9, .* reads format 6; .* the minfer that wrote it"
    ):
        opened(head(newer))
    with pytest.raises(
        JournalError, match=r"format 1, .* reads format 6; replay it with minfer 0\.1\.0"
    ):
        opened(head(older))
    with pytest.raises(JournalError, match="policy of your own, name its module"):
        opened(head(b'{"format": 6, "config": {"is": "Mine"}, "turn": 0, "about": {}}'))
    with pytest.raises(JournalError, match="cannot be read: a part of it has another"):
        opened(
            head(b'{"format":6,"config":3,"turn":0,"digest":"","about":{},"state":null}')
        )
    with pytest.raises(JournalError, match="num_blocks"):
        opened(
            head(
                b'{"format":6,"config":{"is":"EngineConfig","num_blocks":-1},"turn":0,"about":{}}'
            )
        )


def test_a_turn_that_is_not_of_its_state_is_refused() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    body = list(payloads(data, "run"))
    later = next(p for p in body[2:] if p[1] == 3)  # a result, when nothing is in flight
    framed = record(later)
    head = data[: record_ends(data)[0]]
    with pytest.raises(JournalError, match="turn 0: it is no turn of this state"):
        list(opened(head + framed).turns())


def test_a_result_that_lacks_tokens_is_refused() -> None:
    """So it is where a turn before it is missing."""
    config, turns = recorded(12, 20)
    data = encode_journal(config, turns)
    at = next(
        i
        for i, turn in enumerate(payloads(data, "run"))
        if turn[:1] == b"T" and turn[1] & 2
    )
    turn = list(payloads(data, "run"))[at]
    bare = turn[:18] + struct.pack(
        "<BI", 0, 0
    )  # no token ids, and all rows yielded their most
    framed = record(bare)
    with pytest.raises(JournalError, match=f"turn {at - 1}: it is no turn of this state"):
        list(opened(data[: record_ends(data)[at - 1]] + framed).turns())


def test_a_turn_that_pretends_to_have_tokens_is_refused() -> None:
    data = encode_journal(EngineConfig(num_blocks=4), [])
    # ids of no bytes each
    turn = struct.pack("<cBd8sBI", b"T", 0, 0.0, START_DIGEST, 0, 2**31)
    framed = record(turn)
    # To read them would take minutes.
    with pytest.raises(
        JournalError, match=r"turn 0: .* no turn of this state.*2147483648"
    ):
        list(opened(data[: record_ends(data)[0]] + framed).turns())


# --- snapshots of records as they were --------------------------------------------------

LATER = 30  # a turn in mid-run: a journal that begins there begins with a snapshot


def later(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A journal that begins in mid-run, whose head is changed by hand."""
    config, turns = recorded(3)
    data = encode_journal(config, turns[LATER:], {"minfer": "0.2.0"})
    head, *rest = payloads(data, "run")
    parsed = json.loads(zlib.decompress(head[1:]))
    change(parsed)
    changed = b"H" + zlib.compress(json.dumps(parsed).encode())
    return MAGIC + b"".join(map(record, (changed, *rest)))


def renamed(reported: dict[str, Any]) -> None:
    """The sequences that run were columns of other names."""
    run = reported["state"]["running"]
    run["planned"] = run.pop("scheduled")


def unknown(reported: dict[str, Any]) -> None:
    """The pool was a record that is gone."""
    reported["state"]["blocks"]["is"] = "Heap"


def reshaped(reported: dict[str, Any]) -> None:
    """A sequence was no record, which no field's name gives away."""
    reported["state"]["running"]["seqs"][0] = ["r1", 0]


def emptied(reported: dict[str, Any]) -> None:
    reported["state"] = [1, 2]


def counted_otherwise(reported: dict[str, Any]) -> None:
    """A number meant something else."""
    reported["state"]["next_run_id"] += 1


@pytest.mark.parametrize("change", [renamed, unknown, reshaped, emptied])
def test_a_snapshot_of_other_records_is_refused_with_what_to_do(
    change: Callable[[dict[str, Any]], None],
) -> None:
    with pytest.raises(JournalError) as caught:
        opened(later(change))
    text = str(caught.value)
    assert text.startswith(
        f"run: it begins with a snapshot of the state before turn {LATER} (format "
        f"{FORMAT}), of records that are not those of this minfer: "
    )
    assert text.endswith(
        "if the segment with turn 0 is still there, begin with that, else replay it with "
        "minfer 0.2.0"
    )


def test_a_snapshot_that_reads_as_another_state_is_refused() -> None:
    with pytest.raises(
        JournalError, match=r"it reads as another state: [0-9a-f]{32}, not"
    ):
        opened(later(counted_otherwise))


def test_a_snapshot_names_the_record_that_does_not_fit() -> None:
    with pytest.raises(JournalError, match=r"Running: .*unexpected keyword .*'planned'"):
        opened(later(renamed))
    with pytest.raises(JournalError, match="there is no record 'Heap' here"):
        opened(later(unknown))


def test_a_snapshot_is_read_unless_a_caller_needs_none() -> None:
    data = later(renamed)
    assert read_head(data, "run", with_state=False).turn == LATER
    with pytest.raises(JournalError, match="of records that are not those"):
        read_head(data, "run")


def headed(text: bytes) -> bytes:
    """A journal with this text as its head."""
    return MAGIC + record(b"H" + zlib.compress(text, 9))


@pytest.mark.long
def test_a_head_that_is_far_larger_than_its_bytes_is_refused() -> None:
    data = headed(b" " * (1 << 26) + b"{}")
    assert len(data) < 200_000
    with pytest.raises(JournalError, match=r"run: its head .* compressed to \d{5}$"):
        opened(data)
    cut = zlib.compress(b"{}" * 100)[:-9]
    with pytest.raises(JournalError, match=r"run: its head .* is cut off"):
        opened(MAGIC + record(b"H" + cut))


def test_sizes_that_would_fill_memory_are_refused() -> None:
    """Of device rows, and of token ids that take no bytes."""
    config, turns = recorded(8, 3)
    data = encode_journal(config, turns)
    head, first = payloads(data, "run"), record_ends(data)[0]
    parsed = json.loads(zlib.decompress(next(head)[1:]))
    rows = {"max_num_seqs": 10**12, "max_num_batched_tokens": 10**12}
    text = json.dumps(parsed | {"config": parsed["config"] | rows}).encode()
    with pytest.raises(
        JournalError, match=r"run: its head .*max_num_seqs must be a whole"
    ):
        opened(headed(text))
    turn = struct.pack("<cBd8sBI", b"T", 0, 0.0, bytes(8), 0, 1 << 25)
    journal = opened(data[:first] + record(turn))
    with pytest.raises(JournalError, match=r"turn 0: .*33554432 token ids"):
        list(journal.turns())
