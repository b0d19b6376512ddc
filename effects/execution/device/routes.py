"""Which kernel serves what on a device: a table decided by measurement.

Decode rows always use Triton's kernels: in blocks of 64, flash-attn took 1.02 to 2.6
times as long at batches of 32 to 256 (H200, 2026-11-20). Prefill chunks use flash-attn
from some length on, and products of gate and up use quack, where these packages are
installed and support the model.
"""

from typing import Final

import torch
from attrs import frozen

from minfer.effects.models.dense import Dense
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.gqa import GQA
from minfer.effects.models.shapes import captured_tokens
from minfer.effects.models.spec import ModelSpec
from minfer.kernels.flash import flash_missing
from minfer.kernels.gated import FILLED
from minfer.kernels.packages import QUACK, missing

# For heads of up to 64 dimensions, and wider ones; for fewer inputs Triton is as fast,
# and starts sooner.
FLASH_FROM: Final = (2048, 512)


@frozen(kw_only=True)
class Routes:
    """Which kernel serves which part of a step."""

    # Inputs of the longest chunk from which flash-attn serves chunks; 0: never.
    flash_from: int = 0
    # Inputs of a step up to which a CUDA graph is better, which cannot contain
    # flash-attn. Without graphs flash-attn does not serve those steps either, so results
    # are the same.
    captured: int = 0
    no_flash: str = ""  # why flash-attn never serves
    no_quack: str = ""  # why quack never serves products of gate and up
    fused_width: int = 0  # width of the dense feed-forwards that quack may serve

    @classmethod
    def for_device(
        cls, spec: ModelSpec, block_size: int, budget: int, device: torch.device | str
    ) -> "Routes":
        """Returns what the device, the installed packages and steps of `budget` inputs
        allow.
        """
        dtype = torch_dtype(spec.dtype)
        captured, groups = captured_tokens(spec, budget), spec.groups
        heads = [one.attention for one in groups if isinstance(one.attention, GQA)]
        feeds = [layer.feed_forward for layer in spec.layers]
        dense = [one for one in feeds if isinstance(one, Dense)]
        widest = max(group.attention.query_dim for group in groups)
        no_flash = flash_missing(widest, dtype, block_size, torch.device(device))
        if len(heads) < len(groups):
            no_flash = "it does not read latents"
        elif any(one.sinks for one in heads):
            no_flash = "it has no attention sinks"
        elif any(spec.windows):
            no_flash = (
                "it reads before sliding windows what may belong to another sequence"
            )
        elif not no_flash and captured >= budget:
            no_flash = (
                "all steps are small enough for CUDA graphs, which it cannot be part of"
            )
        no_quack = _no_quack(dense) or missing(QUACK, dtype, torch.device(device))
        return cls(
            flash_from=0 if no_flash else FLASH_FROM[widest > 64],
            captured=captured,
            no_flash=no_flash,
            no_quack=no_quack,
            fused_width=max((one.intermediate_size for one in dense), default=0),
        )

    def described(self) -> list[tuple[str, str]]:
        """Returns lines for `minfer plan`."""
        chunks = f"Triton; no flash-attn: {self.no_flash}"
        if not self.no_flash:
            chunks = f"flash-attn from {self.flash_from} tokens of a prompt at once "
            chunks += f"in steps of more than {self.captured}, else Triton"
        activation = (
            f"quack where its tiles are {FILLED:.0%} full, else cuBLAS and Triton"
        )
        if self.no_quack:
            activation = f"cuBLAS and Triton; no quack: {self.no_quack}"
        return [
            ("decode attention", "Triton, split-KV"),
            ("prefill attention", chunks),
            ("gate, up and SiLU", activation),
        ]


def _no_quack(dense: list[Dense]) -> str:
    """Returns why quack cannot serve these feed-forwards; empty if it can."""
    if not dense:
        return "all layers are mixtures of experts"
    if any(one.bias for one in dense):
        return "it adds no biases"
    if any(one.activation != "silu" for one in dense):
        return "the activation is not silu"
    return ""
