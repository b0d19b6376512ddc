"""The changes of logits of `minfer.sampling.logits` before a token is sampled, and counts
of tokens.

Theory. A row's changes are of two kinds. The dense ones look at every token: whether it
is allowed (a bit each), and how often it occurred. `_dense` converts all of a step's
logits to float32 and applies them; for a row without changes it is a copy. The sparse
ones are the row's list of up to `MAX_ENTRIES` *entries*: a token, a number to add to its
logit, the position until which it applies, and whether the entry *follows* the one before
it in the list. An entry that follows applies only if the output ends with the entries
before it: so the last token of a bad word is an entry with -inf, and those before it are
entries that add nothing. `_sparse` computes the logits of a list's tokens again, from the
model's, first for entries that add a number, then for those with -inf: of several entries
of a token at most one adds a number.

After sampling `_count` counts a row's token, and stores for each entry whether the output
now ends with it and the entries that it follows (Baeza-Yates and Gonnet 1992, Shift-And).
There are two such flags of each entry, for even and odd positions: one is read while the
other is written. All this state is on the device, so steps run ahead of the host, and
graphs replay.

Arithmetic, for 152k bfloat16 logits, 4.2 TB/s: a row moves 2 bytes a token in, 4 out, and
4 of counts if it is penalized: 1.5 MB, 256 rows 0.1 ms; at batch 1 launches dominate.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.pdl import early, follow
from minfer.kernels.row_state import Penalties

MAX_ENTRIES: Final = 1024  # entries of a row
IN_PROMPT: Final = 1 << 30  # of a token's count: it is in the prompt
CHUNK: Final = 2048  # logits of a program
BLOCK: Final = 256  # entries at once
WARPS: Final = 4
# The words of a row in `ShapingState.header`.
HEADER_WORDS: Final = 4  # words
ENTRIES: Final = 0  # the number of entries
RESTRICTED: Final = 1  # whether only some tokens are allowed
PENALIZED: Final = 2  # whether tokens are counted


class ShapingState(NamedTuple):
    """The device's state of its rows' changes; see `ShapingState.make` for shapes."""

    header: Tensor
    seen: Tensor  # how often a token is in the output, and `IN_PROMPT`
    allowed: Tensor  # bits, the lowest first
    tokens: Tensor  # of entries
    values: Tensor  # to be added
    until: Tensor  # the position from which on they are not added
    follows: Tensor  # whether the entry before must have matched
    # whether the output ends with it, for samples at even and odd positions
    matched: Tensor

    @classmethod
    def make(cls, rows: int, vocab: int, device: torch.device) -> "ShapingState":
        """The state for device rows without any changes."""

        def words(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int32, device=device)

        return cls(
            header=words(HEADER_WORDS),
            seen=words(vocab),
            allowed=words(triton.cdiv(vocab, 32)),
            tokens=words(MAX_ENTRIES),
            values=words(MAX_ENTRIES).view(torch.float32),
            until=words(MAX_ENTRIES),
            follows=words(MAX_ENTRIES),
            matched=words(2, MAX_ENTRIES),
        )


_MAX_ENTRIES: tl.constexpr = tl.constexpr(MAX_ENTRIES)
_HEADER_WORDS: tl.constexpr = tl.constexpr(HEADER_WORDS)
_ENTRIES: tl.constexpr = tl.constexpr(ENTRIES)
_RESTRICTED: tl.constexpr = tl.constexpr(RESTRICTED)
_PENALIZED: tl.constexpr = tl.constexpr(PENALIZED)
_COUNT: tl.constexpr = tl.constexpr(IN_PROMPT - 1)
_NEVER: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _is_allowed(allowed, owner, vocab, ids, mask):
    words = (vocab + 31) // 32
    bits = tl.load(allowed + owner * words + ids // 32, mask=mask, other=0)
    return ((bits >> (ids % 32)) & 1) != 0


@triton.jit
def _penalized(x, token_counts, repetitions, frequencies, presences, owner):
    count = token_counts & _COUNT
    factor = tl.load(repetitions + owner)
    y = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    y = y - tl.load(frequencies + owner) * count.to(tl.float32)
    y = y - tl.where(count > 0, tl.load(presences + owner), 0.0)
    return tl.where(token_counts != 0, y, x)


@triton.jit
def _dense(
    logits,
    stride,
    rows,
    repetitions,
    frequencies,
    presences,
    header,
    token_counts,
    allowed,
    out,
    vocab,
    chunk: tl.constexpr,
):
    """Grid [chunks, draws]: out [draws, vocab] without the entries of lists."""
    follow()
    row = tl.program_id(1).to(tl.int64)
    owner = tl.load(rows + row).to(tl.int64)
    ids = tl.program_id(0) * chunk + tl.arange(0, chunk)
    mask = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=mask, other=0.0).to(tl.float32)
    if tl.load(header + owner * _HEADER_WORDS + _RESTRICTED) != 0:
        x = tl.where(_is_allowed(allowed, owner, vocab, ids, mask), x, _NEVER)
    if tl.load(header + owner * _HEADER_WORDS + _PENALIZED) != 0:
        counts = tl.load(token_counts + owner * vocab + ids, mask=mask, other=0)
        x = _penalized(x, counts, repetitions, frequencies, presences, owner)
    tl.store(out + row * vocab + ids, x, mask=mask)


@triton.jit
def _matches(follows, matched, owner, position, entry, mask):
    """Whether the entries before have matched before sampling at `position`."""
    after = tl.load(follows + owner * _MAX_ENTRIES + entry, mask=mask, other=0) != 0
    before = matched + (owner * 2 + position % 2) * _MAX_ENTRIES + entry - 1
    return (after == 0) | (tl.load(before, mask=mask & after, other=0) != 0)


@triton.jit
def _sparse(
    logits,
    stride,
    rows,
    positions,
    repetitions,
    frequencies,
    presences,
    header,
    token_counts,
    allowed,
    tokens,
    values,
    ends,
    follows,
    matched,
    out,
    vocab,
    block: tl.constexpr,
):
    """Grid [draws]: apply the entries of lists to `out`."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(rows + row).to(tl.int64)
    count = tl.load(header + owner * _HEADER_WORDS + _ENTRIES)
    restricted = tl.load(header + owner * _HEADER_WORDS + _RESTRICTED) != 0
    penalized = tl.load(header + owner * _HEADER_WORDS + _PENALIZED) != 0
    position = tl.load(positions + row)
    for start in range(0, count, block):
        entry = start + tl.arange(0, block)
        mask = entry < count
        value = tl.load(values + owner * _MAX_ENTRIES + entry, mask=mask, other=0.0)
        added = mask & (value != 0) & (value > _NEVER)
        token = tl.load(tokens + owner * _MAX_ENTRIES + entry, mask=added, other=0)
        x = tl.load(logits + row * stride + token, mask=added, other=0.0).to(tl.float32)
        if restricted:
            x = tl.where(_is_allowed(allowed, owner, vocab, token, added), x, _NEVER)
        x += value
        if penalized:
            counts = tl.load(token_counts + owner * vocab + token, mask=added, other=0)
            x = _penalized(x, counts, repetitions, frequencies, presences, owner)
        tl.store(out + row * vocab + token, x, mask=added)
    tl.debug_barrier()  # a token with a bias may be hidden, too
    for start in range(0, count, block):
        entry = start + tl.arange(0, block)
        mask = entry < count
        value = tl.load(values + owner * _MAX_ENTRIES + entry, mask=mask, other=0.0)
        hides = mask & (value == _NEVER)
        hides &= position < tl.load(
            ends + owner * _MAX_ENTRIES + entry, mask=mask, other=0
        )
        hides &= _matches(follows, matched, owner, position, entry, mask)
        token = tl.load(tokens + owner * _MAX_ENTRIES + entry, mask=hides, other=0)
        tl.store(out + row * vocab + token, _NEVER, mask=hides)


@triton.jit
def _count(
    rows,
    positions,
    drawn,
    broken,
    header,
    token_counts,
    tokens,
    follows,
    matched,
    vocab,
    block: tl.constexpr,
):
    """Grid [draws]: count a row's token, and store which entries the output now ends
    with.
    """
    follow()
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(rows + row).to(tl.int64)
    token = tl.load(drawn + row)
    if tl.load(header + owner * _HEADER_WORDS + _PENALIZED) != 0:
        count_pointer = token_counts + owner * vocab + token
        tl.store(count_pointer, tl.load(count_pointer) + 1 - tl.load(broken + row))
    position = tl.load(positions + row)
    for start in range(0, tl.load(header + owner * _HEADER_WORDS + _ENTRIES), block):
        entry = start + tl.arange(0, block)
        mask = entry < tl.load(header + owner * _HEADER_WORDS + _ENTRIES)
        hit = tl.load(tokens + owner * _MAX_ENTRIES + entry, mask=mask, other=-1) == token
        hit &= _matches(follows, matched, owner, position, entry, mask)
        next_ = matched + (owner * 2 + (position + 1) % 2) * _MAX_ENTRIES + entry
        tl.store(next_, hit.to(tl.int32), mask=mask)


def shape(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    penalties: Penalties,
    state: ShapingState,
) -> Tensor:
    """Logits [draws, vocab] with all changes, for sampling tokens at `positions` [draws],
    in float32.

    Draw i is of device row rows[i], int32; rows of logits are contiguous.
    """
    if not on_triton(logits):
        return reference(logits, rows, positions, penalties, state)
    draws, vocab = logits.shape
    out = logits.new_empty(draws, vocab, dtype=torch.float32)
    arguments = {
        "logits": logits,
        "stride": logits.stride(0),
        "rows": rows,
        "repetitions": penalties.repetition,
        "frequencies": penalties.frequency,
        "presences": penalties.presence,
        "header": state.header,
        "token_counts": state.seen,
        "allowed": state.allowed,
        "out": out,
        "vocab": vocab,
        "num_warps": WARPS,
        "enable_fp_fusion": False,  # every operation is rounded
        "launch_pdl": early(logits),
    }
    _dense[triton.cdiv(vocab, CHUNK), draws](**arguments, chunk=CHUNK)
    _sparse[draws,](
        **arguments,
        positions=positions,
        tokens=state.tokens,
        values=state.values,
        ends=state.until,
        follows=state.follows,
        matched=state.matched,
        block=BLOCK,
    )
    return out


def count(
    rows: Tensor, positions: Tensor, drawn: Tensor, broken: Tensor, state: ShapingState
) -> None:
    """Count the tokens `drawn` at `positions` as output of rows `rows`, except for broken
    rows (1); all are [draws], each row occurs at most once, except for rows without
    changes.
    """
    if not on_triton(rows):
        reference_count(rows, positions, drawn, broken, state)
        return
    _count[len(rows),](
        rows=rows,
        positions=positions,
        drawn=drawn,
        broken=broken,
        header=state.header,
        token_counts=state.seen,
        tokens=state.tokens,
        follows=state.follows,
        matched=state.matched,
        vocab=state.seen.shape[1],
        block=BLOCK,
        num_warps=WARPS,
        launch_pdl=early(rows),
    )


def reference(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    penalties: Penalties,
    state: ShapingState,
) -> Tensor:
    """`shape` in plain torch."""
    owner, vocab = rows.long(), logits.shape[1]
    header = state.header[owner]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (state.allowed[owner][:, :, None] >> places & 1).flatten(1)[:, :vocab]
    x = logits.float()
    x = x.masked_fill((header[:, RESTRICTED, None] != 0) & (bits == 0), -torch.inf)
    is_entry = torch.arange(MAX_ENTRIES, device=logits.device) < header[:, ENTRIES, None]
    values, tokens = state.values[owner].where(is_entry, 0), state.tokens[owner].long()
    hides = is_entry & (values == -torch.inf) & _matched(state, owner, positions)
    hides &= positions[:, None] < state.until[owner]
    added = (values != 0) & (values > -torch.inf)
    x = x.scatter_add(1, tokens.where(added, 0), values.where(added, 0))
    token_counts = state.seen[owner] * (header[:, PENALIZED, None] != 0)
    times = token_counts & (IN_PROMPT - 1)
    factor = penalties.repetition[owner, None]
    y = torch.where(x > 0, x / factor, x * factor)
    y = y - penalties.frequency[owner, None] * times
    y = y - penalties.presence[owner, None] * (times > 0)
    hidden = x.new_zeros(len(x), vocab + 1)
    hidden.scatter_(1, tokens.where(hides, vocab), 1)
    return torch.where(token_counts != 0, y, x).masked_fill(
        hidden[:, :vocab] != 0, -torch.inf
    )


def reference_count(
    rows: Tensor, positions: Tensor, drawn: Tensor, broken: Tensor, state: ShapingState
) -> None:
    """`count` in plain torch."""
    owner = rows.long()
    counted = (state.header[owner, PENALIZED] != 0) & (broken == 0)
    state.seen.index_put_((owner, drawn.long()), counted.int(), accumulate=True)
    hit = (state.tokens[owner] == drawn[:, None]) & _matched(state, owner, positions)
    state.matched[owner, (positions.long() + 1) % 2] = hit.int()


def _matched(state: ShapingState, owner: Tensor, positions: Tensor) -> Tensor:
    """Whether the entries before have matched before sampling at `positions`."""
    before = state.matched[owner, positions.long() % 2].roll(1, 1) != 0
    return before | (state.follows[owner] == 0)
