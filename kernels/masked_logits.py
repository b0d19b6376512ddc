"""Logits of rows under a grammar: stored, and masked for the tokens that the host does
not allow.

Theory. Rows under a grammar are sampled when the host has made their masks, a bit for
each token: from logits that the forward stored in a buffer by device row. Nothing is
copied for other rows, so a step with such rows takes one launch more than one without.
The masks are applied between that buffer and the sampler: logits that are not allowed
become -inf, and are not read. A mask of all ones is a copy.

Arithmetic, for 152k bfloat16 logits, 4.2 TB/s: 0.3 MB a row out, and as much in if most
tokens are allowed; if few are, as within a JSON object, almost nothing. 128 rows: 10 to
20 us, and as much to store them.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.pdl import early, follow

CHUNK: Final = 4096  # logits of a program
STORE_CHUNK: Final = 16384  # of a program that stores them; most have nothing to do
WARPS: Final = 4
STORE_WARPS: Final = 8  # warps of a program that stores
BITS: Final = 32  # tokens of a word of a mask

_BITS: tl.constexpr = tl.constexpr(BITS)
_NEVER: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _mask_logits(stored_logits, rows, masks, out, vocab, words, chunk: tl.constexpr):
    """Grid [chunks, draws]: out [draws, vocab]."""
    follow()
    draw = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + draw).to(tl.int64)
    ids = tl.program_id(0) * chunk + tl.arange(0, chunk)
    in_vocab = ids < vocab
    mask = tl.load(masks + draw * words + ids // _BITS, mask=in_vocab, other=0)
    allowed = in_vocab & (((mask >> (ids % _BITS)) & 1) != 0)
    x = tl.load(stored_logits + row * vocab + ids, mask=allowed, other=_NEVER)
    tl.store(out + draw * vocab + ids, x, mask=in_vocab)


@triton.jit(do_not_specialize=["scratch"])
def _store_logits(logits, rows, out, scratch, vocab, chunk: tl.constexpr):
    """Grid [chunks, draws]: logits [draws, vocab] to out."""
    follow()
    line = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + line)
    ids = tl.program_id(0) * chunk + tl.arange(0, chunk)
    out_row = row.to(tl.int64)
    if row != scratch:
        x = tl.load(logits + line * vocab + ids, mask=ids < vocab, other=0.0)
        tl.store(out + out_row * vocab + ids, x, mask=ids < vocab)


def store_logits(logits: Tensor, rows: Tensor, out: Tensor, scratch: int) -> None:
    """Store logits [draws, vocab] of rows `rows` [draws], int32, in those lines of `out`;
    nothing is stored for the `scratch` row. All are contiguous, and of one dtype.
    """
    if not on_triton(logits):
        plain.store_logits(logits, rows, out, scratch)
        return
    draws, vocab = logits.shape
    _store_logits[triton.cdiv(vocab, STORE_CHUNK), draws](
        logits=logits,
        rows=rows,
        out=out,
        scratch=scratch,
        vocab=vocab,
        chunk=STORE_CHUNK,
        num_warps=STORE_WARPS,
        launch_pdl=early(logits),
    )


def mask_logits(stored_logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """The logits `stored_logits` [device rows, vocab] of rows `rows` [draws], int32, with
    -inf for tokens whose bit in `masks` [draws, words], int32, is 0; the lowest bit of a
    word is its first token's. Both are contiguous.
    """
    if not on_triton(stored_logits):
        return plain.mask_logits(stored_logits, rows, masks)
    draws, vocab = len(rows), stored_logits.shape[1]
    out = stored_logits.new_empty(draws, vocab)
    _mask_logits[triton.cdiv(vocab, CHUNK), draws](
        stored_logits=stored_logits,
        rows=rows,
        masks=masks,
        out=out,
        vocab=vocab,
        words=masks.shape[1],
        chunk=CHUNK,
        num_warps=WARPS,
        launch_pdl=early(out),
    )
    return out
