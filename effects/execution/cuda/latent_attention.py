"""A GPU's attention over latents; models/mla.py has the theory, kernels/mla.py kernels.

All tokens are absorbed: queries are multiplied with the matrix of keys, attend over the
latents themselves, and what they find is multiplied with the matrix of values.
"""

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.cpu.latent_attention import expanding
from minfer.effects.execution.cuda.step_parts import (
    DecodePart,
    decode_parts,
    prefill_parts,
)
from minfer.effects.models.batch import Batch
from minfer.effects.models.mla import MLA
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

    def mix(self, batch: Batch, query: Tensor, latent: Tensor) -> Tensor:
        """Norm and rotate, write latents, and attend; see `PagedCache.mix_latent`."""
        mla, tokens = self.mla, len(query)
        keys, values = expanding(mla, self.weights)
        by_head = query.view(tokens, mla.heads, mla.query_dim)
        absorbed = query.new_empty(tokens, mla.heads, mla.latent_dim)
        folded = torch.bmm(by_head[..., : mla.plain_dim].transpose(0, 1), keys)
        absorbed[..., : mla.rank].copy_(folded.transpose(0, 1))
        write_latent(
            latent,
            self.weights.norm,
            self.rope,
            batch.positions,
            batch.slots[self.table],
            self.cache,
            by_head[..., mla.plain_dim :],
            out=absorbed[..., mla.rank :],
            interleaved=False,  # weights are in the order of halves
        )
        mixed = self._attend(batch, absorbed)  # [tokens, heads, rank]
        found = torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2))
        return found.transpose(0, 1).reshape(tokens, -1)

    def _attend(self, batch: Batch, q: Tensor) -> Tensor:
        """Returns latents [tokens, heads, rank], mixed for absorbed queries."""
        mla, table = self.mla, batch.table[self.table]
        out = q.new_empty(len(q), mla.heads, mla.rank)
        for part in (*decode_parts(batch, self.splits), *prefill_parts(batch)):
            of = q[part.tokens], self.cache, table, part.rows
            if isinstance(part, DecodePart):
                latent_decode(
                    *of,
                    part.contexts,
                    mla.scale,
                    value_dim=mla.rank,
                    splits=part.splits,
                    out=out[part.tokens],
                )
                continue
            latent_attention(
                *of,
                part.starts,
                part.counts,
                part.offsets,
                mla.scale,
                value_dim=mla.rank,
                max_count=part.max_count,
                splits=part.splits,
                out=out[part.tokens],
                draft_layout=part.draft_layout,
            )
        return out
