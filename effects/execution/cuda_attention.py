"""A GPU's KV cache: what a model's layers do with a packed step between two matrix
products.

Nothing here waits for the device or looks at what a tensor holds, so that steps can be
captured. Without a GPU the kernels' references run.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.attention import rope_table
from minfer.effects.models.batch import Batch
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.shapes import captured_tokens
from minfer.effects.models.spec import ModelSpec
from minfer.kernels.ahead import compiled
from minfer.kernels.attention import decode_attention, num_splits, prefill_attention
from minfer.kernels.flash import flash_attention, flash_missing
from minfer.kernels.gated import FILLED, pays
from minfer.kernels.logprobs import logprobs
from minfer.kernels.packages import QUACK, missing
from minfer.kernels.rope import rope_and_cache
from minfer.kernels.rows import advance, gather, scatter
from minfer.kernels.sample import sample

# The executor reaches all that needs Triton through this module.
__all__ = [
    "advance",
    "compiled",
    "gather",
    "logprobs",
    "num_splits",
    "pays",
    "sample",
    "scatter",
]

# For heads of up to 64 dimensions, and wider ones; below, Triton is as fast and starts
# sooner.
FLASH_FROM = (2048, 512)


@frozen
class Routes:
    """Which kernel serves which attention, by measuring both on an H200 (2026-11-20).

    Rows that feed themselves are always Triton's: in blocks of 64, flash-attn took 1.02
    to 2.6 times as long at batches of 32 to 256.
    """

    flash_from: int = (
        0  # inputs of the longest chunk from which flash-attn serves chunks; 0: never
    )
    # Inputs of a step up to which a CUDA graph is better, which flash-attn cannot be in.
    # Without graphs it does not serve those either, so that results are the same.
    captured: int = 0
    why: str = ""  # never
    apart: str = ""  # why quack never serves products of gate and up

    @classmethod
    def for_device(
        cls, spec: ModelSpec, block_size: int, budget: int, device: torch.device | str
    ) -> "Routes":
        """What the device, the installed packages and steps of `budget` inputs allow."""
        kind, captured = torch_dtype(spec.dtype), captured_tokens(spec, budget)
        why = flash_missing(spec.head_dim, kind, block_size, torch.device(device))
        if any(spec.windows):
            why = "it reads before sliding windows what may be somebody else's"
        elif not why and captured >= budget:
            why = "all steps are small enough for CUDA graphs, which it cannot be part of"
        apart = (
            "it adds no biases"
            if any(layer.feed_forward.bias for layer in spec.layers)
            else missing(QUACK, kind, torch.device(device))
        )
        return cls(0 if why else FLASH_FROM[spec.head_dim > 64], captured, why, apart)

    def described(self) -> list[tuple[str, str]]:
        """Lines for `minfer plan`."""
        chunks = f"Triton; no flash-attn: {self.why}"
        if not self.why:
            chunks = f"flash-attn from {self.flash_from} tokens of a prompt at once "
            chunks += f"in steps of more than {self.captured}, else Triton"
        activation = (
            f"quack where its tiles are {FILLED:.0%} full, else cuBLAS and Triton"
        )
        if self.apart:
            activation = f"cuBLAS and Triton; no quack: {self.apart}"
        return [
            ("decode attention", "Triton, split-KV"),
            ("prefill attention", chunks),
            ("gate, up and SiLU", activation),
        ]


@frozen(eq=False)
class CudaCache:
    """Keys and values in blocks, each layer's apart; one block more than the engine knows
    of.

    The last block is for rows that pad a batch: nobody reads what they write.
    """

    spec: ModelSpec
    data: Tensor  # [layers, 2, blocks + 1, block_size, kv_heads, head_dim]
    layers: tuple[
        tuple[Tensor, Tensor], ...
    ]  # keys, values: [blocks + 1, block_size, ...]
    rope: Tensor  # [positions, head_dim] float32: cosines, then sines

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        length: int,
        device: torch.device,
    ) -> "CudaCache":
        """Blocks on a device, for positions up to `length`. torch.OutOfMemoryError."""
        [(two, *token)] = {group.attention.kv_shape for group in spec.groups}
        shape = (len(spec.layers), two, blocks + 1, block_size, *token)
        data = torch.empty(shape, dtype=torch_dtype(spec.kv_dtype), device=device)
        half = spec.head_dim // 2
        table = rope_table(spec, length + 1)[:, :, 0]  # [positions, 2, head_dim]
        rope = (
            torch.cat((table[:, 0, :half], table[:, 1, half:]), -1)
            .contiguous()
            .to(device)
        )
        return cls(spec, data, tuple((one[0], one[1]) for one in data.unbind(0)), rope)

    def mix(
        self,
        batch: Batch,
        index: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """Norm and rotate heads, write keys and values, attend; see `PagedCache` in
        models/cache.py.
        """
        gqa = self.spec.layers[index].attention
        keys, values = self.layers[index]
        rope_and_cache(
            qkv,
            self.rope,
            batch.positions,
            batch.slots,
            keys,
            values,
            gqa.heads,
            gqa.kv_heads,
            q_norm,
            k_norm,
            self.spec.rms_norm_eps,
        )
        return self._read(batch, index, qkv, gqa.head_dim**-0.5)

    def attend(
        self, batch: Batch, index: int, qkv: Tensor, scale: float | None = None
    ) -> Tensor:
        """Write keys and values, and attend; see `PagedCache` in models/cache.py."""
        gqa, qkv = self.spec.layers[index].attention, qkv.to(self.data.dtype)
        heads = qkv.view(len(qkv), -1, gqa.head_dim)
        new_keys_values = heads[:, gqa.heads :].chunk(2, 1)
        for cache, new in zip(self.layers[index], new_keys_values, strict=True):
            cache.view(-1, gqa.kv_heads, gqa.head_dim).index_copy_(0, batch.slots, new)
        return self._read(
            batch, index, qkv, gqa.head_dim**-0.5 if scale is None else scale
        )

    def _read(self, batch: Batch, index: int, qkv: Tensor, scale: float) -> Tensor:
        """Attention of rotated queries, whose keys and values are in the cache."""
        gqa, chunks = self.spec.layers[index].attention, batch.chunks
        window, (keys, values) = gqa.window or 0, self.layers[index]
        q = qkv.view(len(qkv), -1, gqa.head_dim)[:, : gqa.heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        alone = len(batch.rows)
        if alone:
            decode_attention(
                q[:alone],
                keys,
                values,
                batch.table,
                batch.rows,
                batch.contexts,
                scale,
                window=window,
                splits=batch.splits,
                out=out[:alone],
            )
        if chunks is not None and chunks.flash is not None:
            flash_attention(chunks.flash, q[alone:], keys, values, scale, out[alone:])
        elif chunks is not None:
            where = chunks.rows, chunks.starts, chunks.counts, chunks.offsets
            prefill_attention(
                q,
                keys,
                values,
                batch.table,
                *where,
                scale,
                window=window,
                max_count=chunks.longest,
                out=out,
            )
        return out.view(len(out), -1)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a block, in all layers."""
        self.data[:, :, target, :count] = self.data[:, :, source, :count]

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """Nothing: no kernel lets what is behind a context reach its result."""
