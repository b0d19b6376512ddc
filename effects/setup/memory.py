"""The memory plan: what a model needs, and what fits, from its config.json alone.

Theory. Memory holds four things:

    weights       bytes as they are stored: in the activations' dtype, in float32 (routers
                  of some models, Gemma's norms), or quantized, with scales
    activations   what one forward of `max_num_batched_tokens` tokens keeps at its widest
                  place, its masks against a full context and each sliding window, the
                  logits of `max_num_seqs` rows with the sampler's float32 copies, the
                  rotary table, and on a GPU the counts for penalties. Logits of rows
                  with a grammar are kept. Drafts are further tokens and rows; a draft
                  model's logits are kept for rejection sampling
    KV cache      num_blocks x block_size x bytes of a token in all layers; a state of
                  recurrent layers takes several of these blocks
    workspace     attention gathers one layer's share of the cache, and float32 copies of
                  narrower dtypes (an estimate: rows that share a prefix may need more).
                  Measured on the bundled model, 64 rows of 1,000 tokens, float32: 435 MiB
                  in all, 420 planned

The first two are fixed by the settings, the last two grow with the number of blocks, so
that number is the remaining memory divided by the cost of a block. On the CPU it is
capped at the blocks of `max_num_seqs` sequences of full length; a GPU's memory has no
other use. There, masks and workspace are not needed, but CUDA's libraries and graphs have
a share. Latents that are expanded at once are activations, as are contexts in 8 bits that
are dequantized. How many blocks a sequence needs is the engine's own arithmetic
(`objection` in minfer/lifecycle/arrive.py): its last token needs no slot.

All but `usable_memory` and `available_memory` are functions of their arguments, without
torch.
"""

import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from minfer.blocks.ownership import blocks_for
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import kv_dtype_bytes
from minfer.effects.models.layout.cache_layout import layout_for, page_bytes, plain_layout
from minfer.effects.models.layout.shapes import (
    activation_bytes,
    captured_tokens,
    cuda_activation_bytes,
    dequantized_context_bytes,
    expansion_bytes,
    head_activation_bytes,
    head_bytes,
    kept_logits_bytes,
    kv_bytes_per_token,
    layer_kv_bytes_per_token,
    shaping_bytes,
    weight_bytes,
)
from minfer.effects.models.layout.state_layout import state_bytes
from minfer.effects.setup.device import DeviceInfo
from minfer.records.config import CacheGroup, EngineConfig
from minfer.values.checks import ConfigError
from minfer.values.texts import counted

CPU_SHARE: Final = 0.5  # of available memory: a computer's memory has other users, too
# of a GPU's: vLLM's default, as the GPU should have no other user
CUDA_SHARE: Final = 0.9
# Buffers of copies to and from host memory, or a disk: two for each direction.
BUFFERS_PER_TIER: Final = 4
COPY_BUFFER_BYTES: Final = 1 << 24  # bytes of one; or one block, if that is larger
CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
# Bytes of a GPU: loaded kernels, libraries' workspaces, graphs, fragmentation.
LIBRARY_BYTES: Final = 1 << 30
# Of a gathered cache of 8 bits: the bytes, and two copies in float32.
EIGHT_BIT_COPY_BYTES: Final = 1 + 4 + 4


class NotEnoughMemoryError(ConfigError):
    """The model, or one sequence of full length, does not fit into memory."""


def size_text(count: int) -> str:
    """Returns a readable number of bytes: "1.50 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


@frozen(kw_only=True)
class MemoryPlan:
    """The use of memory; sizes in bytes. `limit` is None if there is no limit."""

    spec: ModelSpec  # with the layer of its draft head, if it has one
    sizes: EngineConfig  # without its `num_blocks`
    limit: int | None
    weights: int
    activations: int
    graphs: int  # of CUDA, and its libraries' own
    block_bytes: int  # of a page of the cache
    workspace_per_block: int
    num_blocks: int = 0
    draft: ModelSpec | None = None  # the draft model, which is included in all of these
    draft_weights: int = 0  # of that, or of a draft head
    adapters: int = 0  # of all slots of adapters

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache."""
        return self.num_blocks * self.block_bytes

    @property
    def workspace(self) -> int:
        """Bytes that attention gathers at most."""
        return self.num_blocks * self.workspace_per_block

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return (
            self.weights
            + self.adapters
            + self.activations
            + self.graphs
            + self.kv_cache
            + self.workspace
        )

    @property
    def largest_context(self) -> int:
        """The most tokens, prompt and output together, of a single sequence; 0: there is
        not even room for its state.
        """
        max_tokens, block_size = self.spec.max_position_embeddings, self.sizes.block_size
        first_too_large = bisect_right(
            range(max_tokens // block_size + 2),
            self.num_blocks,
            key=self.sizes.most_pages,
        )
        return max(0, min(max_tokens, (first_too_large - 1) * block_size + 1))

    def largest_batch(self, context: int) -> int:
        """Returns how many sequences of `context` tokens fit at once; 0 if not even one
        does.
        """
        if context > self.spec.max_position_embeddings:
            return 0
        blocks = blocks_for(context, self.sizes.block_size)
        fit = self.num_blocks // self.sizes.most_pages(blocks)
        return min(self.sizes.max_num_seqs, fit)


def plan_memory(
    spec: ModelSpec,
    sizes: EngineConfig,
    limit: int | None,
    *,
    kv_cache_memory: int | None = None,
    num_blocks: int | None = None,
    cuda: bool = False,
    draft: ModelSpec | None = None,
    tiers: int = 0,
    adapters: int = 0,
) -> MemoryPlan:
    """Divide `limit` bytes, of a GPU's memory if `cuda`; raises if that is impossible. A
    draft model has as many blocks as its target, and computes in turns with it. For each
    of the `tiers` there are buffers for copies. Slots of adapters take `adapters` bytes.

    `kv_cache_memory` (bytes) or `num_blocks` set the cache's size: then the limit is
    ignored, and only checked is whether one sequence of full length fits. Raises
    NotEnoughMemoryError.
    """
    weights, head = weight_bytes(spec, cuda=cuda), spec.draft_head
    draft_weights = 0 if draft is None else weight_bytes(draft, cuda=cuda)
    if head is not None:
        draft_weights = head_bytes(head, spec.dtype, cuda=cuda)
        spec = spec.with_head_layer()
    specs = [spec] if draft is None else [spec, draft]
    layout = layout_for(spec, sizes)
    block_bytes = page_bytes(spec, layout, sizes.block_size)
    if draft is not None:
        block_bytes += page_bytes(
            draft, plain_layout(draft, sizes.block_size), sizes.block_size
        )
    if cuda:
        tokens = sizes.max_num_batched_tokens
        max_captured_rows = captured_tokens(spec, tokens) + sizes.max_num_seqs
        graphs = LIBRARY_BYTES + max(
            cuda_activation_bytes(model_spec, sizes, max_captured_rows)
            for model_spec in specs
        )
        activations = max(
            cuda_activation_bytes(model_spec, sizes, tokens) for model_spec in specs
        )
        activations += shaping_bytes(spec, sizes) + expansion_bytes(spec, sizes)
        activations += dequantized_context_bytes(spec, sizes)
        largest_copy = block_bytes * max(group.pages for group in sizes.groups)
        activations += tiers * BUFFERS_PER_TIER * max(COPY_BUFFER_BYTES, largest_copy)
    else:
        graphs = 0
        activations = max(activation_bytes(model_spec, sizes) for model_spec in specs)
    activations += kept_logits_bytes(spec, sizes)
    if head is not None:
        activations += head_activation_bytes(head, spec.dtype, sizes)
    activations += layout.state_pages * block_bytes  # of padding rows
    workspace_sizes = (
        layer_kv_bytes_per_token(model_spec) * _gathered_copies(model_spec, cuda)
        for model_spec in specs
    )
    plan = MemoryPlan(
        spec=spec,
        sizes=sizes,
        limit=limit,
        weights=weights + draft_weights,
        activations=activations,
        graphs=graphs,
        block_bytes=block_bytes,
        workspace_per_block=max(workspace_sizes) * sizes.block_size,
        draft=draft,
        draft_weights=draft_weights,
        adapters=adapters,
    )
    blocks_per_sequence = sizes.most_pages(
        blocks_for(sizes.max_model_len, sizes.block_size)
    )
    max_useful_blocks = sizes.max_num_seqs * blocks_per_sequence
    if num_blocks is not None:
        blocks = num_blocks
    elif kv_cache_memory is not None:
        blocks = kv_cache_memory // block_bytes
    elif limit is None:
        blocks = max_useful_blocks
    else:
        blocks = (limit - plan.total) // (block_bytes + plan.workspace_per_block)
        if blocks < 1:
            raise _no_cache_memory_error(plan, limit)
        blocks = blocks if cuda else min(max_useful_blocks, blocks)
    plan = evolve(plan, num_blocks=blocks)
    if blocks < blocks_per_sequence:
        raise _context_too_long_error(plan, blocks_per_sequence)
    return plan


def _gathered_copies(spec: ModelSpec, cuda: bool) -> int:
    """Returns how many copies of its gathered cache attention holds."""
    if cuda:
        return 0  # kernels read through the block table
    size = kv_dtype_bytes(spec.kv_dtype)
    if size == 1:
        return EIGHT_BIT_COPY_BYTES
    return 1 if size == 4 else 3  # and float32 copies of keys, values


def _no_cache_memory_error(plan: MemoryPlan, limit: int) -> NotEnoughMemoryError:
    adapters, remedy = "", ""
    if plan.adapters:
        slots = plan.sizes.adapter_slots
        adapters = f", {size_text(plan.adapters)} for {slots} adapters"
        remedy = "--max-loras, --max-lora-rank, "
    return NotEnoughMemoryError(
        f"the model needs {size_text(plan.weights)} for weights ({plan.spec.dtype})"
        f"{adapters} and {size_text(plan.activations)} for activations, which leaves no "
        f"room for a KV cache in the {size_text(limit)} that may be used; lower "
        f"{remedy}--max-num-batched-tokens, --max-num-seqs or --max-model-len, choose a "
        "smaller --dtype or model, or set --kv-cache-memory-bytes to decide for yourself"
    )


def _context_too_long_error(plan: MemoryPlan, num_needed: int) -> NotEnoughMemoryError:
    remedy = f"use --max-model-len {plan.largest_context}, or "
    if not plan.num_blocks:
        remedy = "use a smaller --block-size, or "
    state, pages = "", plan.sizes.state_pages
    if pages:
        size = size_text(pages * plan.block_bytes)
        state = f" ({pages} of them, {size}, for the state of its recurrent layers)"
        remedy = remedy if plan.largest_context > 1 else ""
    return NotEnoughMemoryError(
        f"one sequence of {plan.sizes.max_model_len} tokens (--max-model-len) needs "
        f"{num_needed} KV blocks of {plan.sizes.block_size} tokens, "
        f"{size_text(num_needed * plan.block_bytes)}{state}, but the cache has "
        f"{plan.num_blocks}, {size_text(plan.kv_cache)}; {remedy}raise "
        "--kv-cache-memory-bytes, --num-gpu-blocks-override or --gpu-memory-utilization"
    )


def usable_memory(device: DeviceInfo, share: float | None) -> int:
    """Returns the bytes that may be used of a device, by its default share unless another
    is given.
    """
    if device.kind == "cuda":
        return int(device.total * (share or CUDA_SHARE)) - (device.total - device.free)
    return int(available_memory() * (share or CPU_SHARE))


def available_memory() -> int:
    """Returns the bytes of main memory that a new process can use without swapping, in
    its control group. Raises ConfigError where the system does not report it.
    """
    available = _system_available_memory()
    if (limit := memory_limit()) is not None:
        with suppress(OSError, ValueError):
            used = int((CONTROL_GROUP / "memory.current").read_text())
            available = min(available, max(0, limit - used))
    return available


def memory_limit() -> int | None:
    """Returns the bytes that the control group may have; None: there is no limit."""
    with suppress(OSError, ValueError):  # no cgroup v2, or its limit is "max"
        return int((CONTROL_GROUP / "memory.max").read_text())
    return None


def _system_available_memory() -> int:
    """Returns Linux' available memory; elsewhere, all physical memory."""
    with suppress(OSError):  # not Linux
        match = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        if match:
            return int(match[1]) * 1024
    sysconf = getattr(os, "sysconf", None)  # Windows has none
    if sysconf is None:
        raise ConfigError(
            f"how much memory there is cannot be found out on {sys.platform}; set "
            "--kv-cache-memory-bytes, such as 1G"
        )
    return int(sysconf("SC_PAGE_SIZE")) * int(sysconf("SC_PHYS_PAGES"))


def _kv_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Returns lines about what is kept of a token."""
    layout = layout_for(plan.spec, plan.sizes)
    tokens = counted(plan.sizes.block_size, "token")
    token = kv_bytes_per_token(plan.spec)
    token += 0 if plan.draft is None else kv_bytes_per_token(plan.draft)
    if len(layout.block_groups) == 1:
        [group] = layout.block_groups
        block = ("KV of a block", f"{size_text(plan.block_bytes)} for {tokens}")
        rows = [("KV of a token", size_text(token)), block]
        if group.sink_tokens:
            rows.append(("attention reads", _window_text(group)))
        return [*rows, *_state_rows(plan)]
    groups = ", ".join(
        f"{group.pages} "
        + (f"({_window_text(group)})" if group.window else "(no window)")
        for group in layout.block_groups
    )
    layers = counted(layout.layers_a_page, "layer")
    page = f"{size_text(plan.block_bytes)} for {tokens} in {layers}"
    return [
        ("KV of a token", size_text(token)),
        ("KV of a page", f"{page}; {layout.padding:.0%} padding"),
        ("pages of a block", groups),
        *_state_rows(plan),
    ]


def _state_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Returns lines about the states of recurrent layers, if there are any."""
    pages, rows = plan.sizes.state_pages, plan.sizes.max_num_seqs
    if not pages:
        return []
    size = size_text(state_bytes(plan.spec))
    of_all = size_text(rows * pages * plan.block_bytes)
    blocks, num_rows = counted(rows * pages, "block"), counted(rows, "row")
    state = f"{size} ({plan.spec.state_dtype}) in {counted(pages, 'block')}"
    return [
        ("state of a sequence", state),
        ("states of all rows", f"{of_all} in {blocks}, for {num_rows}"),
    ]


def _window_text(group: CacheGroup) -> str:
    """Returns what a query reads in a group with a window."""
    sinks = f", {counted(group.sink_tokens, 'sink token')}" if group.sink_tokens else ""
    return f"window {group.window}{sinks}"


def describe(
    plan: MemoryPlan, model: str, model_rows: Iterable[tuple[str, str]] = ()
) -> str:
    """Returns the plan as `minfer plan` prints it, with `model_rows` lines after the
    model's.
    """
    sizes, blocks = plan.sizes, counted(plan.num_blocks, "block")
    other_memory = ("attention workspace", plan.workspace)
    if plan.graphs:
        other_memory = ("CUDA graphs, libraries", plan.graphs)
    limit = "no limit"
    if plan.limit is not None:
        limit = f"of {size_text(plan.limit)} that may be used"
    draft_rows = []
    if plan.draft_weights:
        drafter = "head" if plan.draft is None else "model"
        draft_rows = [(f"of that, a draft {drafter}'s", size_text(plan.draft_weights))]
    adapter_rows = []
    if plan.adapters:
        slots = f"{size_text(plan.adapters)} for {sizes.adapter_slots} at once"
        adapter_rows = [("adapters", slots)]
    rows = [
        ("model", model),
        *model_rows,
        ("dtype", plan.spec.dtype),
        *(
            [("matrices", quantization.text)]
            if (quantization := plan.spec.quantization)
            else []
        ),
        ("weights", size_text(plan.weights)),
        *draft_rows,
        *adapter_rows,
        ("activations", f"{size_text(plan.activations)} (estimated)"),
        (other_memory[0], f"{size_text(other_memory[1])} (estimated)"),
        ("KV cache", f"{size_text(plan.kv_cache)} in {blocks}"),
        ("in all", f"{size_text(plan.total)} {limit}"),
        *(("KV format", kept.text) for kept in plan.spec.kv_formats if kept.layers),
        *_kv_rows(plan),
        ("largest context here", f"{counted(plan.largest_context, 'token')} at batch 1"),
    ]
    contexts = [2**i for i in range(9, 40) if 2**i < sizes.max_model_len]
    for context in [*contexts, sizes.max_model_len]:
        batch = counted(plan.largest_batch(context), "sequence")
        rows.append((f"largest batch at {context:,}", batch))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
