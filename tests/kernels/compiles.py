"""Compile the kernels for a Hopper GPU where there is none: `python -m
tests.kernels.compiles`.

The interpreter runs kernels as Python, whatever a compiler would say of them. Here they
are compiled as a step of Qwen2.5 7B wants them, and of mixtures of experts as layers of
Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3 do, and not run. Prints seconds and the name of
each. With `--few`, products and attention, which take longest, are left out, and sampling
from float32.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minfer import kernels
from minfer.kernels import (
    activation,
    attention,
    dequantized_contexts,
    expanded_latents,
    experts,
    fused_linear,
    head_gates,
    heads_norm,
    latent_cache,
    logprobs,
    masked_logits,
    mla,
    norm,
    page_copy,
    peer_sum,
    rope,
    router,
    rows,
    sample,
    scaled_logits,
    shape,
    verify_drafts,
)
from minfer.kernels.cache_numbers import FP8, INT8, CacheScales
from minfer.kernels.dequantized_work import DequantizedWork
from minfer.kernels.experts_tunes import GROUPED_TABLE, ExpertsTune
from minfer.kernels.leaves import (
    UNGATED,
    Activation,
    ChosenExperts,
    ExpertRouter,
    Experts,
    Linear,
    Norm,
    RoutingRule,
    WholeNorms,
)
from minfer.kernels.row_state import Penalties, RowTensors, StepInputs
from minfer.kernels.sample_reference import SamplingValues

from .specialization import Elsewhere

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 3584, 18_944, 28, 4, 128, 152_064, 64
QKV = (HEADS + 2 * KV_HEADS) * DIM
LATENT, ROTATED = 512, 64  # of DeepSeek's MLA
HOPPER = (9, 0)
SHARED = 227 << 10  # bytes of shared memory that a program may have
run, seen = JITFunction.run, set[object]()


def compiled(
    kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any
) -> Any:
    """Instead of a launch."""
    del warmup
    began, options["launch_pdl"] = time.perf_counter(), True
    binary = run(kernel, *arguments, grid=grid, warmup=True, **options)
    assert binary.metadata.shared <= SHARED, (
        f"{kernel.__name__}: {binary.metadata.shared}"
    )
    if binary.hash not in seen:
        seen.add(binary.hash)
        module = kernel.__module__.rpartition(".")[2]
        print(f"{time.perf_counter() - began:.2f} {module}.{kernel.__name__}", flush=True)
    return binary


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def matrix(outputs: int, inputs: int, bias: bool = False) -> Linear:
    bias_vector = half(outputs) if bias else None
    return Linear(weight=half(outputs, inputs), bias=bias_vector, parts=(outputs,))


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def cache() -> tuple[Tensor, Tensor]:
    return half(32, BLOCK, KV_HEADS, DIM), half(32, BLOCK, KV_HEADS, DIM)


def step(tokens: int, *, splits: int = 1, chunk: bool = False) -> None:
    """Launch what a step of `tokens` rows does, or one chunk of `tokens` inputs."""
    indices, slots, table, single = (
        ints(tokens),
        ints(tokens).long(),
        ints(9, 32),
        ints(1),
    )
    chunk_inputs = ints(3, tokens) if chunk else None
    state = RowTensors(indices, indices, table[None], 8)
    inputs = StepInputs(indices, indices, indices, slots[None])
    rows.gather(indices[: 0 if chunk else tokens], chunk_inputs, state, BLOCK, inputs)
    x, scale, turns, caches = (
        half(tokens, HIDDEN),
        Norm(half(HIDDEN), 1e-6),
        torch.empty(99, DIM),
        cache(),
    )
    qkv = fused_linear.norm_linear(x, scale, matrix(QKV, HIDDEN, bias=True))
    rope.rope_and_cache(qkv, turns, indices, slots, *caches, HEADS, KV_HEADS)
    of_heads = Norm(half(DIM), 1e-6)
    kv = half(tokens, 2 * KV_HEADS * DIM)  # of a draft head: without queries
    rope.rope_and_cache(
        *(kv, turns, indices, slots, *caches, 0, KV_HEADS, of_heads, of_heads)
    )
    for norms_last in (False, True):
        rope.rope_and_cache(
            qkv,
            turns,
            indices,
            slots,
            *caches,
            HEADS,
            KV_HEADS,
            of_heads,
            of_heads,
            norms_last=norms_last,
        )
    attended = half(tokens, HEADS * DIM)
    head_gates.gate_heads(attended, half(tokens, HEADS), "softplus")
    head_gates.gate_heads(attended, half(tokens, HEADS * DIM), "sigmoid")
    whole_norms = WholeNorms(Norm(half(HEADS * DIM), 1e-6), Norm(half(4 * DIM), 1e-6))
    heads_norm.norm_heads(qkv, whole_norms)
    squares = heads_norm.square_sums(qkv, whole_norms)
    heads_norm.norm_heads(qkv, whole_norms, squares, ranks=2)
    q = qkv.view(tokens, -1, DIM)[:, :HEADS]
    if chunk:
        attention.prefill_attention(
            q, *caches, table, single, single, single, single, 0.1, max_count=tokens
        )
    else:
        attention.decode_attention(
            q, *caches, table, indices, indices, 0.1, splits=splits
        )
    fused_linear.linear_add(x, half(tokens, HIDDEN), matrix(HIDDEN, HIDDEN))
    fused_linear.norm_gated(x, scale, matrix(2 * INNER, HIDDEN))
    fused_linear.linear_add(x, half(tokens, INNER), matrix(HIDDEN, INNER))
    rows.advance(indices, indices, indices, indices, state, indices)


def peer_sums() -> None:
    """Sums over four ranks, of few tokens and of many."""
    calls, flags = (torch.zeros(n, dtype=torch.int64) for n in (peer_sum.PROGRAMS, 4))
    halves = tuple(half(2 * 1024 * HIDDEN) for _ in range(4))
    buffer = peer_sum.PeerBuffer(1, halves, flags, calls)
    for two in (False, True):
        peer_sum.peer_sum(half(8, HIDDEN), buffer, half(8, HIDDEN), two)
        peer_sum.peer_sum(half(1024, HIDDEN), buffer, None, two)


def capped(splits: int) -> None:
    """Attention with capped scores: a decode step, and a chunk; and capped logits."""
    indices, single, table = ints(8), ints(1), ints(9, 32)
    reads: dict[str, Any] = {"window": 1024, "cap": 50.0, "splits": splits}
    q = half(64, HEADS, DIM)
    attention.decode_attention(q[:8], *cache(), table, indices, indices, 0.1, **reads)
    chunk = single, single, single, single
    attention.prefill_attention(q, *cache(), table, *chunk, 0.1, max_count=64, **reads)
    scaled_logits.scale_logits(half(8, 5000), 0.5, 30.0)


def wide_heads() -> None:
    """Heads of 512 dimensions: decode steps, and a chunk."""
    table, indices, single = ints(9, 32), ints(8), ints(1)
    q, caches = half(512, 8, 512), (half(32, BLOCK, 1, 512), half(32, BLOCK, 1, 512))
    for splits in (1, 4):
        attention.decode_attention(
            q[:8], *caches, table, indices, indices, 1.0, splits=splits
        )
    chunk = single, single, single, single
    attention.prefill_attention(q, *caches, table, *chunk, 1.0, max_count=512)


def keys_of_others() -> None:
    """Rotation where keys are values, and where keys are of another layer."""
    norm, turns = Norm(torch.ones(DIM), 1e-6), torch.empty(9, DIM)
    for tokens in (4, 999):
        positions = ints(tokens)
        for keys in (KV_HEADS, 0):
            arguments = half(tokens, QKV), turns, positions, positions.long(), *cache()
            rope.rope_and_cache(
                *(*arguments, HEADS, keys, norm, norm),
                v_norm=norm if keys else None,
                keys_are_values=keys > 0,
            )


def limited(splits: int) -> None:
    """Attention of a window beside sink tokens, and within chunks of positions: a decode
    step, and inputs of a row.
    """
    indices, single, table = ints(8), ints(1), ints(9, 32)
    q, inputs = half(64, HEADS, DIM), (single, single, single, single)
    for limit in ({"sink_tokens": 4}, {"chunked": True}):
        reads: dict[str, Any] = {"window": 1024, "splits": splits, **limit}
        attention.decode_attention(q[:8], *cache(), table, indices, indices, 0.1, **reads)
        attention.prefill_attention(
            q, *cache(), table, *inputs, 0.1, max_count=64, **reads
        )


def eight_bits(skip_slow: bool) -> None:
    """Caches in 8 bits: what writes them, and attention of rows, drafts and a chunk."""
    indices, table = ints(4), ints(9, 32)
    for dtype in (FP8, INT8):
        keys, values = (cache_part.to(dtype) for cache_part in cache())
        scale = torch.zeros(keys.shape[:3])
        scales = CacheScales(scale, scale) if dtype is INT8 else None
        for tokens in (4, 999):
            qkv, turns, positions = half(tokens, QKV), torch.empty(9, DIM), ints(tokens)
            rope.rope_and_cache(
                *(qkv, turns, positions, positions.long(), keys, values, HEADS, KV_HEADS),
                scales=scales,
            )
        work = DequantizedWork.of(indices, indices, indices, 32, 9, BLOCK)
        for window, sink_tokens in ((0, 0), (64, 4)):
            dequantized_contexts.dequantize_contexts(
                *(work, table, keys, values, scales, torch.bfloat16),
                window=window,
                sink_tokens=sink_tokens,
            )
        q = half(512, HEADS, DIM)
        for splits in () if skip_slow else (1, 8):
            attention.decode_attention(
                *(q[:4], keys, values, table, indices, indices, 0.1),
                scales=scales,
                splits=splits,
            )
        for count, layout in (
            () if skip_slow else ((512, None), (5, attention.DraftLayout(4, 4)))
        ):
            attention.prefill_attention(
                *(q, keys, values, table, indices, indices, indices, indices, 0.1),
                scales=scales,
                max_count=count,
                draft_layout=layout,
            )
    latent, norm = half(4, LATENT + ROTATED), Norm(half(LATENT), 1e-6)
    latents, turns = half(32, BLOCK, LATENT + ROTATED).to(FP8), torch.empty(9, ROTATED)
    latent_cache.write_latent(
        *(latent, norm, turns, indices, indices.long(), latents, half(4, 16, ROTATED)),
        interleaved=False,
    )
    if not skip_slow:
        q = half(4, 16, LATENT + ROTATED)
        mla.latent_decode(
            *(q, latents, table, indices, indices, 0.1), value_dim=LATENT, splits=8
        )


def drafts_to_verify(splits: int) -> None:
    """Attention of two rows with four drafts each, beside another row."""
    q, indices, draft_layout = (
        half(11, HEADS, DIM),
        ints(2),
        attention.DraftLayout(skip=3, stride=2),
    )
    attention.prefill_attention(
        q,
        *cache(),
        ints(9, 32),
        *(indices, indices, indices, indices),
        0.1,
        max_count=5,
        splits=splits,
        draft_layout=draft_layout,
    )


def mixture(tokens: int, tune: ExpertsTune | None) -> None:
    """Layers of experts: silu, clamped with biases, of weighed inputs, and ungated."""
    shapes: tuple[tuple[int, int, int, Activation], ...] = (
        (2048, 768, 8, "silu"),
        (2880, 2880, 4, "clamped"),
        (5120, 8192, 1, "silu"),
        (2688, 1856, 6, "ungated_relu2"),
    )
    for hidden, inter, top_k, kind in shapes:
        biased = kind == "clamped"
        parts = (inter,) if kind in UNGATED else (inter, inter)
        layer = Experts(
            gate_up=Linear(
                weight=half(2, sum(parts), hidden),
                bias=half(2, sum(parts)) if biased else None,
                parts=parts,
            ),
            down=Linear(
                weight=half(2, hidden, inter),
                bias=half(2, hidden) if biased else None,
                parts=(hidden,),
            ),
            activation=kind,
            weighs_inputs=top_k == 1,
        )
        choice = ChosenExperts(ints(tokens, top_k), torch.ones(tokens, top_k))
        x = half(tokens, hidden)
        experts.add_experts(x, x, layer, choice, tune)


def routers() -> None:
    """Qwen3's, Qwen3-Next's, Llama 4's, and those that compute in float32: DeepSeek-V3's
    and Ernie's.
    """
    rule = RoutingRule(
        8, "sigmoid", groups=8, kept_groups=4, ranked_by="best_two", scaling=2.5
    )
    x, real, correction = (
        half(4, HIDDEN),
        torch.ones(4, dtype=torch.bool),
        torch.ones(256),
    )
    router.route(x, ExpertRouter(weight=half(128, HIDDEN), rule=RoutingRule(8)))
    with_shared = ExpertRouter(
        weight=half(512, HIDDEN),
        rule=RoutingRule(10),
        shared=True,
        shared_gate=half(1, HIDDEN),
    )
    router.route(x, with_shared, real)
    first = RoutingRule(1, "sigmoid", by_logits=True, normalise=False)
    router.route(x, ExpertRouter(weight=half(128, HIDDEN), rule=first))
    wide = ExpertRouter(weight=torch.empty(256, HIDDEN), correction=correction, rule=rule)
    router.route(x, wide, real)
    rule = RoutingRule(6, min_sum=1e-12, logit_cap=30.0)
    weight, correction = torch.empty(64, HIDDEN), torch.ones(64)
    router.route(x, ExpertRouter(weight=weight, correction=correction, rule=rule))


def latents(heads: int) -> None:
    """MLA's attention: of four rows, cut and not, of their drafts, and of a chunk."""
    indices, single, table, cache_of_latents = (
        ints(4),
        ints(1),
        ints(9, 32),
        half(32, BLOCK, LATENT + ROTATED),
    )
    q = half(512, heads, LATENT + ROTATED)
    drafts = attention.DraftLayout(skip=4, stride=4)
    for splits in (1, 8):
        mla.latent_decode(
            *(q[:4], cache_of_latents, table, indices, indices, 0.1),
            value_dim=LATENT,
            splits=splits,
        )
        for count in (2, 4):
            mla.latent_attention(
                *(q, cache_of_latents, table, indices, indices, indices, indices, 0.1),
                value_dim=LATENT,
                max_count=count,
                splits=splits,
                draft_layout=drafts,
            )
    mla.latent_attention(
        *(q, cache_of_latents, table, single, single, single, single, 0.1),
        value_dim=LATENT,
        max_count=512,
    )


def expanded() -> None:
    """MLA's attention of a chunk over expanded latents: its own, and a piece of its
    history.
    """
    q, keys, turned = half(512, 16, 192), half(999, 16, 256), half(999, ROTATED)
    out, sums = half(512, 16, 128), torch.zeros(512, 16)
    for causal in (True, False):
        expanded_latents.piece_attention(
            *(q, keys, turned, ints(2), ints(2), 0.1),
            longest=512,
            causal=causal,
            out=out,
            sums=sums,
        )
    expanded_latents.merge_piece(torch.zeros(512, 16, 128), sums, out, sums)


def main(skip_slow: bool) -> None:
    driver.set_active(Elsewhere(HOPPER))
    JITFunction.run = compiled
    kernels.interpreting = True  # kernels take tensors of the CPU
    torch.nn.functional.linear = lambda x, weight, *_: x.new_empty(
        len(x), len(weight)
    )  # cuBLAS'
    if not skip_slow:
        step(1, splits=32)
        step(8, splits=4)
        step(256)
        step(512, chunk=True)
        for splits in (1, 4):
            drafts_to_verify(splits)
            limited(splits)
            capped(splits)
        wide_heads()
        mixture(1, None)
        for row in GROUPED_TABLE:
            mixture(4, row.tune)
        for heads in (16, 128):
            latents(heads)
        expanded()
    routers()
    keys_of_others()
    rows.scatter(ints(99), ints(8))
    page_copy.copy_pages(torch.empty(8, 4096, dtype=torch.uint8), ints(3, 2).long())
    peer_sums()
    norm.normalise(half(512, HIDDEN), Norm(half(HIDDEN), 1e-6), half(512, HIDDEN))
    layer_norm = Norm(half(HIDDEN), 1e-6, half(HIDDEN), centered=True)
    norm.normalise(half(512, HIDDEN), layer_norm)
    activation.gated_mul(half(512, 2 * INNER))
    for ungated in sorted(UNGATED):
        activation.gated_mul(half(512, INNER), ungated)
    indices, ones, turns, norms = (
        ints(4),
        torch.ones(4),
        torch.empty(9, DIM),
        Norm(half(DIM), 1e-6),
    )
    rope.rope_and_cache(
        half(4, QKV),
        turns,
        indices,
        indices.long(),
        *cache(),
        HEADS,
        KV_HEADS,
        norms,
        norms,
    )
    rope.rope_and_cache(
        half(4, QKV),
        turns,
        indices,
        indices.long(),
        *cache(),
        HEADS,
        KV_HEADS,
        Norm(half(HEADS, DIM), 1e-6, centered=True),
        Norm(half(KV_HEADS, DIM), 1e-6, centered=True),
    )
    rope.rope_and_cache(
        *(half(4, QKV), turns, indices, indices.long(), *cache(), HEADS, KV_HEADS),
        query_scales=ones,
    )
    eight_bits(skip_slow)
    latent = half(4, LATENT + ROTATED), Norm(half(LATENT), 1e-6)
    latent_cache.write_latent(
        *latent,
        torch.empty(9, ROTATED),
        *(indices, indices.long()),
        half(32, BLOCK, LATENT + ROTATED),
        half(4, 16, ROTATED),
    )
    latent_cache.write_latent(
        *latent,
        torch.empty(9, ROTATED),
        *(indices, indices.long()),
        half(32, BLOCK, LATENT + ROTATED),
        half(4, 16, LATENT + ROTATED)[..., LATENT:],
        query_scales=ones,
        plain_dim=LATENT,
    )
    values = SamplingValues(ones, indices, ones, ones, ones)
    for logits in (half(4, VOCAB), *[torch.empty(4, VOCAB)] * (not skip_slow)):
        draws = logits, indices, values, indices.long(), indices
        sample.sample(*draws, filtered=False)
        sample.sample(*draws)
    draws = half(4, sample.SIZES.chunk), indices, values, indices.long(), indices
    sample.sample_divided(*draws, vocab=VOCAB, first=0, exchange=lambda part: part)
    masked_logits.mask_logits(half(9, VOCAB), indices, ints(4, VOCAB // 32))
    masked_logits.store_logits(half(8, VOCAB), indices, half(9, VOCAB), 8)
    shaping = shape.ShapingState.make(9, VOCAB, indices.device)
    penalties = Penalties(ones, ones, ones)
    shape.shape(half(4, VOCAB), indices, indices, penalties, shaping)
    shape.count(indices, indices, indices, indices, shaping)
    logprobs.logprobs(half(4, VOCAB), indices, indices, indices, ints(4, 2, 21))
    state = RowTensors(indices, indices, ints(1, 9, 32), 8)
    verify_drafts.write_draft_inputs(
        indices, indices, ints(3, 4), ints(3, 4), state, ints(3, 12)
    )
    verify_drafts.accept_drafts(
        indices, indices, indices, state, 0, indices, indices, indices
    )


if __name__ == "__main__":
    main(skip_slow="--few" in sys.argv)
