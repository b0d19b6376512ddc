"""The experts of one rank, by three ways to bring tokens to them, on one GPU.

    python -m bench.expert_dispatch_gpu --ranks 1 2 4

Qwen3-30B-A3B's experts (128, of which a token has 8), divided by whole experts; tokens
are on all ranks, so a rank computes its own experts of all of them, and the parts are
summed (`bench.ranks_gpu` has the sums). Random weights and choices; us of a layer in a
CUDA graph over several layers, so that weights come from memory.

    dense      every expert of the rank computes every token; weights of 0 drop the others
    packed     the tokens of each expert are gathered and padded to the most that one has,
               a number that is known here, and would have to be waited for
    grouped    minfer's kernels: tiles of the tokens of one expert each (experts.py)

The floor is the bytes of the experts that are hit, at the bandwidth that a copy has here.
"""

import argparse
from functools import partial
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from bench.gpu_times import microseconds
from bench.layers_gpu import SHAPES
from bench.ranks_gpu import bandwidth
from bench.results import run, show
from minfer.kernels.activation import gated_mul
from minfer.kernels.experts import add_experts
from minfer.kernels.leaves import ChosenExperts, Experts, Linear

SHAPE: Final = SHAPES["moe"]
HIDDEN, INNER = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
ALL, TOP_K = SHAPE["num_experts"], SHAPE["num_experts_per_tok"]
KIND: Final = torch.bfloat16
MIN_COLD_BYTES: Final = 3e8  # bytes of weights that a graph reads, at least
TOLERANCE: Final = 0.02  # relative error of bfloat16


@frozen(eq=False)
class Case:
    """The tokens of a layer, and which of them this rank's experts compute."""

    x: Tensor  # [tokens, hidden]
    choice: ChosenExperts
    mixed: Tensor  # [experts, tokens, 1]: the weight of each, 0 if it is not chosen
    packed: Tensor  # [experts, most]: tokens, padded with any
    shares: Tensor  # [experts, most, 1]: their weights, 0 for padding
    hit: int  # experts

    @classmethod
    def of(cls, tokens: int, num_experts: int) -> "Case":
        """Random choices of tokens among all experts, of which the rank has the first."""
        draw = torch.Generator("cuda").manual_seed(tokens + num_experts)
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=draw).to(KIND)
        scores = torch.rand(tokens, ALL, device="cuda", generator=draw)
        weights, ids = scores.topk(TOP_K)
        weights /= weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(scores).scatter_(1, ids, weights)[:, :num_experts].t()
        max_tokens = int((mixed > 0).sum(1).max())
        shares, packed = mixed.sort(dim=1, descending=True, stable=True)
        return cls(
            x,
            ChosenExperts(ids.int().where(ids < num_experts, -1), weights),
            mixed[:, :, None].contiguous(),
            packed[:, :max_tokens].contiguous(),
            shares[:, :max_tokens, None].contiguous(),
            int((mixed > 0).any(1).sum()),
        )


def dense(residual: Tensor, case: Case, experts: Experts) -> None:
    """Every expert computes every token."""
    inner = torch.matmul(case.x, experts.gate_up.weight.transpose(1, 2))
    inner = gated_mul(inner.flatten(0, 1)).view(len(inner), -1, INNER)
    out = torch.bmm(inner, experts.down.weight.transpose(1, 2))
    residual.add_((out * case.mixed).sum(0))


def packed(residual: Tensor, case: Case, experts: Experts) -> None:
    """The tokens of each expert, padded."""
    count, max_tokens = case.packed.shape
    x = case.x.index_select(0, case.packed.flatten()).view(count, max_tokens, HIDDEN)
    inner = torch.bmm(x, experts.gate_up.weight.transpose(1, 2))
    inner = gated_mul(inner.flatten(0, 1)).view(count, max_tokens, INNER)
    out = torch.bmm(inner, experts.down.weight.transpose(1, 2)) * case.shares
    residual.index_add_(0, case.packed.flatten(), out.flatten(0, 1).to(KIND))


def grouped(residual: Tensor, case: Case, experts: Experts) -> None:
    """minfer's kernels."""
    add_experts(residual, case.x, experts, case.choice)


WAYS: Final = {"dense": dense, "packed": packed, "grouped": grouped}


def leaf(num_experts: int) -> Experts:
    """Random experts."""

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=KIND).div_(shape[-1] ** 0.5)

    return Experts(
        gate_up=Linear(
            weight=matrix(num_experts, 2 * INNER, HIDDEN), parts=(INNER, INNER)
        ),
        down=Linear(weight=matrix(num_experts, HIDDEN, INNER), parts=(HIDDEN,)),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each number of ranks, and of tokens."""
    speed = bandwidth()
    results: dict[str, Any] = {"card": torch.cuda.get_device_name(), "bytes/s": speed}
    for ranks in args.ranks:
        num_experts = ALL // ranks
        expert_bytes = 3 * INNER * HIDDEN * KIND.itemsize  # bytes of an expert
        layers = [
            leaf(num_experts)
            for _ in range(1 + int(MIN_COLD_BYTES / (num_experts * expert_bytes)))
        ]
        for tokens in args.tokens:
            case = Case.of(tokens, num_experts)
            outputs, us = dict[str, Tensor](), dict[str, float]()
            for name, way in WAYS.items():
                outputs[name] = torch.zeros_like(case.x)
                way(outputs[name], case, layers[0])
                out = torch.zeros_like(case.x)
                us[name] = microseconds(
                    [partial(way, out, case, layer) for layer in layers]
                )
            right = outputs["dense"].float()
            for name, output in outputs.items():
                error = float((output.float() - right).norm() / right.norm())
                if error > TOLERANCE:
                    raise RuntimeError(f"{name} is wrong by {error:.3f}")
            floor = 1e6 * case.hit * expert_bytes / speed
            figures = {
                "us": us,
                "hit": case.hit,
                "floor, us": floor,
                "grouped of floor": us["grouped"] / floor,
                "dense / grouped": us["dense"] / us["grouped"],
                "packed / grouped": us["packed"] / us["grouped"],
            }
            show({f"{ranks} ranks, {tokens} tokens": figures})
            results[f"{ranks} ranks, {tokens} tokens"] = figures
    return results


if __name__ == "__main__":
    numbers = {"type": int, "nargs": "+"}
    run(
        "expert_dispatch_gpu",
        measure,
        {
            "--ranks": {**numbers, "default": [1, 2, 4]},
            "--tokens": {**numbers, "default": [8, 64, 256, 2048]},
        },
    )
