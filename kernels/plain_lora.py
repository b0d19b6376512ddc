"""Adapters' products in plain torch: the CPU's, and the reference of lora.py."""

from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from minfer.kernels.leaves import AdapterSlots, Norm
from minfer.kernels.plain import normalise


@define(eq=False)
class AdapterTokens:
    """The adapters of a step's tokens."""

    slots: Tensor  # [tokens] int32; -1: none
    # How kernels group the tokens, once for all products of the step.
    groups: dict[int, Any] = field(factory=dict, init=False)

    def select(self, tokens: Tensor) -> "AdapterTokens":
        """Returns those of some tokens: `tokens` [selected] are indices."""
        return AdapterTokens(self.slots.index_select(0, tokens))


def add_lora(
    out: Tensor,
    x: Tensor,
    adapters: AdapterSlots,
    tokens: AdapterTokens,
    norm: Norm | None = None,
) -> None:
    """Add normalise(x) @ A.T @ B.T of each token's adapter to `out` [tokens, outputs], in
    place; x [tokens, inputs]; without a norm, of rows as they are.
    """
    x = x if norm is None else normalise(x, norm)
    add_to_rows(out, x, adapters, tokens.slots)


def add_to_rows(
    out: Tensor,
    x: Tensor,
    adapters: AdapterSlots,
    slots: Tensor,
    experts: Tensor | None = None,
) -> None:
    """Add as `add_lora` does, in float32. Each row has a slot; `experts` [rows]: and an
    expert, whose matrices it is multiplied with.
    """
    keys = slots[:, None] if experts is None else torch.stack((slots, experts), 1)
    for key in torch.unique(keys, dim=0).tolist():
        slot, *expert = key
        if min(key) < 0:
            continue
        rows = (keys == keys.new_tensor(key)).all(1).nonzero()[:, 0]
        inputs = x.index_select(0, rows).float()
        lora_a, lora_b = adapters.lora_a[slot], adapters.lora_b[slot]
        if expert:
            lora_a, lora_b = lora_a[expert[0]], lora_b[expert[0]]
        first = 0
        for part, (outputs, rank) in enumerate(
            zip(adapters.parts, adapters.ranks[slot].tolist(), strict=True)
        ):
            columns = slice(first, first + outputs)
            first += outputs
            if not rank:
                continue
            start = part * adapters.rank
            shrunk = inputs @ lora_a[start : start + rank].float().T
            added = shrunk @ lora_b[:rank, columns].float()
            out[:, columns].index_add_(0, rows, added.to(out.dtype))
