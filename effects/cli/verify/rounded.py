"""A reference that rounds the activations of quantized products as a scheme says.

W8A8 and FP8 multiply rounded activations. transformers' model on dequantized matrices
does not round, so its products with these matrices are given rounded inputs: a row, or
each group of a row, is divided by its largest magnitude over the largest number of the
type, rounded to the type, and multiplied back.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minfer.kernels.leaves import Scheme

LARGEST_INT8: Final = 127
EXPERTS: Final = ".experts."


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """Returns activations as a scheme rounds them, in float32: [..., inputs]."""
    size = scheme.group if scheme.activations == "groups" else x.shape[-1]
    padded = F.pad(x.float(), (0, -x.shape[-1] % size))
    wide = padded.view(*x.shape[:-1], padded.shape[-1] // size, size)
    kind: torch.dtype = getattr(torch, scheme.storage)
    is_integer = not kind.is_floating_point
    largest = LARGEST_INT8 if is_integer else torch.finfo(kind).max
    scales = wide.abs().amax(-1, keepdim=True) / largest
    scales = scales.where(scales > 0, 1.0)
    numbers = wide / scales
    numbers = numbers.round() if is_integer else numbers.to(kind).float()
    return (numbers * scales).flatten(-2)[..., : x.shape[-1]]


class RoundedProducts(TorchFunctionMode):
    """Rounds the inputs of products with some parameters of a model, in its context."""

    def __init__(self, model: Any, names: frozenset[str], scheme: Scheme) -> None:
        super().__init__()
        self._scheme = scheme
        # transformers keeps the matrices of a layer's experts in one parameter.
        layers = {name.partition(EXPERTS)[0] for name in names if EXPERTS in name}
        self._storages = {
            parameter.untyped_storage().data_ptr()
            for name, parameter in model.named_parameters()
            if name in names or (EXPERTS in name and name.partition(EXPERTS)[0] in layers)
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        del types
        kwargs = kwargs or {}
        if function is F.linear and not kwargs:
            x, weight, *bias = args
            if weight.untyped_storage().data_ptr() in self._storages:
                args = (rounded(x, self._scheme).to(x.dtype), weight, *bias)
        return function(*args, **kwargs)
