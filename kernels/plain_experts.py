"""Mixtures of experts in plain torch: the CPU's, and the kernels' references."""

from bisect import bisect_left
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels import plain, quantized
from minfer.kernels.leaves import ChosenExperts, ExpertRouter, Experts, Linear
from minfer.kernels.plain import gated_mul
from minfer.kernels.plain_lora import AdapterTokens, add_to_rows


def route(x: Tensor, router: ExpertRouter, real: Tensor | None = None) -> ChosenExperts:
    """Choose the experts of normalised tokens `x` [tokens, hidden]. `real` [tokens] bool
    is False for padding, which gets no expert. Of equal scores the lower id is chosen.
    """
    rule, kind = router.rule, router.weight.dtype
    logits = F.linear(x.to(kind), router.weight, router.bias).float()
    if rule.logit_cap:
        logits = torch.tanh(logits / rule.logit_cap) * rule.logit_cap
    scores = logits.sigmoid() if rule.scores == "sigmoid" else logits.softmax(-1)
    ranked = logits if rule.by_logits else scores
    if router.correction is not None:
        ranked = ranked + router.correction
    if rule.groups > rule.kept_groups:
        by_group = ranked.view(len(ranked), rule.groups, ranked.shape[1] // rule.groups)
        best = by_group.topk(1 + (rule.ranked_by == "best_two"), -1).values.sum(-1)
        best_groups = _best_ids(best, rule.kept_groups)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best_groups, True)
        ranked = by_group.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    ids = _best_ids(ranked, rule.top_k)
    weights = scores.gather(1, ids)
    if rule.normalise:
        total = weights.sum(-1, keepdim=True)
        total = total.clamp(min=rule.min_sum) if rule.min_sum else total + rule.added
        weights = weights / total
    ids = ids.int()
    if router.num_local is not None:
        ids = ids - router.first_local
        ids = ids.where((ids >= 0) & (ids < router.num_local), -1)
    weights = weights * rule.scaling
    if router.shared:
        ids = F.pad(ids, (0, 1), value=len(router.weight))
        weights = torch.cat([weights, _shared_weights(x, router)], 1)
    if real is not None:
        ids = ids.where(real[:, None], -1)
    return ChosenExperts(ids, weights)


def _shared_weights(x: Tensor, router: ExpertRouter) -> Tensor:
    """Returns the weight [tokens, 1] of the shared expert."""
    if router.shared_gate is None:
        return x.new_ones(len(x), 1, dtype=torch.float32)
    return F.linear(x.float(), router.shared_gate.float()).sigmoid()


def _best_ids(scores: Tensor, count: int) -> Tensor:
    """Returns the ids of the largest scores, of equal ones the lowest."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :count]


def add_experts(
    residual: Tensor,
    x: Tensor,
    experts: Experts,
    choice: ChosenExperts,
    adapters: AdapterTokens | None = None,
) -> None:
    """Add to `residual` [tokens, hidden] the weighted sum of each token's experts of `x`
    [tokens, hidden]: two products for each expert that is hit, of the tokens that chose
    it; all else is done for all pairs of token and expert at once. `adapters` of the
    tokens add to the products of their experts.
    """
    chosen, order = choice.ids.flatten().sort(stable=True)
    ids = chosen.tolist()
    padding = bisect_left(ids, 0)
    if padding == len(ids):
        return
    hit = [(expert, len([*run])) for expert, run in groupby(ids[padding:])]
    order = order[padding:]
    tokens = order // choice.ids.shape[1]
    inputs, weights = x.index_select(0, tokens), choice.weights.flatten()[order, None]
    if experts.weighs_inputs:
        inputs.mul_(weights.to(inputs.dtype))
    pair_slots = None if adapters is None else adapters.slots[tokens]
    gates = _products(inputs, experts.gate_up, hit, pair_slots)
    inner = gated_mul(gates, experts.activation)
    outputs = _products(inner, experts.down, hit, pair_slots).float()
    if not experts.weighs_inputs:
        outputs.mul_(weights)
    total = torch.zeros_like(residual, dtype=torch.float32)
    residual.add_(total.index_add_(0, tokens, outputs))


prepare = quantized.prepare  # of experts' matrices, each by itself


def _products(
    x: Tensor,
    matrices: Linear,
    hit: list[tuple[int, int]],
    slots: Tensor | None = None,
) -> Tensor:
    """Returns the products of rows [pairs, inputs] with their experts' matrices. `hit`
    has each expert and the number of its pairs, in the order of the rows; `slots`
    [pairs]: the rows' adapters.
    """
    product = plain.linear if matrices.scheme.is_plain else quantized.linear
    rows_by_expert = x.split_with_sizes([count for _, count in hit])
    products = [
        product(expert_rows, matrices.select(expert))
        for (expert, _), expert_rows in zip(hit, rows_by_expert, strict=True)
    ]
    product_rows = torch.cat(products)
    if slots is not None and matrices.adapters is not None:
        ids, counts = x.new_tensor(hit, dtype=torch.int64).unbind(1)
        pair_experts = torch.repeat_interleave(ids, counts).to(slots.dtype)
        add_to_rows(product_rows, x, matrices.adapters, slots, pair_experts)
    return product_rows
