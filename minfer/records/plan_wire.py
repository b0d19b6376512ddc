"""Plans as bytes: the form in which rank 0 sends them to the other ranks (`items.py` of
`minfer.effects.execution.ranks`).

Theory. A steady decode is five columns of integers, and most other parts of a plan
(prefill tokens, tables, growth) are integers, too. So a plan is sent as one array of
64-bit words (little-endian), sections with their lengths before them, and after it JSON
for the parts that are not numbers: names, sampling values, tiers. A steady plan has none
of those.

    plan      u32 count of words, the words, then JSON or nothing
    words     step, then each section: its length, its words
    sections  the columns run_ids, rows, starts, num_scheduled_tokens,
              max_sampled_tokens; deferred; then, for fills, drafts, saves, grows, opens
              and copies: one record after the other

The bytes are trusted as far as the other process is: both are of one engine. Bytes that
are not a plan raise WireError.
"""

import json
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Any, Final

import attrs

from minfer.records.plan import (
    Copy,
    Draft,
    Grow,
    Mask,
    NewRow,
    Plan,
    PrefillTokens,
    SampleDeferred,
    SaveState,
)
from minfer.sampling.reference_sampler import RowSampling

_COUNT: Final = struct.Struct("<I")
_WORD: Final = 8  # bytes


class WireError(ValueError):
    """Bytes are not as expected; the message has the reason."""


# --- words ------------------------------------------------------------------------------


def _packed(words: "array[int]", fields: Any) -> bytes:
    """The words and, if there are other parts, JSON."""
    if sys.byteorder == "big":
        words.byteswap()
    encoded = json.dumps(fields, separators=(",", ":")).encode() if fields else b""
    return b"".join((_COUNT.pack(len(words)), words.tobytes(), encoded))


def _unpacked(data: bytes) -> tuple["_WordReader", Any]:
    (count,) = _COUNT.unpack_from(data)
    end = _COUNT.size + count * _WORD
    if len(data) < end:
        raise ValueError(f"{count} words in {len(data)} bytes")
    words = array("q")
    words.frombytes(data[_COUNT.size : end])
    if sys.byteorder == "big":
        words.byteswap()
    return _WordReader(words), json.loads(data[end:]) if len(data) > end else {}


class _WordReader:
    """Words that are read section by section."""

    def __init__(self, words: "array[int]") -> None:
        self.words = words
        self.at = 0

    def one(self) -> int:
        """The next word."""
        self.at += 1
        return self.words[self.at - 1]

    def take(self, count: int) -> tuple[int, ...]:
        """The next words."""
        if not 0 <= count <= len(self.words) - self.at:
            raise ValueError(f"a section of {count} words")
        self.at += count
        return tuple(self.words[self.at - count : self.at])

    def section(self) -> tuple[int, ...]:
        """The next section: its length, its words."""
        return self.take(self.one())


def _section(words: "array[int]", values: tuple[int, ...]) -> None:
    words.append(len(values))
    words.extend(values)


# --- plans ------------------------------------------------------------------------------


def plan_to(plan: Plan) -> bytes:
    """A plan as bytes."""
    words = array("q", (plan.step,))
    for column in (
        plan.run_ids,
        plan.rows,
        plan.starts,
        plan.num_scheduled_tokens,
        plan.max_sampled_tokens,
        plan.deferred,
    ):
        _section(words, column)
    for column_inputs in (plan.fills, plan.drafts):
        words.append(len(column_inputs))
        for inputs in column_inputs:
            words.append(inputs.index)
            _section(words, inputs.tokens)
    words.append(len(plan.saves))
    for save in plan.saves:
        words.extend((save.index, save.inside))
        _section(words, save.pages)
    words.append(len(plan.grows))
    for grow in plan.grows:
        words.extend((grow.row, grow.at, grow.group))
        _section(words, grow.blocks)
    words.append(len(plan.opens))
    for opened in plan.opens:
        words.extend(
            (opened.index, opened.prompt, opened.last_index, opened.adapter_slot)
        )
        _section(words, opened.known)
        words.append(len(opened.tables))
        for table in opened.tables:
            _section(words, table)
    words.append(len(plan.copies))
    for copy in plan.copies:
        words.extend((copy.source, copy.target, copy.count))
    return _packed(words, _beside(plan))


def _beside(plan: Plan) -> dict[str, Any]:
    """The parts of a plan that are not numbers."""
    fields: dict[str, Any] = {}
    if plan.opens:
        fields["opens"] = [
            [opened.name, opened.pooling, _sampling_to(opened.sampling)]
            for opened in plan.opens
        ]
    return fields


def plan_from(data: bytes) -> Plan:
    """The plan encoded in `data`. Raises WireError."""
    try:
        words, fields = _unpacked(data)
        step = words.one()
        run_ids, rows, starts, counts, max_sampled, deferred = (
            words.section() for _ in range(6)
        )
        fills = tuple(
            PrefillTokens(words.one(), words.section()) for _ in range(words.one())
        )
        drafts = tuple(Draft(words.one(), words.section()) for _ in range(words.one()))
        saves = tuple(_save_from(words) for _ in range(words.one()))
        grows = tuple(_grow_from(words) for _ in range(words.one()))
        opens = tuple(_opens_from(words, fields.get("opens", ())))
        copies = tuple(Copy(*words.take(3)) for _ in range(words.one()))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise WireError(f"this is no plan: {error!r}") from error
    return Plan(
        step=step,
        run_ids=run_ids,
        rows=rows,
        starts=starts,
        num_scheduled_tokens=counts,
        max_sampled_tokens=max_sampled,
        fills=fills,
        opens=opens,
        grows=grows,
        copies=copies,
        drafts=drafts,
        deferred=deferred,
        saves=saves,
    )


def _save_from(words: _WordReader) -> SaveState:
    index, inside = words.take(2)
    return SaveState(index, words.section(), inside)


def _grow_from(words: _WordReader) -> Grow:
    row, first, group = words.take(3)
    return Grow(row, first, words.section(), group)


def _opens_from(words: _WordReader, fields: Any) -> Iterator[NewRow]:
    count = words.one()
    if count != len(fields):
        raise ValueError(f"{count} rows are opened, of which {len(fields)} are described")
    for (name, sample), pooling, sampling in fields:
        index, prompt, last, adapter_slot = words.take(4)
        tokens = words.section()
        tables = tuple(words.section() for _ in range(words.one()))
        yield NewRow(
            index=index,
            name=(name, sample),
            known=tokens,
            prompt=prompt,
            last_index=last,
            sampling=_sampling_from(sampling),
            tables=tables,
            pooling=pooling,
            adapter_slot=adapter_slot,
        )


def _sampling_to(sampling: RowSampling) -> dict[str, Any]:
    return attrs.asdict(sampling) | {"stop_ids": sorted(sampling.stop_ids)}


def _sampling_from(fields: dict[str, Any]) -> RowSampling:
    allowed = fields["allowed_token_ids"]
    read = {
        "stop_ids": frozenset(fields["stop_ids"]),
        "logit_bias": tuple((token, float(bias)) for token, bias in fields["logit_bias"]),
        "allowed_token_ids": None if allowed is None else tuple(allowed),
        "bad_words": tuple(map(tuple, fields["bad_words"])),
    }
    return RowSampling(**fields | read)


def deferred_to(message: SampleDeferred) -> bytes:
    """The message to sample the deferred rows, as bytes."""
    masks = [[mask.index, mask.bits.hex(), mask.place] for mask in message.masks]
    return _packed(array("q", (message.step,)), {"masks": masks})


def deferred_from(data: bytes) -> SampleDeferred:
    """The message encoded in `data`. Raises WireError."""
    try:
        words, fields = _unpacked(data)
        masks = tuple(
            Mask(index, bytes.fromhex(bits), place)
            for index, bits, place in fields["masks"]
        )
        return SampleDeferred(words.one(), masks)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise WireError(f"this says nothing about sampling: {error!r}") from error
