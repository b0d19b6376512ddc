"""The experts of each token, out of a router's logits.

Theory. Routing is a chain of some twenty small operations in torch (scores, groups, a
sort, weights), whose launches would take longer than the experts of one token. Here the
logits are a product like others (fused_linear.py), and all else is one launch with a
program of one warp a token, which has its scores in registers, in a row for each group. A
score's *rank* is an integer of 32 bits, of which a warp finds the largest in one
instruction. Top-k takes k maxima, one after the other, each the lowest id of the largest
rank; so each id is chosen once, NaN or not. A sort would take longer for any k up to 16.
The scores of those chosen are computed again, out of their logits: that is less than to
find them in each of the k steps. Groups have *keys*, the rank and then the inverted
place. A token's choice depends on its logits alone.

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
NO_KEY = tl.constexpr(-(2**63))  # less than every key
NO_RANK = tl.constexpr(-(2**31))  # less than every rank
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _rank(score):
    """Integers that are ordered as scores are: 0 and -0 are equal."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_RANK + 1)


@triton.jit
def _key(score, ids):
    """The keys of ids with these scores: the larger is the better one's."""
    return (_rank(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _scores(logit, largest, total, sigmoid: tl.constexpr):
    """Sigmoid or softmax, of which these are the largest logit and the sum of powers."""
    return 1 / (1 + tl.exp(-logit)) if sigmoid else tl.exp(logit - largest) / total


@triton.jit
def _capped(logit, cap: tl.constexpr):
    """tanh(logit / cap) * cap; a cap of 0 is none."""
    if cap > 0:  # tanh(y) = 2 * sigmoid(2 * y) - 1
        logit = cap * (2 / (1 + tl.exp(logit * (-2 / cap))) - 1)
    return logit


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
    keys = tl.where(mask, _key(ranked, place), NO_KEY)
    best = tl.max(keys, 1)[:, None]
    score = tl.sum(tl.where(keys == best, ranked, 0.0), 1)
    if best_two:
        keys = tl.where(keys == best, NO_KEY, keys)
        best = tl.max(keys, 1)[:, None]
        score += tl.sum(tl.where((keys == best) & mask, ranked, 0.0), 1)
    keys = tl.where(group < groups, _key(score, group), NO_KEY)
    is_kept = group < 0
    for _ in tl.static_range(kept_groups):
        best = tl.max(keys, 0)
        is_kept = is_kept | (keys == best)
        keys = tl.where(keys == best, NO_KEY, keys)
    return is_kept[:, None]


@triton.jit
def _parts(row, hidden: tl.constexpr, gate_lanes: tl.constexpr):
    """A row, or None, in parts."""
    parts = ()
    for first in tl.static_range(0, 0 if row is None else hidden, gate_lanes):
        lane = first + tl.arange(0, gate_lanes)
        part = tl.load(row + lane, mask=lane < hidden, other=0.0)
        parts += (part,)  # type: ignore[assignment]  # a tuple of Triton grows
    return parts


@triton.jit
def _shared_weight(row, gate, hidden: tl.constexpr, gate_lanes: tl.constexpr):
    """The weight of the shared expert, of whose gate these are the parts: 1 without."""
    weight = 1.0
    if len(gate) > 0:
        x = _parts(row, hidden, gate_lanes)
        acc = tl.zeros([gate_lanes], tl.float32)
        tl.debug_barrier()  # before it all are loaded: later each would cost a latency
        for i in tl.static_range(len(gate)):
            acc += x[i].to(tl.float32) * gate[i].to(tl.float32)
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
    gate = _parts(shared_gate, hidden, gate_lanes)
    follow()
    token = tl.program_id(0).to(tl.int64)
    if shared:
        share = _shared_weight(x + token * x_stride, gate, hidden, gate_lanes)
    experts_per_group: tl.constexpr = experts // groups
    group = tl.arange(0, group_lanes)[:, None]
    lane = tl.arange(0, lanes)[None, :]
    expert = group * experts_per_group + lane
    mask = (group < groups) & (lane < experts_per_group)
    line = logits + token * experts
    logit = tl.load(line + expert, mask=mask, other=NEVER).to(tl.float32)
    logit = tl.where(mask, _capped(logit, logit_cap), NEVER)
    largest, powers = 0.0, 1.0
    if not sigmoid:
        largest = tl.max(logit)
        powers = tl.sum(tl.exp(logit - largest))
    scores = _scores(logit, largest, powers, sigmoid)
    ranked = logit if by_logits else scores
    if correction is not None:
        ranked += tl.load(correction + expert, mask=mask, other=0.0)
    if groups > kept_groups:
        group_mask = _best_groups(ranked, mask, groups, kept_groups, best_two)
        ranked = tl.where(group_mask, ranked, NEVER)
    rank = tl.where(mask, _rank(ranked), NO_RANK)
    top = tl.arange(0, top_lanes)
    chosen = tl.zeros([top_lanes], tl.int32)
    for i in tl.static_range(top_k):
        best = tl.min(tl.where(rank == tl.max(rank), expert, experts))
        rank = tl.where(expert == best, NO_RANK, rank)
        chosen = tl.where(top == i, best, chosen)
    chosen_logit = _capped(tl.load(line + chosen).to(tl.float32), logit_cap)
    chosen_scores = _scores(chosen_logit, largest, powers, sigmoid)
    total = tl.sum(tl.where(top < top_k, chosen_scores, 0.0))
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
