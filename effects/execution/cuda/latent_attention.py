"""A GPU's attention over latents; models/architecture/mla.py has the theory,
kernels/mla.py and kernels/expanded_latents.py kernels.

Most tokens are absorbed: queries are multiplied with the matrix of keys, attend over the
latents themselves, and what they find is multiplied with the matrix of values. For long
chunks, latents are expanded to keys and values instead, a piece at a time.
"""

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.cpu.latent_attention import expanding
from minfer.effects.execution.cuda.step_segments import (
    DecodeSegment,
    decode_segments,
    prefill_segments,
)
from minfer.effects.models.architecture.batch import Batch
from minfer.effects.models.architecture.mla import MLA
from minfer.kernels.cache_numbers import as_bytes, dequantize
from minfer.kernels.expanded_latents import merge_piece, piece_attention
from minfer.kernels.expanded_work import ExpandedWork
from minfer.kernels.flash import flash_piece
from minfer.kernels.latent_cache import write_latent
from minfer.kernels.leaves import LatentWeights
from minfer.kernels.mla import latent_attention, latent_decode


@frozen(eq=False)
class LatentLayer:
    """The latents of one layer, and what they are multiplied with."""

    mla: MLA
    cache: Tensor  # [pages + 1, block_size, latent_dim]
    table: int  # the block table of its pages
    rope: Tensor  # [positions, rope_dim] float32: cosines, then sines
    weights: LatentWeights
    splits: int  # of the contexts of decode rows
    query_scales: Tensor | None = None  # [positions] float32: factors of queries

    def rotate_and_attend(self, batch: Batch, query: Tensor, latent: Tensor) -> Tensor:
        """Norm and rotate, write latents, and attend; see `PagedCache.mix_latent`."""
        by_head = query.view(len(query), self.mla.heads, self.mla.query_dim)
        if batch.chunks is None or batch.chunks.expanded is None:
            absorbed = self._absorb(by_head)
            self._write(
                batch, latent, by_head, absorbed[..., self.mla.rank :], self.mla.rank
            )
            return self._values(self._attend(batch, absorbed)).flatten(1)
        rope_part = by_head[..., self.mla.plain_dim :]
        self._write(batch, latent, by_head, rope_part, self.mla.plain_dim)
        decode_inputs = len(batch.rows)
        out = query.new_empty(len(query), self.mla.heads, self.mla.value_dim)
        if decode_inputs:
            absorbed = self._absorb(by_head[:decode_inputs])
            absorbed[..., self.mla.rank :].copy_(rope_part[:decode_inputs])
            attended_latents = self._attend(batch, absorbed, chunks=False)
            out[:decode_inputs] = self._values(attended_latents)
        self._expand(
            batch.chunks.expanded,
            by_head[decode_inputs:],
            batch.slots[self.table, decode_inputs:],
            out[decode_inputs:],
        )
        return out.flatten(1)

    def _write(
        self,
        batch: Batch,
        latent: Tensor,
        by_head: Tensor,
        out: Tensor,
        plain_dim: int,
    ) -> None:
        """Write the step's latents, and the queries' rotated part to `out`, where
        `plain_dim` numbers of the other part stand before it.
        """
        write_latent(
            latent,
            self.weights.norm,
            self.rope,
            batch.positions,
            batch.slots[self.table],
            self.cache,
            by_head[..., self.mla.plain_dim :],
            out=out,
            interleaved=False,  # weights are in the order of halves
            query_scales=self.query_scales,
            plain_dim=0 if self.query_scales is None else plain_dim,
        )

    def _absorb(self, by_head: Tensor) -> Tensor:
        """Returns queries [tokens, heads, latent_dim] for latents, without their rotated
        part.
        """
        mla, (keys, _) = self.mla, expanding(self.mla, self.weights)
        absorbed = by_head.new_empty(len(by_head), mla.heads, mla.latent_dim)
        folded = torch.bmm(by_head[..., : mla.plain_dim].transpose(0, 1), keys)
        absorbed[..., : mla.rank].copy_(folded.transpose(0, 1))
        return absorbed

    def _values(self, mixed: Tensor) -> Tensor:
        """Returns values [tokens, heads, value_dim] of latents [tokens, heads, rank]."""
        _, values = expanding(self.mla, self.weights)
        return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def _attend(self, batch: Batch, q: Tensor, *, chunks: bool = True) -> Tensor:
        """Returns latents [tokens, heads, rank], mixed for absorbed queries."""
        mla, table = self.mla, batch.table[self.table]
        out = q.new_empty(len(q), mla.heads, mla.rank)
        segments = [*decode_segments(batch, self.splits)]
        for segment in (*segments, *prefill_segments(batch)) if chunks else segments:
            args = q[segment.tokens], self.cache, table, segment.rows
            if isinstance(segment, DecodeSegment):
                latent_decode(
                    *args,
                    segment.contexts,
                    mla.scale,
                    value_dim=mla.rank,
                    splits=segment.splits,
                    out=out[segment.tokens],
                )
                continue
            latent_attention(
                *args,
                segment.starts,
                segment.counts,
                segment.offsets,
                mla.scale,
                value_dim=mla.rank,
                max_count=segment.max_count,
                splits=segment.splits,
                out=out[segment.tokens],
                draft_layout=segment.draft_layout,
            )
        return out

    def _expand(
        self, work: ExpandedWork, query: Tensor, slots: Tensor, out: Tensor
    ) -> None:
        """Attend with the rotated queries [tokens, heads, query_dim] of chunks into `out`
        [tokens, heads, value_dim]: over their own latents, and those of their history.
        """
        mla, history = self.mla, work.slots[self.table]
        pieces = mla.pieces(len(query), query.element_size())
        own_latents = self._latents(slots, query.dtype)
        for first in range(0, mla.heads, pieces.heads):
            head_range = slice(first, first + pieces.heads)
            q, head_out = query[:, head_range], out[:, head_range]
            sums = self._attend_piece(work, own_latents, q, head_range, None, head_out)
            if not len(history):
                continue
            total, piece_out = head_out.float().contiguous(), torch.empty_like(head_out)
            sums = sums.contiguous()
            for first_key in range(0, len(history), pieces.tokens):
                slots = history[first_key : first_key + pieces.tokens]
                bounds = work.piece(first_key, pieces.tokens)
                # A piece's latents have no name here: they are freed before the next's.
                piece_sums = self._attend_piece(
                    work,
                    self._latents(slots, query.dtype),
                    q,
                    head_range,
                    bounds,
                    piece_out,
                )
                merge_piece(total, sums, piece_out, piece_sums)
            head_out.copy_(total)

    def _latents(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the latents in slots [keys], in a dtype: [keys, latent_dim]."""
        cached, size = as_bytes(self.cache), self.cache.shape[1]
        if cached.is_contiguous():
            gathered = cached.flatten(0, 1).index_select(0, slots)
        else:  # pages are not side by side
            gathered = cached[slots // size, slots % size]
        return dequantize(gathered.view(self.cache.dtype), None, dtype)

    def _attend_piece(
        self,
        work: ExpandedWork,
        latents: Tensor,
        query: Tensor,
        heads: slice,
        bounds: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """Expand latents [keys, latent_dim] for some heads, whose queries attend to them,
        into `out`; without bounds, these are the chunks' own. Returns the logarithms
        [tokens, heads] of the softmaxes' sums.
        """
        mla, by_head = self.mla, self.weights.expansion.weight
        weight = by_head.view(mla.heads, -1, mla.rank)[heads].flatten(0, 1)
        expanded = torch.mm(latents[:, : mla.rank], weight.t())
        expanded = expanded.view(len(latents), query.shape[1], -1)
        rotated = latents[:, mla.rank :]
        sums = torch.full(out.shape[1::-1], -torch.inf, device=out.device).t()
        if work.by_flash:
            keys, values = expanded.tensor_split((mla.plain_dim,), 2)
            turned = rotated[:, None].expand(-1, query.shape[1], -1)
            flash_piece(
                query,
                torch.cat((keys, turned), 2),
                values,
                mla.scale,
                causal=bounds is None,
                out=out,
                sums=sums,
            )
            return sums
        piece_attention(
            query,
            expanded,
            rotated,
            work.bounds,
            work.bounds if bounds is None else bounds,
            mla.scale,
            longest=work.longest,
            causal=bounds is None,
            out=out,
            sums=sums,
        )
        return sums
