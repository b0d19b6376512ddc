"""Which kernels serve a step on a device, as far as that depends on the model, the device
and the sizes of the step: a table decided by measurement.

Layers that keep the same of the same tokens are a group, and each group has a route: by
its kind of attention, its heads, its window, and what its cache holds. Decode rows always
use Triton's kernels: in blocks of 64, flash-attn took 1.02 to 2.6 times as long at
batches of 32 to 256 (H200, 2026-11-20). Prefill chunks use flash-attn from some length
on, and products of gate and up use quack, where these packages are installed and support
the model.

`Routes` is not the only chooser. What depends on one product or one launch is chosen
there, from the tensors:

    a matrix product      products.py finds the module of its scheme and device; that
                          chooses its own kernel or a library by tokens and sizes
                          (fused_linear.py, quantized_linear.py, experts.py), with the
                          tiling, in linear_tunes.py, quantized_tunes.py, experts_tunes.py
    a launch of attention its tiling, in attention_tunes.py and mla_tunes.py
    a sum over ranks      peer memory or NCCL, by its bytes (ranks/peer_ranks.py)
"""

from typing import Final

import torch
from attrs import frozen

from minfer.effects.models.architecture.dense import Dense
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.kv_format import KvFormat
from minfer.effects.models.architecture.layers import Attention
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.moe_step import MAX_TOKENS_WITH_SHARED
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import kv_dtype_bytes, torch_dtype
from minfer.effects.models.layout.shapes import captured_tokens, dequantized_blocks
from minfer.kernels.attention_tunes import (
    HeadSize,
    decode_tune,
    num_splits,
    power_from,
    table_dim,
)
from minfer.kernels.experts_tunes import grouped_from
from minfer.kernels.flash import flash_missing, flash_piece_missing
from minfer.kernels.gated import MIN_FILLED_SHARE, QUACK_ACTIVATIONS, is_gated_faster
from minfer.kernels.gated_rule_tunes import MAX_RECURRENT_TOKENS
from minfer.kernels.mla_tunes import latent_splits
from minfer.kernels.packages import QUACK, missing
from minfer.records.config import EngineConfig
from minfer.values.texts import counted

# By the most dimensions of a head; for fewer inputs Triton is as fast, and starts sooner.
MIN_FLASH_TOKENS: Final = {64: 2048, 128: 512, 256: 2048}
# Inputs of the longest chunk, and inputs that attend to a token of the history on
# average, from which latents are expanded. With 128 heads it pays from 256 on, with 16
# from 512 to 2,048, by the history; at 8,192 it takes 0.17 to 0.25 of the time (H100,
# 2026-11-27).
MIN_EXPAND_TOKENS: Final = 512
# Inputs of the longest chunk from which contexts in 8 bits are dequantized.
MIN_DEQUANTIZE_TOKENS: Final = 512
# What serves recurrent layers, in words.
RECURRENT: Final = (
    f"Triton; prefill chunks of more than {MAX_RECURRENT_TOKENS} tokens block by block, "
    f"but in float32 and in Mamba's first form, the others token by token"
)


@frozen(kw_only=True)
class GroupRoute:
    """Which kernels serve the attention of one group of layers."""

    attention: Attention
    kv: KvFormat
    no_flash: str  # why flash-attn never serves; empty if it does

    @classmethod
    def of(
        cls,
        attention: Attention,
        kv: KvFormat,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
    ) -> "GroupRoute":
        """Returns what the device and the installed packages allow a model of `dtype`."""
        dim = attention.query_dim
        if not isinstance(attention, GQA):
            no_flash = flash_piece_missing(dim, attention.value_dim, dtype, device)
            if kv_dtype_bytes(kv.dtype) == 1:
                no_flash = "it reads no cache of 8 bits"
            return cls(attention=attention, kv=kv, no_flash=no_flash)
        no_flash = flash_missing(dim, dtype, block_size, device)
        if attention.sinks:
            no_flash = "it has no attention sinks"
        elif attention.chunk:
            no_flash = "it has no attention within chunks of positions"
        elif attention.score_cap is not None:
            no_flash = "its kernels for capped scores are not tested here"
        elif attention.sink_tokens:
            no_flash = "it does not read sink tokens beside a window"
        elif attention.window:
            no_flash = (
                "it reads before sliding windows what may belong to another sequence"
            )
        return cls(attention=attention, kv=kv, no_flash=no_flash)

    @property
    def latents(self) -> bool:
        """Whether the cache holds latents."""
        return self.kv.layout == "latents"

    @property
    def eight_bits(self) -> bool:
        """Whether the cache is in 8 bits, which flash-attn reads dequantized alone."""
        return kv_dtype_bytes(self.kv.dtype) == 1

    @property
    def flash_from(self) -> int:
        """Inputs of the longest chunk from which flash-attn reads the cache; 0: never."""
        if self.latents or self.no_flash:
            return 0
        dim = self.attention.query_dim
        return next(tokens for most, tokens in MIN_FLASH_TOKENS.items() if dim <= most)

    def splits(self, rows: int, context: int) -> int:
        """Returns the number of ranges into which contexts of up to `context` tokens are
        cut for `rows` decode rows (Flash-Decoding): as many as fill the GPU.
        """
        attention = self.attention
        if isinstance(attention, GQA):
            read = min(context, (attention.window or context) + attention.sink_tokens)
            return num_splits(rows, attention.kv_heads, attention.head_dim, read)
        return latent_splits(rows, attention.heads, 1, context)

    def variant(self, rows: int, splits: int) -> object:
        """Returns a key of the kernels for `rows` decode rows, or 0 for rows with drafts,
        and `splits` ranges: what is compiled for the same key is the same.
        """
        attention = self.attention
        if not isinstance(attention, GQA):
            return power_from(splits)
        size = HeadSize(kv_dtype_bytes(self.kv.dtype), table_dim(attention.head_dim))
        return decode_tune(size, rows * attention.kv_heads, splits), splits > 1

    @property
    def name(self) -> str:
        """The group's place in a table of routes."""
        window, sinks = self.attention.window, self.attention.sink_tokens
        if isinstance(self.attention, GQA) and self.attention.chunk:
            return f"chunks of {window}"
        if sinks:
            return f"window {window}, {counted(sinks, 'sink token')}"
        return f"window {window}" if window else "no window"


@frozen(kw_only=True)
class Routes:
    """Which kernel serves which part of a step."""

    groups: tuple[GroupRoute, ...] = ()  # in the order of `ModelSpec.groups`
    # Inputs of a step up to which a CUDA graph is better, which cannot contain
    # flash-attn. Without graphs flash-attn does not serve those steps either, so results
    # are the same.
    captured: int = 0
    all_captured: bool = False  # no step has more
    # Blocks of contexts in 8 bits that are dequantized at once, at most; 0: none are.
    dequantized: int = 0
    no_quack: str = ""  # why quack never serves products of gate and up
    fused_width: int = 0  # width of the dense feed-forwards that quack may serve
    experts: tuple[MoE, ...] = ()  # the kinds of mixtures of experts
    recurrent: bool = False  # whether there are recurrent layers
    max_rows: int = 1  # decode rows of the largest step
    context: int = 0  # tokens of the longest context

    @classmethod
    def for_device(
        cls, spec: ModelSpec, config: EngineConfig, device: torch.device | str
    ) -> "Routes":
        """Returns what the device, the installed packages and the steps of an engine
        allow.
        """
        device, budget = torch.device(device), config.max_num_batched_tokens
        captured = captured_tokens(spec, budget)
        feed_forwards = dict.fromkeys(layer.feed_forward for layer in spec.layers)
        dense = [
            feed_forward
            for feed_forward in feed_forwards
            if isinstance(feed_forward, Dense)
        ]
        dtype = torch_dtype(spec.dtype)
        no_quack = _no_quack(dense) or missing(QUACK, dtype, device)
        return cls(
            groups=tuple(
                GroupRoute.of(group.attention, kv, dtype, config.block_size, device)
                for group, kv in zip(spec.groups, spec.kv_formats, strict=True)
            ),
            captured=captured,
            all_captured=captured >= budget,
            dequantized=dequantized_blocks(spec, config),
            no_quack=no_quack,
            fused_width=max(
                (feed_forward.intermediate_size for feed_forward in dense), default=0
            ),
            experts=tuple(
                feed_forward
                for feed_forward in feed_forwards
                if isinstance(feed_forward, MoE)
            ),
            recurrent=spec.has_states,
            max_rows=config.max_num_seqs,
            context=min(config.max_model_len, spec.max_position_embeddings),
        )

    @property
    def uses_flash(self) -> bool:
        """Whether flash-attn serves any group in any step."""
        return not self.all_captured and not all(group.no_flash for group in self.groups)

    def by_flash(
        self, tokens: int, longest: int, *, dequantized: bool = False
    ) -> tuple[bool, ...]:
        """Returns for each group whether flash-attn serves the chunks of a step with
        `tokens` prefill tokens, whose longest chunk has `longest`; `dequantized`:
        contexts in 8 bits are.
        """
        if tokens <= self.captured:
            return (False,) * len(self.groups)
        return tuple(
            0 < group.flash_from <= longest and (dequantized or not group.eight_bits)
            for group in self.groups
        )

    @property
    def may_dequantize(self) -> bool:
        """Whether contexts in 8 bits are dequantized in any step."""
        return not self.all_captured and self.dequantized > 0

    def dequantizes(self, tokens: int, longest: int, blocks: int) -> bool:
        """Returns whether contexts in 8 bits are dequantized for the chunks of a step
        with `tokens` prefill tokens, whose longest chunk has `longest`, and with at most
        `blocks` blocks of all contexts.
        """
        wide = self.may_dequantize and tokens > self.captured
        return wide and longest >= MIN_DEQUANTIZE_TOKENS and blocks <= self.dequantized

    def splits(self, rows: int, context: int) -> tuple[int, ...]:
        """Returns the number of ranges into which each group's contexts of up to
        `context` tokens are cut for `rows` decode rows.
        """
        return tuple(group.splits(rows, context) for group in self.groups)

    @property
    def may_expand(self) -> bool:
        """Whether latents are expanded in any step."""
        return not self.all_captured and any(group.latents for group in self.groups)

    def expands(self, tokens: int, longest: int, history: int, pairs: int) -> bool:
        """Returns whether latents are expanded for the chunks of a step with `tokens`
        prefill tokens, whose longest chunk has `longest`, with `history` tokens before
        the chunks and `pairs` of an input and a token that it attends to. Absorbed
        queries serve the others, and all steps that CUDA graphs may contain: how many
        pieces there are depends on the history.
        """
        wide = self.may_expand and tokens > self.captured and longest >= MIN_EXPAND_TOKENS
        return wide and pairs >= MIN_EXPAND_TOKENS * history

    def expands_by_flash(self, tokens: int, longest: int) -> bool:
        """Returns whether flash-attn attends to expanded latents in such a step: if all
        tokens are of one chunk, as it reads keys beside a chunk's, which may be another
        sequence's, and not finite.
        """
        served = not all(group.no_flash for group in self.groups if group.latents)
        return served and longest == tokens

    def variants(self, rows: int, splits: tuple[int, ...]) -> object:
        """Returns a key of the kernels of all groups for `rows` decode rows."""
        return tuple(map(GroupRoute.variant, self.groups, (rows,) * len(splits), splits))

    def fuses(self, tokens: int) -> bool:
        """Returns whether quack's product of gate and up with their activation serves
        `tokens` tokens: it is faster than cuBLAS's with the activation after it.
        """
        return not self.no_quack and is_gated_faster(tokens, self.fused_width)

    def described(self) -> list[tuple[str, str]]:
        """Returns lines for `minfer plan`: one for each use, of each group."""
        filled = f"{MIN_FILLED_SHARE:.0%} full"
        activation = f"quack where its tiles are {filled}, else cuBLAS and Triton"
        if self.no_quack:
            activation = f"cuBLAS and Triton; no quack: {self.no_quack}"
        lines = [line for group in self.groups for line in self._attention(group)]
        lines.append(("gate, up and activation", activation))
        lines += [("experts", _experts(moe)) for moe in self.experts]
        if self.recurrent:
            lines.append(("recurrent layers", RECURRENT))
        return [*dict.fromkeys(lines)]

    def _attention(self, group: GroupRoute) -> list[tuple[str, str]]:
        """Returns the lines of a group."""
        has_several = len({route.name for route in self.groups}) > 1
        name = f", {group.name}" if has_several else ""
        splits = group.splits(self.max_rows, self.context)
        tokens, rows = counted(self.context, "token"), counted(self.max_rows, "row")
        decode = f"Triton; contexts of {tokens} are cut into {splits} for {rows}, into "
        decode += f"{group.splits(1, self.context)} for one"
        return [
            (f"decode attention{name}", decode),
            (f"prefill attention{name}", self._chunks(group)),
        ]

    def _chunks(self, group: GroupRoute) -> str:
        no_flash = group.no_flash
        if not no_flash and self.all_captured:
            no_flash = (
                "all steps are small enough for CUDA graphs, which it cannot be part of"
            )
        if group.latents and self.may_expand:
            kernels = f"Triton; no flash-attn: {no_flash}"
            if not no_flash:
                kernels = "flash-attn for one prompt in a step, Triton for several"
            return (
                f"expanded latents from {MIN_EXPAND_TOKENS} tokens of a prompt at once "
                f"in steps of more than {self.captured} ({kernels}); else absorbed "
                f"queries, Triton"
            )
        if self.may_dequantize:
            return (
                f"contexts dequantized from {MIN_DEQUANTIZE_TOKENS} tokens of a prompt "
                f"at once in steps of more than {self.captured}, else read in 8 bits; "
                f"{self._kernels(group, no_flash)}"
            )
        return self._kernels(group, no_flash)

    def _kernels(self, group: GroupRoute, no_flash: str) -> str:
        if no_flash:
            return f"Triton; no flash-attn: {no_flash}"
        return (
            f"flash-attn from {group.flash_from} tokens of a prompt at once in steps of "
            f"more than {self.captured}, else Triton"
        )


def _experts(moe: MoE) -> str:
    shared = 1 if moe.has_equal_shared else 0
    grouped = grouped_from(moe.rule.top_k + shared, moe.experts + shared)
    described = f"Triton; grouped by expert from {grouped} tokens of a step"
    if shared:
        described += (
            f"; up to {MAX_TOKENS_WITH_SHARED} tokens, the shared expert is one of them "
            f"unless adapters change it or it is quantized otherwise"
        )
    return described


def _no_quack(dense: list[Dense]) -> str:
    """Returns why quack cannot serve these feed-forwards; empty if it can."""
    if not dense:
        return "all layers are mixtures of experts"
    if any(feed_forward.bias for feed_forward in dense):
        return "it adds no biases"
    for feed_forward in dense:
        if feed_forward.activation not in QUACK_ACTIVATIONS:
            return f"it has no {feed_forward.activation} between gate and up"
    return ""
