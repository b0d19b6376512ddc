"""Compile the kernels of adapters for a Hopper GPU where there is none, as `compiles.py`
does others: `python -m tests.kernels.compiles_lora`: of a 7B's queries, keys and values,
and of the experts of Qwen3-30B-A3B. With `--few`, of the smallest rank.
"""

import sys
from typing import Final

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minfer import kernels
from minfer.kernels import experts, lora
from minfer.kernels.leaves import AdapterSlots, ChosenExperts, Experts, Linear, Norm
from minfer.kernels.plain_lora import AdapterTokens

from .compiles import HOPPER, compiled, half
from .specialization import Elsewhere

HIDDEN, PARTS, SLOTS = 3584, (3584, 512, 512), 8
EXPERTS, TOP_K, EXPERT_HIDDEN, INTER = 128, 8, 2048, 768
RANKS: Final = (16, 64, 256)
# Rows of programs of their own, of a decode step, and of prompts.
ROWS: Final = (1, 32, 4096)


def slots(rank: int, inputs: int, parts: tuple[int, ...], *experts: int) -> AdapterSlots:
    return AdapterSlots(
        lora_a=half(SLOTS, *experts, len(parts) * rank, inputs),
        lora_b=half(SLOTS, *experts, rank, sum(parts)),
        ranks=torch.zeros(SLOTS, len(parts), dtype=torch.int32),
        parts=parts,
    )


def main(skip_slow: bool) -> None:
    driver.set_active(Elsewhere(HOPPER))
    JITFunction.run = compiled
    kernels.interpreting = True  # kernels take tensors of the CPU
    for rank in RANKS[: 1 if skip_slow else None]:
        for rows in ROWS:
            tokens = AdapterTokens(torch.zeros(rows, dtype=torch.int32))
            of_qkv = slots(rank, HIDDEN, PARTS)
            lora.add_lora(half(rows, sum(PARTS)), half(rows, HIDDEN), of_qkv, tokens)
            norm = Norm(half(HIDDEN), 1e-6)
            x = half(rows, HIDDEN)
            lora.add_lora(half(rows, sum(PARTS)), x, of_qkv, tokens, norm)
    for count in (1, 32):
        mixture(count)


def mixture(tokens: int) -> None:
    gate_up = Linear(
        weight=half(EXPERTS, 2 * INTER, EXPERT_HIDDEN),
        parts=(INTER, INTER),
        adapters=slots(16, EXPERT_HIDDEN, (INTER, INTER), EXPERTS),
    )
    down = Linear(
        weight=half(EXPERTS, EXPERT_HIDDEN, INTER),
        parts=(EXPERT_HIDDEN,),
        adapters=slots(16, INTER, (EXPERT_HIDDEN,), EXPERTS),
    )
    choice = ChosenExperts(
        torch.zeros(tokens, TOP_K, dtype=torch.int32), torch.zeros(tokens, TOP_K)
    )
    experts.add_experts(
        half(tokens, EXPERT_HIDDEN),
        half(tokens, EXPERT_HIDDEN),
        Experts(gate_up=gate_up, down=down),
        choice,
        adapters=AdapterTokens(torch.zeros(tokens, dtype=torch.int32)),
    )


if __name__ == "__main__":
    main(skip_slow="--few" in sys.argv)
