"""Sequences in a paged cache of latents, and attention over the keys and values that
these stand for, written out in float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minfer.kernels.mla import latent_attention, latent_decode

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF_TYPE = torch.bfloat16 if CUDA else torch.float16  # the interpreter's is wrong
LIMIT = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
GARBAGE = (-1, 1 << 30)
NOPE, VALUE = 12, 10  # dimensions of a head's key and value


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's attention and of its cache's blocks."""

    heads: int = 4
    latent: int = 32
    rotated: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32


SMALL = Shape()


@dataclass
class Case:
    """Sequences in a paged cache of latents, and what they hold as plain tensors."""

    latents: list[Tensor]  # a sequence: [context, latent + rotated] float64
    cache: Tensor
    table: Tensor
    rows: Tensor
    contexts: Tensor
    key: Tensor  # [heads, NOPE, latent] float64
    value: Tensor  # [heads, VALUE, latent] float64
    scale: float = 0.2

    @property
    def latent(self) -> int:
        return self.key.shape[2]


def make(contexts: list[int], shape: Shape = SMALL, seed: int = 0) -> Case:
    """Random contents in shuffled blocks, which other layers' are between. What no
    sequence may read is NaN, and its id garbage.
    """
    draw = torch.Generator().manual_seed(seed)
    block_size, size = shape.block_size, shape.latent + shape.rotated
    needs = [-(-context // block_size) for context in contexts]
    width, height = max([*needs, 1]) + 3, len(contexts) + 2
    ids = (torch.randperm(sum(needs) + 2, generator=draw) + 1).tolist()
    pool = torch.full((len(ids) + 1, 2, block_size, size), math.nan, dtype=shape.dtype)
    garbage = torch.tensor(GARBAGE, dtype=torch.int32)
    table = garbage.repeat(height, width)[:, :width].contiguous()
    rows = torch.randperm(height, generator=draw)[: len(contexts)].to(torch.int32)
    latents = []
    for row, context, need in zip(rows.tolist(), contexts, needs, strict=True):
        blocks = torch.tensor([ids.pop() for _ in range(need)], dtype=torch.int64)
        table[row, :need] = blocks.int()
        drawn = torch.randn(context, size, generator=draw).to(shape.dtype)
        latents.append(drawn.double())
        tokens = torch.arange(context)
        pool[blocks[tokens // block_size], 1, tokens % block_size] = drawn
    weights = torch.randn(shape.heads, NOPE + VALUE, shape.latent, generator=draw)
    weights = weights.double() / shape.latent**0.5
    return Case(
        latents,
        pool.to(DEVICE)[:, 1],
        table.to(DEVICE),
        rows.to(DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        weights[:, :NOPE],
        weights[:, NOPE:],
    )


@dataclass
class Queries:
    """Queries of a case's heads, as projected and as absorbed."""

    nope: Tensor  # [tokens, heads, NOPE] float64
    rotated: Tensor  # [tokens, heads, rotated] float64
    absorbed: Tensor  # [tokens, heads, latent + rotated], as kernels take them


def queries(tokens: int, case: Case, seed: int = 1) -> Queries:
    draw = torch.Generator().manual_seed(seed)
    heads, rotated = len(case.key), case.cache.shape[2] - case.latent
    drawn = torch.randn(tokens, heads, NOPE + rotated, generator=draw)
    drawn = drawn.to(case.cache.dtype).double()
    nope, turned = drawn[..., :NOPE], drawn[..., NOPE:]
    # A view into rows that hold more (here NaN).
    wide = torch.full((tokens, heads + 1, case.cache.shape[2]), math.nan).double()
    wide[:, :heads, : case.latent] = torch.einsum("thn,hnl->thl", nope, case.key)
    wide[:, :heads, case.latent :] = turned
    return Queries(nope, turned, wide.to(case.cache)[:, :heads])


def naive(
    case: Case, q: Queries, tokens: list[int], latents: Tensor, start: int
) -> Tensor:
    """[queries, heads, VALUE]: attention of queries `tokens`, at positions start on, over
    expanded keys and values.
    """
    latent, turned = latents[:, : case.latent], latents[:, case.latent :]
    keys = torch.einsum("cl,hnl->chn", latent, case.key)
    values = torch.einsum("cl,hvl->chv", latent, case.value)
    scores = torch.einsum("qhn,chn->hqc", q.nope[tokens], keys)
    scores += torch.einsum("qhr,cr->hqc", q.rotated[tokens], turned)
    positions = torch.arange(start, start + len(tokens))[:, None]
    unseen = torch.arange(len(latents)) > positions
    weights = (scores * case.scale).masked_fill(unseen, -math.inf).softmax(-1)
    return torch.einsum("hqc,chv->qhv", weights, values)


def close(case: Case, out: Tensor, expected: Tensor) -> None:
    values = torch.einsum("thl,hvl->thv", out.double().cpu(), case.value)
    error = (values - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < LIMIT[out.dtype], f"relative error {error:.2e}"


def room(case: Case, q: Queries) -> Tensor:
    """Poisoned memory for results, a view."""
    tokens, heads = q.nope.shape[:2]
    shape = tokens, heads, case.latent + 8
    out = torch.full(shape, math.nan, dtype=case.cache.dtype, device=DEVICE)
    return out[..., : case.latent]


def decode(case: Case, q: Queries, **options: object) -> Tensor:
    """`latent_decode` of this case into poisoned memory."""
    out = room(case, q)
    result = latent_decode(
        q.absorbed,
        case.cache,
        case.table,
        case.rows,
        case.contexts,
        case.scale,
        value_dim=case.latent,
        out=out,
        **options,  # type: ignore[arg-type]  # checked by its callee
    )
    assert result is out
    return out


def check_decode(case: Case, q: Queries, **options: object) -> Tensor:
    out = decode(case, q, **options)
    for i, (latents, context) in enumerate(
        zip(case.latents, case.contexts.tolist(), strict=True)
    ):
        if context:
            close(case, out[[i]], naive(case, q, [i], latents, context - 1))
        else:
            assert not out[i].any()
    return out


def attend(
    case: Case,
    q: Queries,
    chunks: list[tuple[int, int]],
    offsets: list[int],
    **options: object,
) -> Tensor:
    """`latent_attention` of chunks (start, count) into poisoned memory."""
    out = room(case, q)
    starts, counts, places = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in (*zip(*chunks, strict=True), offsets)
    )
    result = latent_attention(
        q.absorbed,
        case.cache,
        case.table,
        case.rows,
        starts,
        counts,
        places,
        case.scale,
        value_dim=case.latent,
        out=out,
        **options,  # type: ignore[arg-type]  # checked by its callee
    )
    assert result is out
    return out


def check_chunks(
    chunks: list[tuple[int, int]],
    shape: Shape = SMALL,
    *,
    slack: int = 0,
    seed: int = 0,
    **options: object,
) -> None:
    """Every chunk (start, count) against the naive attention; max_count is `slack` above
    all of them, and tokens of no chunk stay untouched.
    """
    contexts = [start + count for start, count in chunks]
    case = make(contexts, shape, seed)
    offsets, end = [], 2  # two tokens of no chunk before, one after each chunk
    for _, count in chunks:
        offsets.append(end)
        end += count + 1
    q = queries(end, case)
    max_count = max(count for _, count in chunks) + slack
    out = attend(case, q, chunks, offsets, max_count=max_count, **options)
    untouched = torch.ones(end, dtype=torch.bool)
    for (start, count), offset, latents in zip(
        chunks, offsets, case.latents, strict=True
    ):
        tokens = [*range(offset, offset + count)]
        untouched[tokens] = False
        close(case, out[tokens], naive(case, q, tokens, latents, start))
    assert out[untouched.to(DEVICE)].isnan().all()
