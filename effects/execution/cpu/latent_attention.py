"""The CPU's attention over latents, in plain torch; models/architecture/mla.py has the
theory.

Decode rows and short chunks are *absorbed*: all heads read the latents, as one key head
would be read. Long chunks expand latents to keys and values, some heads at a time.
"""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.cpu.attention_reads import (
    ChunkReads,
    DecodeGroup,
    MaskedPiece,
    Reads,
)
from minfer.effects.execution.cpu.layer_cache import LayerCache
from minfer.effects.models.architecture.mla import MLA
from minfer.kernels.leaves import LatentWeights

# Queries of a chunk from which expanding is faster: it costs as much as the products that
# it saves for this number of queries, at the sizes of DeepSeek-V2 and V3.
MIN_EXPANDED_QUERIES: Final = 128
# Elements of expanded keys and values at once, about 16 MB in float32.
MAX_EXPANDED_ELEMENTS: Final = 1 << 22


def expanding(mla: MLA, weights: LatentWeights) -> tuple[Tensor, Tensor]:
    """Returns the matrices of keys [heads, plain_dim, rank] and values [heads, value_dim,
    rank]: views.
    """
    heads = weights.expansion.weight.view(-1, mla.plain_dim + mla.value_dim, mla.rank)
    return heads[:, : mla.plain_dim], heads[:, mla.plain_dim :]


@frozen(eq=False)
class LatentRead:
    """The attention of one layer's heads over its latents."""

    mla: MLA
    cache: LayerCache
    weights: LatentWeights
    new: Tensor  # [tokens, latent_dim], those of the step's tokens

    def attend(self, query: Tensor, reads: Reads, decode_rows: int) -> Tensor:
        """Returns the results [tokens, heads * value_dim] of rotated queries [tokens,
        heads, query_dim], whose own latents are in the cache.
        """
        mla = self.mla
        out = query.new_empty(len(query), mla.heads, mla.value_dim)
        for group in reads.groups:
            rows = slice(0, decode_rows) if group.rows is None else group.rows
            out[rows] = self._decode(query[rows], group)
        for chunk in reads.chunks:
            span = slice(chunk.first, chunk.last)
            prefill = self._absorbed_chunk
            if chunk.last - chunk.first >= MIN_EXPANDED_QUERIES:
                prefill = self._expanded_chunk
            out[span] = prefill(query[span], chunk)
        return out.flatten(1)

    def _decode(self, query: Tensor, group: DecodeGroup) -> Tensor:
        """Attend with one query token a row: [rows, heads, query_dim] -> [rows, heads,
        value_dim].
        """
        latent = self._latents(group.blocks, len(query), group).unsqueeze(1)
        absorbed = self.absorb(query).unsqueeze(1)  # [rows, 1, heads, latent_dim]
        return self.values(self._attend(absorbed, latent, group.mask).squeeze(1))

    def _absorbed_chunk(self, query: Tensor, chunk: ChunkReads) -> Tensor:
        """Attend with the tokens of one chunk: [n, heads, query_dim] -> [n, heads,
        value_dim].
        """
        latent = self._chunk_latents(chunk)  # [1, context, latent_dim]
        absorbed = self.absorb(query).transpose(0, 1)  # [heads, n, latent_dim]
        outputs = [
            self._attend(absorbed[:, piece.tokens], latent[:, : piece.keys], piece.mask)
            for piece in _pieces(chunk)
        ]
        return self.values(torch.cat(outputs, 1).transpose(0, 1))

    def _expanded_chunk(self, query: Tensor, chunk: ChunkReads) -> Tensor:
        """Do the same with expanded keys and values, a few heads at a time."""
        mla, latent = self.mla, self._chunk_latents(chunk)[0].to(query.dtype)
        compressed, rotated = latent.split_with_sizes((mla.rank, mla.rope_dim), 1)
        width = mla.query_dim + mla.value_dim
        num_heads = max(1, MAX_EXPANDED_ELEMENTS // (len(latent) * width))
        out = query.new_empty(len(query), mla.heads, mla.value_dim)
        for key_of, value_of, place in zip(
            *(torch.split(matrix, num_heads) for matrix in expanding(mla, self.weights)),
            range(0, mla.heads, num_heads),
            strict=True,
        ):
            key = compressed @ key_of.transpose(1, 2)  # [num_heads, context, plain_dim]
            turned = rotated.expand(len(key), *rotated.shape)
            heads = slice(place, place + len(key))
            key = torch.cat((key, turned), -1)
            value = compressed @ value_of.transpose(1, 2)
            for piece in _pieces(chunk):
                mask = piece.mask
                mixed = F.scaled_dot_product_attention(
                    query[piece.tokens, heads].transpose(0, 1),
                    key[:, : piece.keys],
                    value[:, : piece.keys],
                    None if mask is None else mask.to(query.dtype),
                    scale=mla.scale,
                )
                out[piece.tokens, heads] = mixed.transpose(0, 1)
        return out

    def absorb(self, query: Tensor) -> Tensor:
        """Returns queries [n, heads, latent_dim] for latents."""
        keys, _ = expanding(self.mla, self.weights)
        plain, rotated = query.split_with_sizes(
            (self.mla.plain_dim, self.mla.rope_dim), 2
        )
        folded = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat((folded, rotated), 2)

    def values(self, mixed: Tensor) -> Tensor:
        """Returns values [n, heads, value_dim] of mixed latents [n, heads, rank]."""
        _, values = expanding(self.mla, self.weights)
        return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def _attend(self, query: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """Attend over latents: [..., n, latent_dim], [..., context, latent_dim] -> [...,
        n, rank].
        """
        latent = latent.to(query.dtype)
        mask = None if mask is None else mask.to(query.dtype)
        scores = query @ latent.transpose(-1, -2) * self.mla.scale
        if mask is not None:
            scores = scores + mask
        weights = scores.float().softmax(-1).to(query.dtype)
        return weights @ latent[..., : self.mla.rank]

    def _chunk_latents(self, chunk: ChunkReads) -> Tensor:
        """Returns the latents that a chunk reads, its own included: [1, context,
        latent_dim].
        """
        if chunk.blocks is None:
            return self.new[None, chunk.first : chunk.last]
        return self._latents(chunk.blocks, 1, chunk)

    def _latents(
        self, blocks: Tensor | slice, rows: int, reads: DecodeGroup | ChunkReads
    ) -> Tensor:
        """Returns [rows, context - skip, latent_dim]."""
        latents = self.cache.read(blocks).view(rows, -1, self.mla.latent_dim)
        return latents[:, reads.skip : reads.context]


def _pieces(chunk: ChunkReads) -> Iterator[MaskedPiece]:
    """Yields the pieces of a chunk, whose masks are there unless there is one token."""
    for piece in chunk.pieces():
        count = piece.tokens.stop - piece.tokens.start
        if piece.mask is not None or count == 1:
            yield piece
            continue
        mask = torch.full((count, piece.keys), -torch.inf).triu_(1 + piece.keys - count)
        yield evolve(piece, mask=mask)
