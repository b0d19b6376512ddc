"""How far logits may be from each other; test_command.py damages models and minfer."""

import torch

from minfer.effects.cli.verify import logit_differences


def test_half_precision_that_is_worse_than_it_must_be_is_found() -> None:
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(9, 50, generator=draw) for _ in range(2)]
    noise = [0.01 * torch.randn(9, 50, generator=draw) for _ in range(2)]
    reference = [e + n for e, n in zip(exact, noise, strict=True)]
    assert logit_differences.check_half(exact, reference, reference).state == "pass"
    computed = [e + 10 * n for e, n in zip(exact, noise, strict=True)]
    assert logit_differences.check_half(exact, computed, reference).state == "fail"
