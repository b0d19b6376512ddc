"""The experts of each token, out of a router's logits.

Theory. Routing is a chain of some twenty small operations in torch (scores, groups, a
sort, weights), whose launches would take longer than the experts of one token. Here the
logits are a product like others (fused_linear.py), and all else is one launch with a
program of one warp a token, which has its scores in registers, in a row for each group. A
score's *key* is an integer: its order, then its inverted id; so the largest key is the
best score's, or the lower id's of two that are equal, and each id is chosen once, NaN or
not. Top-k takes k maxima, one after the other: a reduction in a warp, 0.1 us each; a sort
would take longer for any k up to 16. A token's choice depends on its logits alone.

A shared expert is one more of a token's experts. Its gate is a product of one output,
which the token's program computes: a launch for it would take longer.

Roundings: as plain_experts.py, but exponentials and sums of float32 may differ in the
last places.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import fused_linear, on_triton, plain_experts
from minfer.kernels.leaves import ChosenExperts, ExpertRouter, Linear
from minfer.kernels.pdl import early, follow

WARP_SCORES: Final = 512  # of a warp
GATE_LANES: Final = 1024  # inputs of the shared expert's gate that are loaded at once
NONE = tl.constexpr(-(2**63))  # less than every key
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _key(score, ids):
    """The keys of ids with these scores: the larger is the better one's."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _best_groups(
    ranked,
    mask,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    best_two: tl.constexpr,
):
    """Which groups are the best, [groups, 1]: `ranked` [groups, experts of one]."""
    group = tl.arange(0, ranked.shape[0])
    place = tl.arange(0, ranked.shape[1])[None, :]
    keys = tl.where(mask, _key(ranked, place), NONE)
    best = tl.max(keys, 1)[:, None]
    score = tl.sum(tl.where(keys == best, ranked, 0.0), 1)
    if best_two:
        keys = tl.where(keys == best, NONE, keys)
        best = tl.max(keys, 1)[:, None]
        score += tl.sum(tl.where((keys == best) & mask, ranked, 0.0), 1)
    keys = tl.where(group < groups, _key(score, group), NONE)
    is_kept = group < 0
    for _ in tl.static_range(kept_groups):
        best = tl.max(keys, 0)
        is_kept = is_kept | (keys == best)
        keys = tl.where(keys == best, NONE, keys)
    return is_kept[:, None]


@triton.jit
def _shared_weight(row, gate, hidden: tl.constexpr, gate_lanes: tl.constexpr):
    """The weight of the shared expert: 1 without a gate."""
    weight = 1.0
    if gate is not None:
        acc = tl.zeros([gate_lanes], tl.float32)
        for first in tl.static_range(0, hidden, gate_lanes):
            lane = first + tl.arange(0, gate_lanes)
            x = tl.load(row + lane, mask=lane < hidden, other=0.0).to(tl.float32)
            w = tl.load(gate + lane, mask=lane < hidden, other=0.0).to(tl.float32)
            acc += x * w
        weight = 1 / (1 + tl.exp(-tl.sum(acc)))
    return weight


@triton.jit
def choose(
    logits,
    x,
    x_stride,
    shared_gate,
    correction,
    real,
    ids,
    weights,
    scaling,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    sigmoid: tl.constexpr,
    by_logits: tl.constexpr,
    normalise: tl.constexpr,
    min_sum: tl.constexpr,
    added: tl.constexpr,
    logit_cap: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    best_two: tl.constexpr,
    group_lanes: tl.constexpr,
    lanes: tl.constexpr,
    top_lanes: tl.constexpr,
    first_local_expert: tl.constexpr,
    num_local_experts: tl.constexpr,
    shared: tl.constexpr,
    hidden: tl.constexpr,
    gate_lanes: tl.constexpr,
):
    """Grid [tokens]: ids and weights [tokens, top_k + shared]."""
    follow()
    token = tl.program_id(0).to(tl.int64)
    experts_per_group: tl.constexpr = experts // groups
    group = tl.arange(0, group_lanes)[:, None]
    lane = tl.arange(0, lanes)[None, :]
    expert = group * experts_per_group + lane
    mask = (group < groups) & (lane < experts_per_group)
    line = logits + token * experts
    logit = tl.load(line + expert, mask=mask, other=NEVER).to(tl.float32)
    if logit_cap > 0:  # tanh(y) = 2 * sigmoid(2 * y) - 1
        capped = logit_cap * (2 / (1 + tl.exp(logit * (-2 / logit_cap))) - 1)
        logit = tl.where(mask, capped, NEVER)
    if sigmoid:
        scores = 1 / (1 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(logit))
        scores = powers / tl.sum(powers)
    ranked = logit if by_logits else scores
    if correction is not None:
        ranked += tl.load(correction + expert, mask=mask, other=0.0)
    if groups > kept_groups:
        group_mask = _best_groups(ranked, mask, groups, kept_groups, best_two)
        ranked = tl.where(group_mask, ranked, NEVER)
    keys = tl.where(mask, _key(ranked, expert), NONE)
    top = tl.arange(0, top_lanes)
    chosen = tl.zeros([top_lanes], tl.int32)
    chosen_scores = tl.zeros([top_lanes], tl.float32)
    total = 0.0
    for i in tl.static_range(top_k):
        best = tl.max(keys)
        score = tl.sum(tl.where(keys == best, scores, 0.0))
        keys = tl.where(keys == best, NONE, keys)
        chosen = tl.where(top == i, _id(best), chosen)
        chosen_scores = tl.where(top == i, score, chosen_scores)
        total += score
    if normalise:
        if min_sum > 0:
            total = tl.maximum(total, min_sum)
        else:
            total += added
        chosen_scores /= total
    if num_local_experts < experts:
        chosen -= first_local_expert
        chosen = tl.where((chosen >= 0) & (chosen < num_local_experts), chosen, -1)
    weight = chosen_scores * scaling
    if shared:
        share = _shared_weight(x + token * x_stride, shared_gate, hidden, gate_lanes)
        chosen = tl.where(top == top_k, experts, chosen)
        weight = tl.where(top == top_k, share, weight)
    if real is not None:
        chosen = tl.where(tl.load(real + token), chosen, -1)
    width: tl.constexpr = top_k + shared
    out_index = token * width + top
    tl.store(ids + out_index, chosen, mask=top < width)
    tl.store(weights + out_index, weight, mask=top < width)


def route(x: Tensor, router: ExpertRouter, real: Tensor | None = None) -> ChosenExperts:
    """Choose the experts of normalised tokens, as `plain_experts.route`.

    `x` [tokens, hidden]; `real` [tokens] bool is False for padding, which gets no expert.
    """
    if not on_triton(x) or not len(x):
        return plain_experts.route(x, router, real)
    rule = router.rule
    matrix = Linear(weight=router.weight, bias=router.bias, parts=(len(router.weight),))
    logits = fused_linear.linear(x.to(router.weight.dtype), matrix)
    tokens, experts = logits.shape
    width = rule.top_k + router.shared
    ids = x.new_empty(tokens, width, dtype=torch.int32)
    weights = x.new_empty(tokens, width, dtype=torch.float32)
    groups = rule.groups if rule.groups > rule.kept_groups else 1
    group_lanes = triton.next_power_of_2(groups)
    lanes = triton.next_power_of_2(experts // groups)
    choose[tokens,](
        logits=logits,
        x=x,
        x_stride=x.stride(0),
        shared_gate=router.shared_gate,
        correction=router.correction,
        real=real,
        ids=ids,
        weights=weights,
        scaling=rule.scaling,
        experts=experts,
        top_k=rule.top_k,
        sigmoid=rule.scores == "sigmoid",
        by_logits=rule.by_logits,
        normalise=rule.normalise,
        min_sum=rule.min_sum,
        added=rule.added,
        logit_cap=rule.logit_cap,
        groups=groups,
        kept_groups=min(rule.kept_groups, groups),
        best_two=rule.ranked_by == "best_two",
        group_lanes=group_lanes,
        lanes=lanes,
        top_lanes=triton.next_power_of_2(width),
        first_local_expert=router.first_local,
        num_local_experts=experts if router.num_local is None else router.num_local,
        shared=router.shared,
        hidden=x.shape[1],
        gate_lanes=min(GATE_LANES, triton.next_power_of_2(x.shape[1])),
        num_warps=max(1, group_lanes * lanes // WARP_SCORES),
        launch_pdl=early(x),
    )
    return ChosenExperts(ids, weights)
