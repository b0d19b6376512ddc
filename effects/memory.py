"""The memory plan: what a model needs, and what fits, from its config.json alone.

Theory. Memory holds four things:

    weights       parameters x bytes of an element
    activations   what one forward of `max_num_batched_tokens` tokens keeps at its widest place,
                  the masks of a prompt chunk against a full context and against each sliding
                  window, the logits of `max_num_seqs` rows with the sampler's float32 copies,
                  and the rotary table
    KV cache      num_blocks x block_size x bytes a token leaves in all layers
    workspace     attention gathers one layer's keys and values of the batch: one layer's share of
                  the cache, and float32 copies of narrower types (an estimate: rows that share a
                  prefix may need more). Measured on the bundled model, 64 rows of 1,000 tokens:
                  435 MiB in all where 420 were planned in float32

The first two are fixed by the settings, the last two grow with the number of blocks, so that number
is what is left divided by what a block costs. It is capped at what `max_num_seqs` sequences of full
length can fill. How many blocks a sequence needs is the engine's own arithmetic (`objection` in
minfer/engine.py): the last token of a sequence is never an input, so it needs no slot.

Everything here but `available_memory` is a function of its arguments. Nothing imports torch.
"""

import os
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from minfer.blocks import blocks_for
from minfer.config import ConfigError
from minfer.effects.spec import ModelSpec, dtype_bytes, kv_bytes_per_token, weight_bytes

CPU_SHARE: Final = 0.5  # of available memory: a computer's memory serves others too
CUDA_SHARE: Final = 0.9  # of a GPU's: vLLM's default, as nobody else should be on it
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class NotEnoughMemoryError(ConfigError):
    """The model, or one sequence of full length, does not fit into the memory there is."""


def size_text(count: int) -> str:
    """A number of bytes for people: "1.50 GiB"."""
    for unit, size in _UNITS:
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


@frozen(kw_only=True)
class Sizes:
    """The settings that memory depends on. Names are vLLM's; lengths and budgets in tokens."""

    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@frozen(kw_only=True)
class MemoryPlan:
    """Where memory goes; sizes in bytes. `limit` is None where nothing was to be respected."""

    dtype: str
    sizes: Sizes
    context: int  # tokens the model was made for: no sequence can be longer
    limit: int | None
    weights: int
    activations: int
    kv_per_token: int
    block_bytes: int  # of the cache
    workspace_per_block: int
    num_blocks: int

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
        return self.weights + self.activations + self.kv_cache + self.workspace

    @property
    def largest_context(self) -> int:
        """The most tokens, prompt and output together, that one sequence alone can have."""
        return min(self.context, self.num_blocks * self.sizes.block_size + 1)

    def largest_batch(self, context: int) -> int:
        """How many sequences of `context` tokens fit at once; 0 if not even one does."""
        if context > self.context:
            return 0
        fit = self.num_blocks // blocks_for(context, self.sizes.block_size)
        return min(self.sizes.max_num_seqs, fit)


def activation_bytes(spec: ModelSpec, dtype: str, sizes: Sizes) -> int:
    """What a forward and the sampler hold besides weights and cache, at most."""
    element = dtype_bytes(dtype)
    qkv = spec.q_size + 2 * spec.kv_size
    # Rotation works in float32: for narrower types the turned heads exist twice more in it.
    rotation = qkv * (element if element == 4 else 8)
    attention = (qkv + 2 * spec.q_size) * element + rotation
    feed_forward = 3 * spec.intermediate_size * element
    token = 2 * spec.hidden_size * element + max(attention, feed_forward)
    beside = sizes.max_num_batched_tokens + sizes.block_size
    keys = (sizes.max_model_len if w is None else w + beside for w in set(spec.windows))
    # Of one query: float32, and the boolean it is made from.
    mask = sum(5 * min(count, sizes.max_model_len) for count in keys)
    row = spec.vocab_size * (element + 3 * 4)  # logits, float32 copy, noise, sorted or masked copy
    rope = 0 if spec.rope is None else sizes.max_model_len * 2 * spec.head_dim * 4
    return sizes.max_num_batched_tokens * (token + mask) + sizes.max_num_seqs * row + rope


def _widening(dtype: str) -> int:
    """How often attention holds what it gathers: the CPU's copies narrow types into float32."""
    return 1 if dtype_bytes(dtype) == 4 else 3


def plan_memory(
    spec: ModelSpec,
    *,
    dtype: str,
    sizes: Sizes,
    limit: int | None,
    kv_cache_memory: int | None = None,
    num_blocks: int | None = None,
) -> MemoryPlan:
    """Divide `limit` bytes, or say why that cannot be done.

    `kv_cache_memory` (bytes) or `num_blocks` fix the cache by hand: then the limit is not looked
    at, only whether one sequence of full length fits. Raises NotEnoughMemoryError.
    """
    per_token = kv_bytes_per_token(spec, dtype)
    plan = MemoryPlan(
        dtype=dtype,
        sizes=sizes,
        context=spec.max_position_embeddings,
        limit=limit,
        weights=weight_bytes(spec, dtype),
        activations=activation_bytes(spec, dtype, sizes),
        kv_per_token=per_token,
        block_bytes=per_token * sizes.block_size,
        workspace_per_block=per_token * sizes.block_size // spec.layers * _widening(dtype),
        num_blocks=0,
    )
    per_sequence = blocks_for(sizes.max_model_len, sizes.block_size)
    useful = sizes.max_num_seqs * per_sequence
    if num_blocks is not None:
        blocks = num_blocks
    elif kv_cache_memory is not None:
        blocks = kv_cache_memory // plan.block_bytes
    elif limit is None:
        blocks = useful
    else:
        left = limit - plan.weights - plan.activations
        if left < plan.block_bytes + plan.workspace_per_block:
            raise _nothing_left(plan, limit)
        blocks = min(useful, left // (plan.block_bytes + plan.workspace_per_block))
    if blocks < per_sequence:
        raise _too_long(plan, blocks, per_sequence)
    return evolve(plan, num_blocks=blocks)


def _nothing_left(plan: MemoryPlan, limit: int) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(
        f"the model needs {size_text(plan.weights)} for weights ({plan.dtype}) and "
        f"{size_text(plan.activations)} for activations, which leaves no room for a KV cache in "
        f"the {size_text(limit)} that may be used; lower --max-num-batched-tokens, "
        "--max-num-seqs or --max-model-len, choose a smaller --dtype or model, or set "
        "--kv-cache-memory-bytes to decide for yourself"
    )


def _too_long(plan: MemoryPlan, blocks: int, needs: int) -> NotEnoughMemoryError:
    size, wants = plan.sizes.block_size, plan.sizes.max_model_len
    fits = min(plan.context, blocks * size + 1) if blocks else 0
    shorter = f"--max-model-len {fits}" if fits > 1 else "a smaller --block-size"
    return NotEnoughMemoryError(
        f"one sequence of {wants} tokens (--max-model-len) needs {needs} KV blocks of {size} "
        f"tokens, {size_text(needs * plan.block_bytes)}, but the cache has {blocks}, "
        f"{size_text(blocks * plan.block_bytes)}; use {shorter}, or raise "
        "--kv-cache-memory-bytes, --num-gpu-blocks-override or --gpu-memory-utilization"
    )


def available_memory() -> int:
    """Bytes of main memory that a new process can use without swapping, within its control group.

    Looks at the system: the one function here that is not pure.
    """
    available = _from_meminfo()
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = (group / "memory.current").read_text().strip()
        if limit != "max":
            available = min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass  # no control group of the second version, or no limit in it
    return available


def _from_meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    return None


def describe(plan: MemoryPlan, model: str) -> str:
    """The plan as `minfer plan` prints it."""
    sizes = plan.sizes
    limit = "no limit" if plan.limit is None else f"of {size_text(plan.limit)} that may be used"
    rows = [
        ("model", model),
        ("dtype", plan.dtype),
        ("weights", size_text(plan.weights)),
        ("activations", f"{size_text(plan.activations)} (estimated)"),
        ("attention workspace", f"{size_text(plan.workspace)} (estimated)"),
        ("KV cache", f"{size_text(plan.kv_cache)} in {plan.num_blocks} blocks"),
        ("in all", f"{size_text(plan.total)} {limit}"),
        ("KV of a token", size_text(plan.kv_per_token)),
        ("KV of a block", f"{size_text(plan.block_bytes)} for {sizes.block_size} tokens"),
        ("largest context here", f"{plan.largest_context} tokens at batch 1"),
    ]
    contexts = {sizes.max_model_len, *(2**i for i in range(9, 40) if 2**i < sizes.max_model_len)}
    rows += [
        (f"largest batch at {context}", f"{plan.largest_batch(context)} sequences")
        for context in sorted(contexts)
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
