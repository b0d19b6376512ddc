"""The factors of longrope (Phi-3, Phi-4), chosen once for a model.

Longrope has two sets of factors: short ones for sequences of up to the original context,
long ones for longer sequences. transformers looks at the longest sequence of a call, and
where one grows past the original context while it is generated, computes all its keys
anew, rotated with the long factors. Here many sequences are in a call, and blocks of keys
are shared and kept, so keys must not depend on how long a sequence becomes: an engine
whose context is longer than the original one has the long factors for all positions, as
vLLM has, and any other the short ones. Both are what transformers computes: of every
sequence that is longer than the original context, and of every other. Of shorter ones in
an engine with a longer context, the keys need not be computed twice.
"""

from typing import Any

import torch
import transformers.modeling_rope_utils

from minfer.effects.models.config_reader import UnsupportedModelError


def choose_factors(model: Any, original: int, *, long: bool) -> None:
    """Have a model rotate all positions with its long or its short factors, whose
    sequences have up to `original` tokens. Raises `UnsupportedModelError` if it cannot.
    """
    functions: Any = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        factors, _ = functions["longrope"](
            module.config, module.inv_freq.device, seq_len=original + long
        )
        for name in ("inv_freq", "original_inv_freq"):
            getattr(module, name).copy_(factors)
        module.long_inv_freq = factors
        _check(module, factors, original)


def _check(module: Any, factors: torch.Tensor, original: int) -> None:
    """Raise `UnsupportedModelError` if the module's angles are others than the chosen
    ones, within the original context or behind it.
    """
    for position in (original // 2, 2 * original):
        positions = torch.tensor([[position]], device=factors.device)
        cosines = module(factors.new_zeros(1), positions)[0][0, 0]
        expected = (position * factors).cos() * module.attention_scaling
        if not torch.allclose(cosines[: len(expected)], expected, atol=1e-3):
            name = type(module).__name__
            raise UnsupportedModelError(
                f"{name} of this version of transformers does not take the factors of "
                f"longrope that are chosen; lower max_model_len to {original}"
            )
