"""Mixtures of experts in plain torch: the CPU's, and the kernels' references."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels.leaves import Choice, Experts, Router
from minfer.kernels.plain import gated_mul


def route(x: Tensor, router: Router, real: Tensor | None = None) -> Choice:
    """Choose the experts of normalised tokens `x` [tokens, hidden]. `real` [tokens] bool
    is False for padding, which gets no expert. Of equal scores the lower id is chosen.
    """
    rule, kind = router.rule, router.weight.dtype
    logits = F.linear(x.to(kind), router.weight, router.bias).float()
    scores = logits.sigmoid() if rule.scores == "sigmoid" else logits.softmax(-1)
    ranked = scores if router.correction is None else scores + router.correction
    if rule.groups > rule.kept_groups:
        by_group = ranked.view(len(ranked), rule.groups, ranked.shape[1] // rule.groups)
        best = by_group.topk(1 + (rule.ranked_by == "best_two"), -1).values.sum(-1)
        kept = _first_of(best, rule.kept_groups)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        ranked = by_group.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    ids = _first_of(ranked, rule.top_k)
    weights = scores.gather(1, ids)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    ids = ids.int()
    if real is not None:
        ids = ids.where(real[:, None], -1)
    return Choice(ids, weights * rule.scaling)


def _first_of(scores: Tensor, count: int) -> Tensor:
    """Returns the ids of the largest scores, of equal ones the lowest."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :count]


def add_experts(residual: Tensor, x: Tensor, experts: Experts, choice: Choice) -> None:
    """Add to `residual` [tokens, hidden] the weighted sum of each token's experts of `x`
    [tokens, hidden], one expert at a time, with the tokens that chose it.
    """
    chosen = choice.ids.flatten()
    order = chosen.argsort(stable=True)
    hit, counts = torch.unique(chosen, return_counts=True)
    weights, top_k = choice.weights.flatten(), choice.ids.shape[1]
    total = torch.zeros_like(residual, dtype=torch.float32)
    for expert, places in zip(
        hit.tolist(), torch.split(order, counts.tolist()), strict=True
    ):
        if expert < 0:
            continue
        tokens = places // top_k
        own = expert_feed(x[tokens], experts, expert).float()
        total.index_add_(0, tokens, own * weights[places, None])
    residual.add_(total)


def expert_feed(x: Tensor, experts: Experts, expert: int) -> Tensor:
    """Returns one expert's feed-forward of `x` [tokens, hidden]."""
    up_bias, down_bias = (
        None if bias is None else bias[expert]
        for bias in (experts.gate_up_bias, experts.down_bias)
    )
    inner = gated_mul(F.linear(x, experts.gate_up[expert], up_bias), experts.activation)
    return F.linear(inner, experts.down[expert], down_bias)
